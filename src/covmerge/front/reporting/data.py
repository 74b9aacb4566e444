"""The content of a report, as data."""

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
    """The cost of merging one tensor."""

    seconds: float | None  # seconds of mathematics; None if not measured
    memory: int  # bytes in use while the tensor is merged, by the plan
    flops: float  # floating-point operations, by the method's cost model


@dataclass(frozen=True, repr=False)
class Report(Tabular):
    """The inspection of experts and, after a merge, of the merged model.

    Attributes:
        title: a readable name: that of the output folder, or of the base.
        inspection: the measurements, layer by layer.
        manifest: covmerge.json of the merged model; None before a merge.
        diagnostics: the methods' diagnostics, by tensor; empty before a merge.
        verification: the outcome of re-reading the merged model.
        costs: the costs by tensor of the merge; empty before a merge.
        run: seconds and memory of the whole merge, if it was just run; as in `MergeResult.run`.
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
        """Return the rows of the inspection."""
        return self.inspection.table()

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        return paragraph(repr(self)) + self.inspection.html()

    def as_json(self) -> dict[str, Json]:
        """Return the whole report as plain JSON."""
        return {
            "title": self.title,
            "inspection": self.inspection.as_json(),
            "manifest": None if self.manifest is None else dict(self.manifest),
            "verification": None if self.verification is None else self.verification.summary(),
            "costs": {name: vars(cost) for name, cost in self.costs.items()},
            "run": dict(self.run),
        }


# The data of a report's pictures and of the tables behind them.

Inspect = Inspection | Report
STATISTICS: Mapping[Statistic, str] = {"paper": "paper's", "scale_free": "scale-free"}
BEFORE, MERGED = "merged, before refinement", "merged"
_SPECTRA = 4  # layers whose singular values are drawn


def inspection_of(data: Inspect) -> Inspection:
    """Return the inspection of a report, or the inspection itself."""
    return data.inspection if isinstance(data, Report) else data


def kind_name(layer: LayerView) -> str:
    """Return the name by which pictures sort a layer; the matrices of an expert stack are of one kind."""
    return layer.tensor if layer.role == Role.EXPERT_STACK.value else layer.name


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def changed(layer: LayerView, values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace a layer's values by None for the experts that did not change the layer."""
    norms = layer.norms
    return {expert: value if norms[expert] else None for expert, value in values.items()}


def moved_by(inspection: Inspection, expert: str) -> float:
    """Return ‖Δ_t‖ / ‖W_0‖ over all matrices."""
    base = hypot(*(layer.sums.base_norm for layer in inspection.matrices))
    return hypot(*(layer.norms.get(expert, 0.0) for layer in inspection.matrices)) / (base or 1.0)


@dataclass(frozen=True)
class Pair:
    """Means for two experts over the matrices that both changed; None if there are no such matrices."""

    cosine: float | None
    # share of opposite signs among the elements that both changed; 0.5 is chance
    conflict: float | None
    overlap: float | None  # overlap of the inputs that matter most to each; 1: the same inputs
    chance: float | None  # the overlap of unrelated updates


def pairs(data: Inspect) -> dict[tuple[str, str], Pair]:
    """Return the comparison of every two experts."""
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
    """Heterogeneity of the experts in one matrix."""

    layer: LayerView
    values: Mapping[Statistic, float]  # γ by statistic
    # whether the gate fired in the merge; None if its method has no gate, and before a merge
    fired: bool | None


def gammas(data: Inspect) -> list[Gamma]:
    """Return γ of every matrix that at least two experts changed."""
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
    """Return the gate's τ by statistic: the recipe's value, or the default."""
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
    """Return a few of the matrices with spectra, of different kinds, from input to output.

    If the merge refined matrices, only these are chosen from.
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
    """Return the given number of evenly spaced places from the first to the last.

    Example:
        >>> evenly(10, 4), evenly(2, 4), evenly(0, 4)
        ([0, 3, 6, 9], [0, 1], [])
    """
    return sorted({round(i * (count - 1) / (wanted - 1)) for i in range(wanted)}) if count else []


def curves(layer: LayerView) -> dict[str, SpectrumView]:
    """Return the spectra of one matrix by label; the experts' labels have their names."""
    merged = {BEFORE: layer.before, MERGED: layer.merged}
    return {
        **{f"expert {expert}": spectrum for expert, spectrum in layer.spectra.items()},
        **{label: spectrum for label, spectrum in merged.items() if spectrum is not None},
    }
