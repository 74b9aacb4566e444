"""What two merges of one recipe may differ in: rows of docs/mergekit.md, by their first cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EQUAL, FAULT = "equal bit for bit", "fault"


@dataclass(frozen=True)
class Merged:
    """What came of a recipe: an error, or tensors."""

    error: str | None
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """How two merges compare: its kind, the row that says so, and what was seen."""

    kind: str
    row: str = ""
    seen: str = ""

    def __str__(self) -> str:
        """As the campaign prints it."""
        return " · ".join(filter(None, (self.kind, self.row, self.seen)))


# Refused here and merged there: a row, and what our message says then.
REFUSED: Mapping[str, str] = {
    "parameters for all models, said of one": "of a model: it is one for all",
    "unknown keys and parameters": "mergekit passes over it",
    "filters": "the filter .* has a number",
    "a required parameter that no filter covers": "where no filter fits",
    "a result that is the base (`lambda: 0`, `density: 0`)": "every tensor equals the base's",
}
# Refused there and merged here: a row, and what their message says then.
MERGED: Mapping[str, str] = {
    "norm and head of stacked slices": "Base input is not present in merge inputs for (lm_head|model.norm|"
    "transformer.ln_f)",
}


def compared(recipe: Mapping[str, Any], theirs: Merged, ours: Merged) -> Outcome:
    """Return how mergekit's result and ours compare."""
    if theirs.error is not None and ours.error is not None:
        return Outcome("refused by both")
    if ours.error is not None:
        return _said("refused here", REFUSED, ours.error)
    if theirs.error is not None:
        return _said("refused there", MERGED, theirs.error)
    if _same(theirs.tensors, ours.tensors):
        return Outcome(EQUAL)
    if theirs.tensors.keys() != ours.tensors.keys():
        only = sorted(theirs.tensors.keys() ^ ours.tensors.keys())
        return Outcome(FAULT, seen=f"not in both: {', '.join(only[:4])}")
    rows: set[str] = set()
    for name, own in theirs.tensors.items():
        other = Pair(recipe, name, own, ours.tensors[name])
        if other.same:
            continue
        row = next((row for row, applies in _OTHER.items() if applies(other)), None)
        if row is None:
            return Outcome(FAULT, seen=str(other))
        rows.add(row)
    return Outcome("documented", " + ".join(sorted(rows)))


def _said(kind: str, rows: Mapping[str, str], error: str) -> Outcome:
    for row, pattern in rows.items():
        if re.search(pattern, error):
            return Outcome(kind, row)
    return Outcome(FAULT, seen=f"{kind}: {error[:300]}")


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@dataclass(frozen=True)
class Pair:
    """A tensor of both."""

    recipe: Mapping[str, Any]
    name: str
    theirs: Tensor
    ours: Tensor

    @property
    def same(self) -> bool:
        """Whether they are equal bit for bit."""
        return _same({"": self.theirs}, {"": self.ours})

    @property
    def rounded(self) -> bool:
        """Whether ours is theirs in another dtype."""
        return torch.equal(self.theirs.to(self.ours.dtype), self.ours)

    @property
    def off(self) -> float:
        """The largest difference of an entry; infinite where there is no number."""
        if self.theirs.shape != self.ours.shape:
            return float("inf")
        off = (self.theirs.double() - self.ours.double()).abs().max().item()
        return off if off == off else float("inf")

    def __str__(self) -> str:
        """As the campaign prints it."""
        return (
            f"{self.name}: {self.theirs.dtype} there, {self.ours.dtype} here, off by {self.off:.2g}"
        )


def _takes_a_layer_twice(pair: Pair) -> bool:
    """Whether random numbers are drawn for layers that share a source."""
    taken = Counter(
        (own["model"], layer)
        for piece in pair.recipe.get("slices", ())
        for own in piece["sources"]
        for layer in range(*own["layer_range"])
    )
    random = pair.recipe["merge_method"].startswith(("dare", "della"))
    return random and max(taken.values(), default=0) > 1


def _is_the_bases_dtype(pair: Pair) -> bool:
    return "dtype" not in pair.recipe and "out_dtype" not in pair.recipe and pair.rounded


def _forgets_to_round(pair: Pair) -> bool:
    alone = "dtype" in pair.recipe and "out_dtype" not in pair.recipe
    return pair.recipe["merge_method"] in ("arcee_fusion", "ramplus_tl") and alone and pair.rounded


def _loses_models_after_the_layers(pair: Pair) -> bool:
    """Whether it is norm or head, and the last slice has more sources than the first."""
    slices = pair.recipe.get("slices", [])
    outside = ".layers." not in pair.name and ".h." not in pair.name
    return outside and bool(slices) and len(slices[0]["sources"]) < len(slices[-1]["sources"])


def _folds_first(pair: Pair) -> bool:
    """Whether it is but the rounding of W₀ + BA."""
    return "+" in str(pair.recipe) and pair.off < 1e-5


# Merged by both to other tensors: a row, and whether a tensor may be that.
_OTHER: Mapping[str, Callable[[Pair], bool]] = {
    "stored dtype without `dtype` and `out_dtype`": _is_the_bases_dtype,
    "stored dtype of arcee_fusion and ramplus_tl with half a `dtype` alone": _forgets_to_round,
    "norm and head of stacked slices": _loses_models_after_the_layers,
    "`--random-seed` with a stack that takes a layer twice": _takes_a_layer_twice,
    "adapters": _folds_first,
}
ROWS = (*REFUSED, *MERGED, *_OTHER)
