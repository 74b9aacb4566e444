"""What two merges of one recipe may differ in: rows of docs/mergekit.md, by their first cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.mergekit.token_cases import TABLES, ids_of
from tests.mergekit.token_generator import SHORT

EQUAL, FAULT = "equal bit for bit", "fault"


def asks_for_tokens(recipe: Mapping[str, Any]) -> bool:
    """Whether rows of tables are gathered by token."""
    return bool(recipe.keys() & {"tokenizer", "tokenizer_source"})


@dataclass(frozen=True)
class Merged:
    """What came of a recipe: an error, or tensors; and where it asks for tokens, these with their numbers.

    Tables of tokens are then in the order of the tokens' texts, and their rows of padding by themselves.
    """

    error: str | None
    tensors: Mapping[str, Tensor]
    tokens: Mapping[str, int] | None = None

    @classmethod
    def read(cls, recipe: Mapping[str, Any], out: Path) -> Merged:
        """Read what was written."""
        tensors = load_file(out / "model.safetensors")
        if not asks_for_tokens(recipe):
            return cls(None, tensors)
        tokens = ids_of(out)
        order = [tokens[token] for token in sorted(tokens)]
        for name in tensors.keys() & set(TABLES):
            table = tensors[name]
            tensors[name], tensors[f"{name} (padding)"] = table[order], table[len(order) :]
        return cls(None, tensors, tokens)


@dataclass(frozen=True)
class Outcome:
    """How two merges compare: its kind, the row that says so, and what was seen."""

    kind: str
    row: str = ""
    seen: str = ""

    def __str__(self) -> str:
        """As the campaign prints it."""
        return " · ".join(filter(None, (self.kind, self.row, self.seen)))


_BEYOND = "tokens whose number is beyond the embedding's rows"
_OF_OTHER_SLICES = "a token's row where the models of a slice lack it"
_UNKNOWN_TO_THE_BASE = "a token of `tokens` that the base lacks, under the base's tokenizer"
# Refused here and merged there: a row, and what our message says then.
REFUSED: Mapping[str, str] = {
    "parameters for all models, said of one": "of a model: it is one for all",
    "unknown keys and parameters": "mergekit passes over it",
    "filters": "the filter .* has a number",
    "a required parameter that no filter covers": "where no filter fits",
    "a result that is the base (`lambda: 0`, `density: 0`)": "every tensor equals the base's",
    "a tokenizer, or a token's row, of a model that is not merged": "none of the models that are merged",
    "slices, or filters, in one of several `modules`": "filters beside several modules",
    "`modules` that name the same models in another order": "the same models in another order",
}
# Refused there and merged here: a row, and what their message says then.
MERGED: Mapping[str, str] = {
    "norm and head of stacked slices": "Base input is not present in merge inputs for (lm_head|model.norm|"
    "transformer.ln_f)",
    _OF_OTHER_SLICES: "requires a vocabulary weight from model",
    _UNKNOWN_TO_THE_BASE: r"KeyError: \d+",
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
    if theirs.tokens != ours.tokens and _lacks_what_has_no_row(theirs, ours):
        return Outcome("documented", _BEYOND)
    if theirs.tensors.keys() != ours.tensors.keys():
        only = sorted(theirs.tensors.keys() ^ ours.tensors.keys())
        return Outcome(FAULT, seen=f"not in both: {', '.join(only[:4])}")
    rows: set[str] = set()
    for name, own in theirs.tensors.items():
        other = Pair(recipe, name, own, ours.tensors[name], theirs.tokens != ours.tokens)
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
    """A tensor of both, and whether tokens have other numbers in one."""

    recipe: Mapping[str, Any]
    name: str
    theirs: Tensor
    ours: Tensor
    renumbered: bool = False

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

    @property
    def is_table(self) -> bool:
        """Whether its rows were gathered by token."""
        return asks_for_tokens(self.recipe) and self.name.split(" ")[0] in TABLES

    @property
    def slices(self) -> list[dict[str, Any]]:
        """Those of the recipe, or of the one module that is all of the model."""
        whole = self.recipe.get("modules", {}).get("default", {})
        return self.recipe.get("slices") or whole.get("slices", [])

    @property
    def nearly_equal(self) -> bool:
        """Whether they differ by no more than rounding does, in the coarsest dtype that there is."""
        dtypes = [
            self.ours.dtype,
            torch.bfloat16 if "./half/" in str(self.recipe) else torch.float32,
        ]
        if "dtype" in self.recipe:
            dtypes.append(getattr(torch, self.recipe["dtype"]))
        digit = max(torch.finfo(dtype).eps for dtype in dtypes)
        return self.off <= 8 * digit * (1 + self.ours.double().abs().amax().item())

    def __str__(self) -> str:
        """As the campaign prints it."""
        return (
            f"{self.name}: {self.theirs.dtype} there, {self.ours.dtype} here, off by {self.off:.2g}"
        )


def _takes_a_layer_twice(pair: Pair) -> bool:
    """Whether random numbers are drawn for layers that share a source."""
    taken = Counter(
        (own["model"], layer)
        for piece in pair.slices
        for own in piece["sources"]
        for layer in range(*own["layer_range"])
    )
    return _is_random(pair) and max(taken.values(), default=0) > 1


def _is_random(pair: Pair) -> bool:
    return pair.recipe["merge_method"].startswith(("dare", "della"))


def _is_the_bases_dtype(pair: Pair) -> bool:
    return "dtype" not in pair.recipe and "out_dtype" not in pair.recipe and pair.rounded


def _forgets_to_round(pair: Pair) -> bool:
    alone = "dtype" in pair.recipe and "out_dtype" not in pair.recipe
    return pair.recipe["merge_method"] in ("arcee_fusion", "ramplus_tl") and alone and pair.rounded


def _boosts_nothing(pair: Pair) -> bool:
    """Whether it is RAM+ without a boost, in half precision."""
    half = pair.ours.dtype in (torch.float16, torch.bfloat16)
    without = re.search(r"'r': \[?0\.0\b(?!\d)", str(pair.recipe))
    return pair.recipe["merge_method"] == "ramplus_tl" and half and bool(without)


def _loses_models_after_the_layers(pair: Pair) -> bool:
    """Whether it is norm or head, and the last slice has more sources than the first."""
    slices = pair.slices
    outside = ".layers." not in pair.name and ".h." not in pair.name
    return outside and bool(slices) and len(slices[0]["sources"]) < len(slices[-1]["sources"])


def _folds_first(pair: Pair) -> bool:
    """Whether it is but the rounding of W₀ + BA."""
    return "+" in str(pair.recipe) and pair.off < 1e-5


def _has_other_means(pair: Pair) -> bool:
    """Whether it is but the last digits of padding, of means, or of what a method sums over them."""
    rules, text = pair.recipe.get("tokenizer", {}), str(pair.recipe)
    averaged = "pad_to_multiple_of" in rules or ("/t1" in text and "/t2" in text)
    return pair.is_table and averaged and pair.nearly_equal


def _has_other_numbers(pair: Pair) -> bool:
    """Whether random numbers, or what is summed, come to tokens in another order."""
    return pair.is_table and pair.renumbered and (_is_random(pair) or pair.nearly_equal)


def _lacks_models(pair: Pair) -> bool:
    """Whether the slice that a table is of has not all models of the recipe."""
    models = [{own["model"] for own in piece["sources"]} for piece in pair.slices]
    return pair.is_table and any(own != models[0] for own in models)


def _takes_padding_for_a_row(pair: Pair) -> bool:
    """Whether a rule is for a token that the base lacks, and its table has more rows than tokens."""
    if not pair.is_table or pair.recipe.get("tokenizer", {}).get("source") != "base":
        return False
    first = (pair.recipe.get("models") or pair.slices[0]["sources"])[0]["model"]
    return pair.recipe.get("base_model", first).endswith("/t2")


def _lacks_what_has_no_row(theirs: Merged, ours: Merged) -> bool:
    return set(ours.tokens or ()) - set(theirs.tokens or ()) == set(SHORT.added)


# Merged by both to other tensors: a row, and whether a tensor may be that.
_OTHER: Mapping[str, Callable[[Pair], bool]] = {
    "stored dtype without `dtype` and `out_dtype`": _is_the_bases_dtype,
    "stored dtype of arcee_fusion and ramplus_tl with half a `dtype` alone": _forgets_to_round,
    "ramplus_tl with `r: 0`, in half precision": _boosts_nothing,
    "norm and head of stacked slices": _loses_models_after_the_layers,
    "`--random-seed` with a stack that takes a layer twice": _takes_a_layer_twice,
    "adapters": _folds_first,
    "numbers of a union's tokens": _has_other_numbers,
    "padding, a row that is the mean of several models'": _has_other_means,
    _OF_OTHER_SLICES: _lacks_models,
    _UNKNOWN_TO_THE_BASE: _takes_padding_for_a_row,
}
ROWS = (*REFUSED, *MERGED, *_OTHER, _BEYOND)
