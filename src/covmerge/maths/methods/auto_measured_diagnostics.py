"""Diagnostics of a matrix by `auto_measured`, and their summaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from covmerge.base.diagnostics import Diagnostics, Summary, TensorDiagnostics
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.maths.methods.summaries import UNCHANGED, Median, facts

# An expert with a smaller share counted less than the others; one with a smaller bound was shortened.
_LESS = 0.9


class _Inputs(Summary):
    """Summary of the matrices whose changes data reached."""

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {"inputs_known": int(sum(facts(diagnostics, "inputs_known")))}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        known = facts(diagnostics, "inputs_known")
        text = f"known in {int(sum(known))} of {len(known)} matrices"
        yield (
            "experts' inputs",
            text if any(known) else "no data reached what was changed: averaged",
        )


@dataclass(frozen=True)
class _Less(Summary):
    """Summary of experts for which a fact is below 0.9 in tensors that they changed."""

    fact: str  # the name of a fact that has a number per expert
    total: str  # its name in the totals
    label: str  # the label of its row
    why: str  # the text behind the experts

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {self.total: {e: [*names] for e, names in self._found(diagnostics).items()}}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        found = self._found(diagnostics)
        if found:
            where = (
                f"'{expert}' in {counted(len(names), 'tensor')} ({some(names, 2)})"
                for expert, names in found.items()
            )
            yield self.label, f"{'; '.join(where)}: {self.why}"

    def _found(self, diagnostics: Sequence[TensorDiagnostics]) -> dict[str, list[str]]:
        """Return the names of the tensors, by expert."""
        found: dict[str, list[str]] = {}
        for one in diagnostics:
            for place, expert in enumerate(one.experts):
                per_matrix = [getattr(matrix, self.fact) for matrix in one.matrices]
                if any(0.0 < values[place] < _LESS for values in per_matrix if values):
                    found.setdefault(expert, []).append(one.tensor)
        return found


OF_EXPERTS = _Inputs()
SMALL = _Less("shares", "counted_less", "counted less", "short beside the others there")
LONG = _Less("bounds", "shortened", "shortened", "long beside the others there")
BESIDE_INPUTS = Median(
    "told_beside_inputs",
    "C_t, updates",
    "what an update tells of its inputs counts {numbers} of what was measured",
    ".0%",
)
UNLIKE = Median("unlike_experts", "N, unlike experts", "count as {numbers}, by their directions")
IN_USE = Median(
    "directions_in_use",
    "φ, directions",
    "{numbers} of those that the layers have are in use",
    ".0%",
)
UNEVEN = Median(
    "uneven_use",
    "η, unevenness",
    "{numbers}, where 0 is experts that use equally many directions, and 1 some all and the others none: "
    "q is less by that share",
    least=0.05,
)
FLATTENING = Median(
    "flattening", "q, flattening", "{numbers}, where 0 is least squares and 1 a flat spectrum"
)
TOWARDS_LEAST_SQUARES = Median(
    "towards_least_squares",
    "a, to least squares",
    "{numbers} of the way to least squares, for how long it is beside the base",
    ".0%",
)
LENGTHENING = Median("lengthening", "λ, length", "{numbers} times that of least squares")


@dataclass(frozen=True)
class EqualisedMeasured(Diagnostics):
    """`auto_measured`'s diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (
        OF_EXPERTS,
        BESIDE_INPUTS,
        UNLIKE,
        IN_USE,
        UNEVEN,
        FLATTENING,
        LENGTHENING,
        TOWARDS_LEAST_SQUARES,
        SMALL,
        LONG,
        UNCHANGED,
    )

    unchanged: int = 0  # the number of experts that did not change the matrix
    # s_t of every expert: 1 for one as long as the others, 0 for one that did not change the matrix
    shares: tuple[float, ...] = ()
    # b_t of every expert: 1 for one as long as the others, less for one that is many times as long,
    # 0 for one that did not change the matrix
    bounds: tuple[float, ...] = ()
    inputs_known: bool = False  # whether data reached what was changed
    # N, the number of experts without a common direction that are equivalent to these
    unlike_experts: float | None = None
    # φ, the share of the layer's directions that the experts use; this and the following fields are
    # None if nothing was left after least squares
    directions_in_use: float | None = None
    flattening: float | None = None  # q, how flat the spectrum was made: 0 not at all, 1 flat
    # the effect of λ: the sum of the outputs' singular values over that of least squares
    lengthening: float | None = None
    # the length of the merged outputs over that of all updates' outputs, none shortened
    outputs_length: float | None = None
    # η, 0 if all experts use equally many of the layer's directions, 1 if some use all and the
    # others none
    uneven_use: float | None = None
    # a, how far the merge went to least squares; None if ‖W₀‖ was not known
    towards_least_squares: float | None = None
    unheard: int = 0  # the number of experts whose data did not reach the layer
    # ψ_t of every expert, how much its update counts relative to its inputs; 0 for one that did not
    # change the layer
    updates_told: tuple[float, ...] = ()

    @property
    def told_beside_inputs(self) -> float | None:
        """The mean of ψ_t over the experts that changed the layer."""
        shares = [share for share in self.updates_told if share]
        return fmean(shares) if shares else None

    @property
    def length_in_outputs(self) -> float | None:
        """The length of the outputs on the experts' inputs, relative to all experts' together."""
        return self.outputs_length if self.inputs_known else None

    def report_columns(self, experts: Sequence[str]) -> Mapping[str, str | float | None]:
        share, away = self.directions_in_use, self.towards_least_squares
        less, cut = (
            [e for e, value in zip(experts, values, strict=False) if 0.0 < value < _LESS]
            for values in (self.shares, self.bounds)
        )
        return {
            "experts' inputs": "known" if self.inputs_known else "not known",
            "N, unlike experts": self.unlike_experts,
            "φ, directions in use, %": None if share is None else 100 * share,
            "η, unevenness": self.uneven_use,
            "q, flattening": self.flattening,
            "λ, times the length of least squares": self.lengthening,
            "a, to least squares, %": None if away is None else 100 * away,
            "counted less": ", ".join(less) or "nobody",
            "shortened": ", ".join(cut) or "nobody",
        }
