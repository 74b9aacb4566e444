"""ACE-Merging's diagnostics of a matrix, and their summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, log10
from typing import Any, ClassVar, cast

from typing_extensions import Self

from covmerge.base.diagnostics import Diagnostics, Summary, TensorDiagnostics
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.maths.covariance.estimate import DEFAULT_TAU
from covmerge.maths.methods.summaries import JITTER, UNCHANGED, Counted

_SHARE = 0.1  # share that a ridge may have in an expert's covariance
_LEAST_EPS = 1e-10  # float32 cannot solve systems with a smaller ε


class _Gate(Summary):
    """Summary of where the gate fired, and where it fired only at the pole of the paper's γ."""

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {"gate_fired": _names(diagnostics, lambda m: m.fired)}

    def rows(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[tuple[str, str]]:
        names = _names(diagnostics, lambda m: m.fired)
        fired = [matrix.fired for one in diagnostics for matrix in one.matrices]
        where = f": {some(names)}" if names else ""
        yield "γ gate", f"fired in {sum(map(bool, fired))} of {len(fired)} matrices{where}"

    def notes(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        names = _names(diagnostics, lambda m: m.at_pole)
        if names:
            yield (
                f"ACE's gate fired in {counted(len(names), 'tensor')} ({some(names, 2)}) whose "
                "experts are alike in size: their norms are near 1, where the paper's γ has a pole. "
                f"{Hint('parameters', {'gate': 'scale_free'})} has none"
            )


class _Ridge(Summary):
    """Summary of where ε outweighs an expert in the expert's covariance."""

    def totals(self, diagnostics: Sequence[TensorDiagnostics]) -> Mapping[str, Json]:
        return {"ridge_dominates": _names(diagnostics, lambda m: m.outweighed)}

    def warnings(self, diagnostics: Sequence[TensorDiagnostics]) -> Iterator[str]:
        wanted = {
            one.tensor: _SHARE * one.parameters["eps"] / max(m.ridge_share or 0.0 for m in lost)
            for one in diagnostics
            if (lost := [m for m in _of(one) if m.outweighed])
        }
        if wanted:
            least = _rounded_down(min(wanted.values()))
            eps = float(f"{least:g}")
            smaller = (
                f"a smaller one ({Hint('parameters', {'eps': eps})}), or "
                if least >= _LEAST_EPS
                else ""
            )
            yield (
                f"ACE's ε outweighs an expert in {counted(len(wanted), 'tensor')} "
                f"({some(list(wanted), 2)}): the merge follows ε there, not the expert, and may be "
                f"lost. Take {smaller}another method ({Hint('method', 'tsv_m')})"
            )


GATE, RIDGE = _Gate(), _Ridge()
LEFT_OUT = Counted(
    "below_rounding",
    "ACE solved {tensors} ({names}) without the directions of the inputs in which the updates are no "
    "larger than the rounding of the stored weights. What the experts learned there is lost; experts saved "
    "in float32 keep it",
)
AVERAGED = Counted(
    "averaged",
    "ACE can tell nothing of the inputs of {count} updates (rows that are nearly alike, or an ε above "
    "all that the expert did) in {tensors} ({names}): they are averaged there",
)


@dataclass(frozen=True)
class AceDiagnostics(Diagnostics):
    """ACE's diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (GATE, RIDGE, LEFT_OUT, JITTER, UNCHANGED, AVERAGED)

    unchanged: int = 0  # the number of experts that did not change the matrix
    averaged: int = 0  # the number of experts whose estimate tells nothing
    gamma: float = 0.0  # γ (Eq. 7); infinite at its pole, which is null in JSON
    gate_fired: bool = False  # whether γ > τ put the experts on one scale
    # primal or dual sums; this and the following fields are None if no expert was in the sums
    route: str | None = None
    spread: float | None = None  # the scale-free γ
    # the largest ratio of ε to an expert in the expert's covariance
    ridge_share: float | None = None
    rcond: float | None = None  # reciprocal condition number of the system
    precision: str | None = None  # dtype of the sums and the solve
    jitter: float | None = None  # what the factorisation added to the diagonal
    # the number of directions of the inputs left out as rounding of stored weights
    below_rounding: int = 0
    # the number of refined directions; this and the following fields are None if none were refined
    k: int | None = None
    rank: int | None = None  # the numerical rank of the refined matrix
    sigma_iso: float | None = None  # the new singular value of the refined directions (Eq. 19)

    @property
    def fired(self) -> bool:
        return self.gate_fired

    @property
    def outweighed(self) -> bool:
        """Whether the gate fired and ε outweighs an expert in the expert's covariance."""
        return self.gate_fired and self.ridge_share is not None and self.ridge_share >= 1.0

    @property
    def at_pole(self) -> bool:
        """Whether the gate fired only because of γ's denominator: the scale-free γ would not have fired."""
        if not self.gate_fired or self.spread is None or self.spread > DEFAULT_TAU["scale_free"]:
            return False
        # A γ at or below the default fired because of a τ that the user set.
        return self.gamma > DEFAULT_TAU["paper"]

    def as_json(self) -> dict[str, Json]:
        """Return the facts as they stand in covmerge.json; an infinite γ is null."""
        facts = super().as_json()
        return facts | {"gamma": self.gamma if isfinite(self.gamma) else None}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        pole = {"gamma": inf} if facts.get("gamma", 0.0) is None else {}
        return super().from_json({**facts, **pole})


def _of(one: TensorDiagnostics) -> tuple[AceDiagnostics, ...]:
    return cast("tuple[AceDiagnostics, ...]", one.matrices)


def _names(stats: Sequence[TensorDiagnostics], has: Callable[[AceDiagnostics], bool]) -> list[str]:
    """Return the tensors with a matrix for which `has` is true."""
    return [one.tensor for one in stats if any(map(has, _of(one)))]


def _rounded_down(value: float) -> float:
    """Round down to one digit."""
    if value <= 0.0:
        return 0.0
    unit = 10.0 ** floor(log10(value))
    return floor(value / unit) * unit
