"""What can be said of a set's merges without data, and of its updates: numbers that might rank methods."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import covmerge
from covmerge import LinearGroup
from covmerge.maths.measures.retention import along
from covmerge.maths.measures.spectrum import Spectrum
from covmerge.methods import registry
from covmerge_lab.bank import pretraining, rules, scoring
from covmerge_lab.bank.cards import Card

# Their annotations are partial.
_linalg: Any = torch.linalg
_np: Any = np
OF_EXPERTS = (
    *("retention", "nearness", "along", "cosine", "output cosine", "base retention"),
)  # each has a value for every expert; a merge's is the mean over experts
WORST = ("retention", "cosine")  # and the smallest over experts
OF_MERGES = ("as long as one", "short", "flat", "medoid", "central")
CRITERIA = (*OF_EXPERTS, *(f"worst {name}" for name in WORST), *OF_MERGES)
FEATURES = ("alike", "rows", "columns", "rank", "size")  # each has a value for every matrix
_FAULTS = ("not-a-fine-tune", "unchanged-expert")  # what a merge may be that is taken for an expert
_LONGEST = 4.0  # the logarithm of a length that stands for "much longer or shorter"


def score(card: Card, cache: Path) -> None:
    """Measure the merges of a set that are kept; what was measured before is kept."""
    path = cache / "bank" / "scores" / f"{card.name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    folders = {m: scoring.merged_folder(card, cache, m) for m in scoring.KEPT}
    kept = {m: f for m, f in folders.items() if f.exists() and not m.startswith(rules.PREFIX)}
    if "criteria" in found:
        return
    experts = scoring.models(card, cache)
    seen = _Seen(len(experts))
    base = pretraining.folder_of(scoring.BY_NAME[card.base], cache)
    covmerge.register("bank_criteria", equation="0", needs_base=True)(seen.look)
    try:
        with tempfile.TemporaryDirectory() as work:
            models = {**experts, **{f"merge-{place}": f for place, f in enumerate(kept.values())}}
            out = Path(work) / "mean"
            covmerge.merge(base, models, "bank_criteria", out, allow=_FAULTS)
    finally:
        registry.unregister("bank_criteria")
    found = json.loads(path.read_text()) | seen.account(list(experts), list(kept))
    path.write_text(json.dumps(found, indent=1) + "\n")


class _Seen:
    """What was seen of each matrix of the experts and of their merges."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.matrices: list[tuple[dict[str, Any], dict[str, float], list[float]]] = []

    def look(self, group: LinearGroup) -> Tensor:
        """Look at a matrix, as a method does; its merge is the mean of all."""
        wide = [update.double() for update in group.updates]
        updates, merges = wide[: self.experts], wide[self.experts :]
        if group.base is not None and any(m.any() for m in merges):
            base = group.base.double()
            lengths = [float(_linalg.vector_norm(update)) for update in updates]
            measured = measure(updates, merges, base)
            self.matrices.append((measured, features(updates, base), lengths))
        return torch.stack(group.updates).mean(dim=0)

    def account(self, experts: Sequence[str], merges: Sequence[str]) -> dict[str, Any]:
        """Return criteria by merge, features, and experts' lengths; nothing where no matrix is merged."""
        if not self.matrices:
            return {"criteria": {}, "features": {}, "lengths": {}}
        tables = [measured for measured, _, _ in self.matrices]
        values: dict[str, Any] = {}
        for name in OF_EXPERTS:
            by_expert = _np.nanmean([table[name] for table in tables], axis=0)
            values[name] = _np.nanmean(by_expert, axis=0)
            if name in WORST:
                values[f"worst {name}"] = _np.nanmin(by_expert, axis=0)
        for name in OF_MERGES:
            values[name] = _np.mean([table[name] for table in tables], axis=0)
        means = {
            name: float(_np.mean([own[name] for _, own, _ in self.matrices])) for name in FEATURES
        }
        lengths = _np.sqrt(_np.square([own for _, _, own in self.matrices]).sum(axis=0))
        return {
            "criteria": {
                merge: {name: float(values[name][place]) for name in CRITERIA}
                for place, merge in enumerate(merges)
            },
            "features": means,
            "lengths": dict(zip(experts, lengths.tolist(), strict=True)),
        }


def measure(updates: Sequence[Tensor], merges: Sequence[Tensor], base: Tensor) -> dict[str, Any]:
    """Return each criterion of one matrix: of experts `(experts, merges)`, of merges `(merges,)`.

    An expert that did not change the matrix has NaN.
    """
    stack, root = torch.stack(list(merges)), _root(base)
    of_base = stack @ root.T
    rows = [_of_expert(update, stack, root, of_base) for update in updates]
    found: dict[str, Any] = {name: _np.array([row[name] for row in rows]) for name in OF_EXPERTS}
    lengths = [float(_linalg.vector_norm(update)) for update in updates if update.any()]
    own = [float(_linalg.vector_norm(merge)) for merge in merges]
    one, whole = sum(lengths) / max(1, len(lengths)), sum(lengths)
    flat = stack.flatten(1)
    unit: Any = flat / _linalg.vector_norm(flat, dim=1, keepdim=True).clamp_min(1e-300)
    cosines: Any = unit @ unit.T
    mean = flat.mean(dim=0)
    apart = _linalg.vector_norm(flat - mean, dim=1)
    others = max(1, len(merges) - 1)
    return found | {
        "as long as one": [-_apart(size, one) for size in own],
        "short": [-size / (whole or 1.0) for size in own],
        "flat": [_rank(merge) for merge in merges],
        "medoid": ((cosines.sum(dim=1) - cosines.diagonal()) / others).tolist(),
        "central": (-apart / _linalg.vector_norm(mean).clamp_min(1e-300)).tolist(),
    }


def features(updates: Sequence[Tensor], base: Tensor) -> dict[str, float]:
    """Return what a selector sees of one matrix; 0 where fewer than two experts changed it.

    `alike` is the mean cosine of two updates, `rows` and `columns` that of ΔᵀΔ and of ΔΔᵀ, `rank` the
    mean effective rank as a share, `size` the logarithm of the mean length beside ‖W₀‖.
    """
    changed = [update for update in updates if update.any()]
    if len(changed) < 2:
        return dict.fromkeys(FEATURES, 0.0)
    size = sum(float(_linalg.vector_norm(update)) for update in changed) / len(changed)
    return {
        "alike": _mean_cosine(changed),
        "rows": _mean_cosine([update.T @ update for update in changed]),
        "columns": _mean_cosine([update @ update.T for update in changed]),
        "rank": sum(map(_rank, changed)) / len(changed),
        "size": log(size / max(float(_linalg.vector_norm(base)), 1e-12)),
    }


def _of_expert(update: Tensor, merges: Tensor, base: Tensor, of_base: Tensor) -> dict[str, Any]:
    """Return criteria of every merge `(merges, d_out, d_in)` for one expert; `base` is a root of W₀ᵀW₀."""
    if not update.any():
        return dict.fromkeys(OF_EXPERTS, [float("nan")] * len(merges))
    root = _root(update)
    plain, seen = _Inner.of(merges, update), _Inner.of(merges @ root.T, update @ root.T)
    through_base = _Inner.of(of_base, update @ base.T)
    shares: list[float] = _np.asarray(plain.dots / plain.update).tolist()
    return {
        "retention": _np.asarray(seen.kept().clamp_min(0.0)).tolist(),
        "nearness": _np.asarray(plain.kept()).tolist(),
        "along": [along(share) for share in shares],
        "cosine": _np.asarray(plain.cosines()).tolist(),
        "output cosine": _np.asarray(seen.cosines()).tolist(),
        "base retention": _np.asarray(through_base.kept().clamp_min(0.0)).tolist(),
    }


@dataclass(frozen=True)
class _Inner:
    """Products of merges with an update, with what they do on some rows or as they are.

    Attributes:
        merges: ‖M‖² `(merges,)`.
        dots: ⟨M, Δ⟩ `(merges,)`.
        update: ‖Δ‖².
    """

    merges: Tensor
    dots: Tensor
    update: float

    @classmethod
    def of(cls, merges: Tensor, update: Tensor) -> _Inner:
        dots = (merges * update).sum(dim=(1, 2))
        return cls(merges.square().sum(dim=(1, 2)), dots, float(update.square().sum()))

    def kept(self) -> Tensor:
        """1 − ‖M − Δ‖² / ‖Δ‖²."""
        return (2.0 * self.dots - self.merges) / max(self.update, 1e-300)

    def cosines(self) -> Tensor:
        return self.dots / (self.merges * self.update).sqrt().clamp_min(1e-300)


def _root(matrix: Tensor) -> Tensor:
    """Return a matrix R with RᵀR = WᵀW, of no more rows than columns."""
    d_out, d_in = matrix.shape
    return matrix if d_out <= d_in else _linalg.qr(matrix, mode="r")[1]


def _mean_cosine(matrices: Sequence[Tensor]) -> float:
    flat = torch.stack([matrix.flatten() for matrix in matrices])
    unit: Any = flat / _linalg.vector_norm(flat, dim=1, keepdim=True)
    count = len(matrices)
    return (float((unit @ unit.T).sum()) - count) / (count * (count - 1))


def _rank(matrix: Tensor) -> float:
    root = _root(matrix)
    values = _linalg.eigvalsh(root @ root.T).clamp_min(0.0).sqrt()
    return Spectrum(values, matrix[:0]).effective_rank / min(matrix.shape)


def _apart(size: float, one: float) -> float:
    return min(_LONGEST, abs(log(size / one))) if size and one else _LONGEST
