"""Candidates for a default: means of merged models, scored like methods."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from covmerge_lab.bank import bases, pretraining, rules, scoring
from covmerge_lab.bank.cards import Card

# Their annotations are partial.
_files: Any = safetensors.torch
_linalg: Any = torch.linalg
WEIGHTS = "model.safetensors"
_PAIRED = ("average", "cart", "actmat", "aswudi", "tsv_m", "iso_c", "iso_cts", "dc_merge")
MEANS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("aswudi", "iso_cts"), False),
    (("aswudi", "iso_cts"), True),
    (("tsv_m", "iso_cts"), False),
    (("ace", "tsv_m"), False),
    (("aswudi", "tsv_m"), False),
    (("tsv_m", "dc_merge", "iso_cts", "aswudi"), False),
    (("actmat", "iso_c"), False),
    *((pair, False) for pair in combinations(_PAIRED, 2)),
    ((rules.BY_LENGTHS, "cart"), False),
    ((rules.TWO_SIDED, "cart"), False),
    ((rules.TWO_SIDED, "tsv_m"), False),
    ((rules.TWO_SIDED, "tsv_m", "cart"), False),
    *(
        (("aswudi", *rest), False)
        for rest in product(("iso_c", "tsv_m", "iso_cts"), ("average", "cart"))
    ),
)


def mean_of(
    card: Card, cache: Path, methods: Sequence[str], *, equal_length: bool = False
) -> dict[str, float]:
    """Score the mean of merges of a set that are kept; what was scored before is kept.

    Args:
        card: the set.
        cache: folder of the bank.
        methods: whose merges are averaged.
        equal_length: scale each tensor's mean update to the mean length of the updates.
    """
    title = " + ".join(methods) + (", equal length" if equal_length else "")
    path = cache / "bank" / "scores" / f"{card.name}.json"
    found = json.loads(path.read_text())
    if title not in found["methods"]:
        this = scoring.judge(card, cache)
        folders = [scoring.merged_folder(card, cache, method) for method in methods]
        base = _files.load_file(pretraining.folder_of(this.base, cache) / WEIGHTS)
        parts = [_files.load_file(folder / WEIGHTS) for folder in folders]
        tensors = {
            name: mean_tensor(base[name], [part[name] for part in parts], equal_length=equal_length)
            for name in parts[0]
        }
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "mean"
            shutil.copytree(folders[0], folder, ignore=shutil.ignore_patterns("*.safetensors"))
            _files.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
            found["methods"][title] = this.scores(bases.load(this.base, folder).float())
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found["methods"][title]


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
