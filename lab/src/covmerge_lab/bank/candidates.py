"""Candidates for a default: means of merged models, scored like methods."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

import covmerge
from covmerge import LinearGroup
from covmerge.methods import registry
from covmerge_lab.bank import pretraining, rules, scoring
from covmerge_lab.bank.cards import Card

# Their annotations are partial.
_files: Any = safetensors.torch
_linalg: Any = torch.linalg
WEIGHTS = "model.safetensors"
Others = Literal["averaged", "other tensors too", "others summed", "others by lengths"]


@dataclass(frozen=True)
class Mean:
    """A mean of merges that are kept.

    Attributes:
        methods: whose merges are averaged.
        equal_length: scale each tensor's mean update to the mean length of the updates.
        length: what the mean of matrices is multiplied by; 0: by less, the fewer directions updates have.
        others: what becomes of tensors that no matrix method merges.
    """

    methods: tuple[str, ...]
    equal_length: bool = False
    length: float = 1.0
    others: Others = "averaged"

    @property
    def title(self) -> str:
        """What its row is called."""
        said = " + ".join(self.methods) + (", equal length" if self.equal_length else "")
        said += {1.0: "", 0.0: ", length by rank"}.get(self.length, f", length {self.length}")
        return said if self.others == "averaged" else f"{said}, {self.others}"


_PAIRED = ("average", "cart", "actmat", "aswudi", "tsv_m", "iso_c", "iso_cts", "dc_merge")
MEANS: tuple[Mean, ...] = (
    Mean(("aswudi", "iso_cts")),
    Mean(("aswudi", "iso_cts"), equal_length=True),
    Mean(("tsv_m", "iso_cts")),
    Mean(("ace", "tsv_m")),
    Mean(("aswudi", "tsv_m")),
    Mean(("tsv_m", "dc_merge", "iso_cts", "aswudi")),
    Mean(("actmat", "iso_c")),
    *(Mean(pair) for pair in combinations(_PAIRED, 2)),
    Mean((rules.BY_LENGTHS, "cart")),
    Mean((rules.TWO_SIDED, "cart")),
    Mean((rules.TWO_SIDED, "tsv_m")),
    Mean((rules.TWO_SIDED, "tsv_m", "cart")),
    *(
        Mean(("aswudi", *rest))
        for rest in product(("iso_c", "tsv_m", "iso_cts"), ("average", "cart"))
    ),
)
# Those of the eighth round.
LATEST: tuple[Mean, ...] = (
    Mean((rules.SECOND, "tsv_m")),
    Mean((rules.SECOND, "iso_c")),
    Mean((rules.SECOND, rules.SECOND, "tsv_m")),
    Mean((rules.SECOND,), length=0.8),
    Mean((rules.SECOND,), others="other tensors too"),
    Mean((rules.SECOND,), others="others by lengths"),
    Mean((rules.SECOND,), others="others summed"),
    Mean((rules.SECOND,), length=1.2),
    Mean((rules.SECOND, "task_arithmetic")),
    Mean((rules.SECOND, "tsv_m", "iso_c")),
    Mean((rules.SECOND, "tsv_m", "dc_merge")),
    Mean((rules.SECOND,), length=0.8, others="others by lengths"),
    Mean((rules.SECOND,), length=0.65),
    Mean((rules.SECOND,), length=0.0),
    Mean((rules.SECOND,), length=0.0, others="others by lengths"),
)
TITLES = tuple(mean.title for mean in LATEST)
_MATRICES = ("auto", "average")  # they differ in what a matrix method merges


def score(card: Card, cache: Path, means: Sequence[Mean]) -> None:
    """Score means of merges of a set that are kept; what was scored before is kept."""
    path = cache / "bank" / "scores" / f"{card.name}.json"
    found = json.loads(path.read_text())
    wanted = [mean for mean in means if mean.title not in found["methods"]]
    if not wanted:
        return
    this = scoring.judge(card, cache)
    kept = _Kept.of(this, wanted, found.get("features", {}).get("rank", 1.0))
    scores: dict[str, scoring.Scores] = {}
    halves: dict[str, scoring.Halves] = {}
    for mean in wanted:
        (first, *more), title = mean.methods, mean.title
        if not more and mean.length == 1.0 and not kept.updates and first in found["halves"]:
            # It is the merge itself: an adapter has no other tensors.
            scores[title] = {name: found["methods"][first][name] for name in this.tests}
            halves[title] = found["halves"][first]
            continue
        with tempfile.TemporaryDirectory() as work:
            like, out = scoring.merged_folder(card, cache, mean.methods[0]), Path(work) / "mean"
            shutil.copytree(like, out, ignore=shutil.ignore_patterns("*.safetensors"))
            _files.save_file(kept.mean(mean), out / WEIGHTS, {"format": "pt"})
            scores[title], halves[title] = this.of_folder(out)
    found = json.loads(path.read_text())
    found["methods"] |= scores
    found["halves"] = {**found.get("halves", {}), **halves}
    path.write_text(json.dumps(found, indent=1) + "\n")


@dataclass(frozen=True)
class _Kept:
    """The tensors of a set's base and merges.

    Attributes:
        base: W₀ by name.
        merges: by method.
        updates: each expert's update of every tensor that `auto` averages, float64.
        by_rank: 1 − 0.4 (1 − e)², e the updates' mean effective rank as a share.
    """

    base: Mapping[str, Tensor]
    merges: Mapping[str, Mapping[str, Tensor]]
    updates: Mapping[str, Sequence[Tensor]]
    by_rank: float

    @classmethod
    def of(cls, judge: scoring.Judge, means: Sequence[Mean], rank: float) -> _Kept:
        base = _files.load_file(pretraining.folder_of(judge.base, judge.cache) / WEIGHTS)
        names = dict.fromkeys([*_MATRICES, *(name for mean in means for name in mean.methods)])
        folders = {name: scoring.merged_folder(judge.card, judge.cache, name) for name in names}
        merges = {name: _files.load_file(folder / WEIGHTS) for name, folder in folders.items()}
        one, other = (merges[name] for name in _MATRICES)
        # Running statistics of a batch norm are measured, and no weights.
        same = [
            name
            for name, tensor in base.items()
            if tensor.is_floating_point() and "running_" not in name
            if torch.equal(one[name], other[name]) and not torch.equal(one[name], tensor)
        ]
        return cls(base, merges, _updates(judge, base, same), 1 - 0.4 * (1 - rank) ** 2)

    def mean(self, mean: Mean) -> dict[str, Tensor]:
        """Return the tensors of a mean."""
        parts = [self.merges[method] for method in mean.methods]
        found = {
            name: mean_tensor(base, [p[name] for p in parts], equal_length=mean.equal_length)
            for name, base in self.base.items()
        }
        if mean.length != 1.0:
            one, other = (self.merges[name] for name in _MATRICES)
            for name, base in self.base.items():
                if not torch.equal(one[name], other[name]):
                    found[name] = torch.lerp(base, found[name], mean.length or self.by_rank)
        if mean.others != "averaged":
            for name, updates in self.updates.items():
                merged = _OTHERS[mean.others](name, updates)
                found[name] = (self.base[name].double() + merged).to(self.base[name].dtype)
        return found


# --- Tensors that no matrix method merges.
def _updates(
    judge: scoring.Judge, base: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Return each expert's update of some tensors, in float64."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for label, folder in scoring.models(judge.card, judge.cache).items() if names else ():
        with tempfile.TemporaryDirectory() as work:
            whole, start = folder, pretraining.folder_of(judge.base, judge.cache)
            if not (folder / WEIGHTS).exists():  # an adapter, which may be of convolutions
                whole = Path(work) / "whole"
                covmerge.merge(start, {label: folder}, "average", whole, allow=["unchanged-expert"])
            weights = _files.load_file(whole / WEIGHTS)
        for name in names:
            found[name].append(weights[name].double() - base[name].double())
    return found


def as_matrix(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as the matrix that multiplies its inputs: 1, windows of pixels, or one-hot tokens."""
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    if tensor.ndim == 2 and "head" not in name and "embed_out" not in name:
        return tensor.T
    return tensor.flatten(1)


def _as_auto(name: str, updates: Sequence[Tensor]) -> Tensor:
    matrices = tuple(as_matrix(name, update).contiguous() for update in updates)
    merged = registry.get("auto")(LinearGroup(matrices, (1.0,) * len(matrices))).delta
    shape = updates[0].shape
    return merged.T if merged.shape == shape[::-1] and len(shape) == 2 else merged.reshape(shape)


def _summed(name: str, updates: Sequence[Tensor]) -> Tensor:
    """Return κΣδ_t, with κ of `auto`: the sum of unlike updates, and one of copies."""
    flat = torch.stack([update.flatten() for update in updates if update.any()])
    sizes: Any = _linalg.vector_norm(flat, dim=1)
    alike: Any = (flat @ flat.T).square() / torch.outer(sizes, sizes)
    shorter: Any = sizes.square().sum() / alike.sum()
    return (shorter * flat.sum(dim=0)).reshape(updates[0].shape)


def _by_lengths(name: str, updates: Sequence[Tensor]) -> Tensor:
    """Return Σ‖δ_t‖δ_t / Σ‖δ_t‖."""
    stack: Any = torch.stack(list(updates))
    sizes: Any = _linalg.vector_norm(stack.flatten(1), dim=1)
    return ((sizes / sizes.sum()) @ stack.flatten(1)).reshape(updates[0].shape)


_OTHERS: Mapping[Others, Callable[[str, Sequence[Tensor]], Tensor]] = {
    "other tensors too": _as_auto,
    "others summed": _summed,
    "others by lengths": _by_lengths,
}


def mean_tensor(base: Tensor, merged: Sequence[Tensor], *, equal_length: bool) -> Tensor:
    """Return the base with the mean of merged tensors' updates, in the base's dtype."""
    if not base.is_floating_point():
        return merged[0]
    updates = [each.double() - base.double() for each in merged]
    mean = torch.stack(updates).mean(dim=0)
    lengths = [float(_linalg.vector_norm(update)) for update in updates]
    length = float(_linalg.vector_norm(mean))
    if equal_length and length > 0:
        mean = mean * (fmean(lengths) / length)
    return (base.double() + mean).to(base.dtype)
