"""The numbers behind each picture, as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covmerge.base.table import Cell, Table
from covmerge.front.reporting import data
from covmerge.run.inspection.result import LayerView

_PLACES = 9  # singular values of one curve in the table


def norms(report: data.Report) -> Table:
    """Return ‖Δ_t‖ / ‖W_0‖ in percent, layer by expert."""
    return _by_expert(report, lambda layer: _percents(layer.relative))


def retention(report: data.Report) -> Table:
    """Return the share of each expert that the merged model keeps, in percent, layer by expert."""
    return _by_expert(report, lambda layer: _percents(layer.retention))


def merged_cosines(report: data.Report) -> Table:
    """Return the cosine of each expert's update with the merged update, layer by expert."""
    return _by_expert(report, lambda layer: data.changed(layer, layer.merged_cosines))


def cosines(report: data.Report) -> Table:
    """Return the cosine between the updates of every two experts."""
    return _by_pair(report, "cosine", lambda pair: pair.cosine)


def sign_conflicts(report: data.Report) -> Table:
    """Return the share of weights that every two experts move in opposite directions, in percent."""
    return _by_pair(report, "opposite signs, %", lambda pair: _percent(pair.conflict))


def overlaps(report: data.Report) -> Table:
    """Return the share of leading inputs that two experts have in common, and by chance, in percent."""
    found = _by_pair(report, "shared inputs, %", lambda pair: _percent(pair.overlap))
    chances = [_percent(pair.chance) for pair in data.pairs(report).values()]
    rows = [(*row, chance) for row, chance in zip(found.rows, chances, strict=True)]
    return Table((*found.columns, "by chance, %"), tuple(rows))


def gamma(report: data.Report) -> Table:
    """Return γ, whether it is above its threshold, and whether the merge's gate fired."""
    taus, found = data.thresholds(report), data.gammas(report)
    known = any(entry.fired is not None for entry in found)
    columns = [
        "layer",
        *(f"{name} γ" for name in data.STATISTICS.values()),
        *(f"above τ = {taus[statistic]:g}, {name}" for statistic, name in data.STATISTICS.items()),
        *(["gate fired in this merge"] if known else []),
    ]
    rows = [
        (
            entry.layer.name,
            *(entry.values[statistic] for statistic in data.STATISTICS),
            *(entry.values[statistic] > taus[statistic] for statistic in data.STATISTICS),
            *([entry.fired] if known else []),
        )
        for entry in found
    ]
    return Table(tuple(columns), tuple(rows))


def spectrum(layer: LayerView) -> Table:
    """Return some of the singular values of one matrix."""
    found = data.curves(layer)
    places = {s.places[i] for s in found.values() for i in data.evenly(len(s.places), _PLACES)}
    values = [dict(zip(s.places, s.sigma, strict=True)) for s in found.values()]
    rows = [(f"σ{place + 1}", *(sigma.get(place) for sigma in values)) for place in sorted(places)]
    return Table((layer.name, *found), tuple(rows))


def ranks(report: data.Report) -> Table:
    """Return effective ranks and leading energy of every matrix; those of the experts as a mean."""
    layers = [layer for layer in report.inspection.matrices if layer.spectra]
    parts = [
        label
        for label in (data.BEFORE, data.MERGED)
        if any(label in data.curves(layer) for layer in layers)
    ]
    columns = [
        "layer",
        *(f"effective rank: {part}" for part in ("experts, mean", *parts)),
        *(f"energy in the top 5%: {part}, %" for part in ("experts, mean", *parts)),
    ]
    rows: list[tuple[Cell, ...]] = []
    for layer in layers:
        spectra, found = layer.spectra.values(), data.curves(layer)
        views = [found.get(part) for part in parts]
        rows.append(
            (
                layer.name,
                data.mean(view.effective_rank for view in spectra),
                *(None if view is None else view.effective_rank for view in views),
                _percent(data.mean(view.top_energy for view in spectra)),
                *(None if view is None else _percent(view.top_energy) for view in views),
            )
        )
    return Table(tuple(columns), tuple(rows))


def experts(report: data.Report) -> Table:
    """Return the main facts about each expert."""
    inspection = report.inspection
    manifest = report.manifest or {"recipe": {"experts": {}}, "heads": {}}
    given: Mapping[str, Mapping[str, Any]] = manifest["recipe"]["experts"]
    heads: Mapping[str, Sequence[str]] = manifest["heads"]
    shares, layers = inspection.retention(), inspection.matrices
    columns: dict[str, Mapping[str, float | None]] = {
        "kept of what it adds, %": {} if inspection.adapters else _percents(shares),
        "cosine with the merged update": {
            name: data.mean(layer.merged_cosines.get(name) for layer in layers)
            for name in inspection.compared
        },
        "size of its update, % of the base": {
            name: _percent(data.moved_by(inspection, name)) for name in inspection.compared
        },
        "matrices it changed": {
            name: sum(bool(layer.norms.get(name)) for layer in layers)
            for name in inspection.compared
        },
        "weight": {name: expert["weight"] for name, expert in given.items()},
        "tensors of its own head": {name: len(names) for name, names in heads.items()},
    }
    known = {h: v for h, v in columns.items() if any(value is not None for value in v.values())}
    rows = [(name, *(values.get(name) for values in known.values())) for name in inspection.experts]
    return Table(("expert", *known), tuple(rows))


def method_columns(report: data.Report) -> list[Table]:
    """Return the methods' diagnostics of each matrix, with a table for each set of headings."""
    found: dict[tuple[str, ...], list[tuple[Cell, ...]]] = {}
    for one in report.diagnostics.values():
        for place, matrix in enumerate(one.matrices):
            cells = matrix.report_columns(one.experts)
            if cells:
                name = f"{one.tensor}[{place}]" if len(one.matrices) > 1 else one.tensor
                found.setdefault(("layer", *cells), []).append((name, *cells.values()))
    return [Table(columns, tuple(rows)) for columns, rows in found.items()]


def losses(report: data.Report) -> Table | None:
    """Return the losses from rounding to a quantised format by layer; None if nothing is quantised."""
    totals: Mapping[str, Any] = {} if report.manifest is None else report.manifest["totals"]
    found: Mapping[str, Any] | None = totals.get("quantised")
    if found is None:
        return None
    layers: Sequence[Mapping[str, Any]] = found["layers"]
    rows = [
        (
            layer["layer"],
            layer["tensors"],
            _percent(layer["error"]),
            _percent(layer.get("lost")),
            _percent(layer.get("kept")),
        )
        for layer in layers
    ]
    columns = (
        *("layer", "quantised tensors", "rounding at most, % of a tensor's weights"),
        *("noise, % of the update", "left of the update, %"),
    )
    return Table(columns, tuple(rows))


def costs(report: data.Report) -> Table:
    """Return seconds, if measured, memory and operations of each tensor of the merge."""
    timed = any(cost.seconds is not None for cost in report.costs.values())
    rows = [
        (name, *([cost.seconds] if timed else []), cost.memory / 1e6, cost.flops / 1e9)
        for name, cost in report.costs.items()
    ]
    columns = ("tensor", *(["seconds"] if timed else []), "memory, MB", "GFLOP")
    return Table(columns, tuple(rows))


def _by_pair(
    report: data.Report, heading: str, value: Callable[[data.Pair], float | None]
) -> Table:
    rows = [
        (f"{one} and {other}", value(pair)) for (one, other), pair in data.pairs(report).items()
    ]
    return Table(("experts", heading), tuple(rows))


def _by_expert(
    report: data.Report, value: Callable[[LayerView], Mapping[str, float | None]]
) -> Table:
    inspection = report.inspection
    names = inspection.compared
    rows = [
        (layer.name, *(found.get(expert) for expert in names))
        for layer in inspection.matrices
        if (found := value(layer))
    ]
    return Table(("layer", *names), tuple(rows))


def _percents(values: Mapping[str, float] | Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: _percent(value) for name, value in values.items()}


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
