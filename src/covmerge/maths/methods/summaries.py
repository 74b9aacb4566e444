"""Summaries of facts that several methods share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from covmerge.base.diagnostics import Summary, TensorDiagnostics
from covmerge.base.text import counted, some
from covmerge.base.types import Json


def facts(diagnostics: Sequence[TensorDiagnostics], name: str) -> list[float]:
    """Return all numbers of the fact `name`; None is left out."""
    found = (getattr(matrix, name) for one in diagnostics for matrix in one.matrices)
    return [number for number in found if number is not None]


class Unchanged(Summary):
    """Summary of experts that did not change a matrix and were left out of its sums, by `unchanged`."""

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {"unchanged_updates": sum(facts(diagnostics, "unchanged"))}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        count = sum(facts(diagnostics, "unchanged"))
        yield (
            "unchanged",
            f"{count} updates were zero or only rounding, and left the sums" if count else "none",
        )


class Jitter(Summary):
    """Summary of what Cholesky factorisations added to the diagonal, by `jitter`."""

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {"largest_jitter": max(facts(diagnostics, "jitter"), default=0.0)}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        found = facts(diagnostics, "jitter")
        if found:
            largest = max(found)
            yield "jitter", f"{largest:.1e} at most" if largest else "none was needed"


@dataclass(frozen=True)
class Counted(Summary):
    """A note about a count."""

    fact: str  # the name of the fact that is counted
    text: str  # a note with places for `{count}`, `{tensors}` and their `{names}`

    def notes(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        found = {one.tensor: sum(facts([one], self.fact)) for one in diagnostics}
        found = {name: count for name, count in found.items() if count}
        if found:
            names, total = some(list(found), 2), sum(found.values())
            tensors = counted(len(found), "tensor")
            yield self.text.format(count=total, tensors=tensors, names=names)


@dataclass(frozen=True)
class Median(Summary):
    """The median of a fact over the matrices, with its range."""

    fact: str  # the name of the fact
    label: str  # the label of its row
    text: str  # the text of its row, with a place for `{numbers}`
    form: str = ".2f"  # the format of a number
    least: float = -inf  # the row is left out if the median is not larger than this

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        found = facts(diagnostics, self.fact)
        return {self.fact: median(found) if found else None}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        found = facts(diagnostics, self.fact)
        if not found or median(found) <= self.least:
            return
        middle, least, most = (
            format(value, self.form) for value in (median(found), min(found), max(found))
        )
        span = "" if least == most else f" ({least} to {most})"
        yield self.label, self.text.format(numbers=middle + span)


UNCHANGED, JITTER = Unchanged(), Jitter()
DEPENDENT = Counted(
    "dependent",
    "rounding may decide {count} directions that experts have nearly in common in {tensors} ({names})",
)
ARBITRARY = Counted(
    "arbitrary",
    "{count} directions with equal singular values have no order in {tensors} ({names}): what "
    "an election entry by entry makes of them is arbitrary",
)
SHORT = Counted(
    "short",
    "{count} directions of the merged core are below the rounding of the longest update in {tensors} "
    "({names}): a small expert may have made them, or rounding where experts cancel, and a flat "
    "spectrum makes them as long as the others",
)
