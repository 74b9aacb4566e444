"""What a report shows, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import hypot
from statistics import fmean
from typing import Any

from covmerge.base.diagnostics import TensorDiagnostics
from covmerge.base.table import Table, Tabular, paragraph
from covmerge.base.types import Json, Role
from covmerge.front.reporting.grid import panels
from covmerge.maths.covariance.estimate import DEFAULT_TAU, Statistic, heterogeneity
from covmerge.maths.measures.spectrum import leading
from covmerge.plan.planning.varied import shown_parameters
from covmerge.run.inspection.result import Inspection, LayerView, SpectrumView
from covmerge.run.verification import Verification


@dataclass(frozen=True)
class LayerCost:
    """What merging one tensor cost.

    Attributes:
        seconds: of mathematics; None where it was not measured.
        memory: bytes alive while it is merged, by the plan.
        flops: by the method's cost model.
    """

    seconds: float | None
    memory: int
    flops: float


@dataclass(frozen=True, repr=False)
class Report(Tabular):
    """An inspection of experts, and of what a merge made of them.

    Attributes:
        title: a name for people: the output folder's, or the base's.
        inspection: what was measured, layer by layer.
        manifest: covmerge.json of the merged model; None before a merge.
        diagnostics: its methods' diagnostics, by tensor; empty before a merge.
        verification: outcome of re-reading it.
        costs: by tensor of the merge; empty before one.
        run: seconds and memory of the whole merge, where it was just run; as in `MergeResult.run`.
    """

    title: str
    inspection: Inspection
    manifest: Mapping[str, Any] | None = None
    verification: Verification | None = None
    diagnostics: Mapping[str, TensorDiagnostics] = field(
        default_factory=dict[str, TensorDiagnostics]
    )
    costs: Mapping[str, LayerCost] = field(default_factory=dict[str, LayerCost])
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __repr__(self) -> str:
        ok = self.verification is not None and self.verification.ok
        return f"<Report: {self.title}{', verified' if ok else ''}; {self.inspection!r}>"

    def table(self) -> Table:
        """The rows of its inspection."""
        return self.inspection.table()

    def html(self) -> str:
        """What a notebook shows."""
        return paragraph(repr(self)) + self.inspection.html()

    def as_json(self) -> dict[str, Json]:
        """All of it as plain JSON."""
        return {
            "title": self.title,
            "inspection": self.inspection.as_json(),
            "manifest": None if self.manifest is None else dict(self.manifest),
            "verification": None if self.verification is None else self.verification.summary(),
            "costs": {name: vars(cost) for name, cost in self.costs.items()},
            "run": dict(self.run),
        }


# What the pictures of a report draw, and the tables behind them hold.

Inspect = Inspection | Report
STATISTICS: Mapping[Statistic, str] = {"paper": "paper's", "scale_free": "scale-free"}
BEFORE, MERGED = "merged, before refinement", "merged"
_SPECTRA = 4  # layers whose singular values are drawn


def inspection_of(data: Inspect) -> Inspection:
    """What was measured."""
    return data.inspection if isinstance(data, Report) else data


def kind_name(layer: LayerView) -> str:
    """The name by which pictures sort a layer: matrices of a stack of experts are of one kind."""
    return layer.tensor if layer.role == Role.EXPERT_STACK.value else layer.name


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known; None of none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def changed(layer: LayerView, values: Mapping[str, float]) -> dict[str, float | None]:
    """Leave out what a layer says of experts that did not change it."""
    norms = layer.norms
    return {expert: value if norms[expert] else None for expert, value in values.items()}


def keeps_least(inspection: Inspection) -> str:
    """The expert of which least is retained; of several of which nothing is, the one harmed most."""
    shares = inspection.retention()

    def standing(expert: str) -> tuple[float, float]:
        raw = mean(layer.retention.get(expert) for layer in inspection.matrices)
        return shares[expert], raw or 0.0

    return min(shares, key=standing)


def moved_by(inspection: Inspection, expert: str) -> float:
    """‖Δ_t‖ / ‖W_0‖ over all matrices."""
    base = hypot(*(layer.sums.base_norm for layer in inspection.matrices))
    return hypot(*(layer.norms.get(expert, 0.0) for layer in inspection.matrices)) / (base or 1.0)


@dataclass(frozen=True)
class Pair:
    """Two experts, mean over the matrices that both changed; None where there is none.

    Attributes:
        cosine: of their updates.
        conflict: share of the elements that both changed that they pull apart; 0.5 is chance.
        overlap: of the inputs that matter most to them; 1 is the same.
        chance: the overlap of unrelated updates.
    """

    cosine: float | None
    conflict: float | None
    overlap: float | None
    chance: float | None


def pairs(data: Inspect) -> dict[tuple[str, str], Pair]:
    """Compare each two experts."""
    inspection = inspection_of(data)
    rows = [
        (layer, layer.norms, layer.pairs(layer.sums.cosines), layer.pairs(layer.sums.sign_conflict))
        for layer in inspection.matrices
    ]
    found: dict[tuple[str, str], Pair] = {}
    for pair in combinations(inspection.compared, 2):
        both = [
            (layer, cosines[pair], conflicts[pair])
            for layer, norms, cosines, conflicts in rows
            if all(norms.get(expert) for expert in pair)
        ]
        overlaps = [layer for layer, _, _ in both if layer.overlap]
        found[pair] = Pair(
            mean(cosine for _, cosine, _ in both),
            mean(conflict for _, _, conflict in both),
            mean(layer.overlap[pair] for layer in overlaps),
            mean(leading(min(layer.shape)) / layer.shape[1] for layer in overlaps),
        )
    return found


@dataclass(frozen=True)
class Gamma:
    """Heterogeneity of the experts in one matrix.

    Attributes:
        layer: the matrix.
        values: γ by statistic.
        fired: whether the merge's own gate did; None where it has none, and before a merge.
    """

    layer: LayerView
    values: Mapping[Statistic, float]
    fired: bool | None


def gammas(data: Inspect) -> list[Gamma]:
    """γ of every matrix that two experts or more changed."""
    merge: Mapping[str, TensorDiagnostics] = data.diagnostics if isinstance(data, Report) else {}
    found: list[Gamma] = []
    counts: dict[str, int] = {}
    for layer in inspection_of(data).matrices:
        place = counts.get(layer.tensor, 0)
        counts[layer.tensor] = place + 1
        sizes = [norm for norm in layer.norms.values() if norm]
        if len(sizes) < 2:
            continue
        diagnostics = merge[layer.tensor].matrices if layer.tensor in merge else ()
        fired = diagnostics[place].fired if place < len(diagnostics) else None
        found.append(Gamma(layer, {s: heterogeneity(sizes, s) for s in STATISTICS}, fired))
    return found


def thresholds(data: Inspect) -> dict[Statistic, float]:
    """The gate's τ by statistic: what the recipe says, or else its default."""
    found = dict(DEFAULT_TAU)
    if not isinstance(data, Report) or data.manifest is None:
        return found
    recipe, family = data.manifest["recipe"], data.manifest["family"]
    parameters = shown_parameters(recipe["method"], recipe["parameters"], family)
    statistic, tau = parameters.get("gate"), parameters.get("tau")
    if statistic in found and isinstance(tau, float):
        found[statistic] = tau
    return found


def shown_spectra(data: Inspect) -> list[LayerView]:
    """A few of the matrices whose spectra were taken, of different kinds, from input to output.

    Where the merge refined some, these.
    """
    taken = [layer for layer in inspection_of(data).matrices if layer.spectra]
    layers = [layer for layer in taken if layer.before is not None] or taken
    kinds = [
        [layer for column in panel.columns.values() for layer in column]
        for panel in panels((kind_name(layer), layer) for layer in layers)
    ]
    if len(kinds) < _SPECTRA:
        return [layers[place] for place in evenly(len(layers), _SPECTRA)]
    chosen = [kinds[place] for place in evenly(len(kinds), _SPECTRA)]
    return [kind[step * (len(kind) - 1) // (_SPECTRA - 1)] for step, kind in enumerate(chosen)]


def evenly(count: int, wanted: int) -> list[int]:
    """Choose so many places from the first to the last.

    Example:
        >>> evenly(10, 4), evenly(2, 4), evenly(0, 4)
        ([0, 3, 6, 9], [0, 1], [])
    """
    return sorted({round(i * (count - 1) / (wanted - 1)) for i in range(wanted)}) if count else []


def curves(layer: LayerView) -> dict[str, SpectrumView]:
    """The spectra of one matrix, the experts' by name."""
    merged = {BEFORE: layer.before, MERGED: layer.merged}
    return {
        **{f"expert {expert}": spectrum for expert, spectrum in layer.spectra.items()},
        **{label: spectrum for label, spectrum in merged.items() if spectrum is not None},
    }
