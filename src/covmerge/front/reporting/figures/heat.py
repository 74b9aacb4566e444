"""Heat maps, layer by expert: how far each expert moved, and how much the merged model keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from statistics import fmean
from typing import Any

from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from covmerge.front.reporting.data import Inspect, changed, inspection_of, kind_name, mean, moved_by
from covmerge.front.reporting.figures import canvas
from covmerge.front.reporting.grid import Panel, panels
from covmerge.front.reporting.style import MUTED, PAPER, cosine, number, quoted, share, shorten
from covmerge.run.inspection.result import Inspection, LayerView
from covmerge.run.judgement.layers import block_of, ranges

_Values = Mapping[str, float | None]
_WORST = 3  # blocks named in a title
_LABEL = 26  # characters of an expert's name


@dataclass(frozen=True)
class _Scale:
    """A scale from values to colours."""

    colours: str
    norm: Any
    ticks: Mapping[float, str]
    label: str


def norms(data: Inspect) -> Figure:
    """Draw ‖Δ_t‖ / ‖W_0‖ of every expert in every layer: how far each expert moved.

    Raises:
        NothingToDraw: no expert changed a matrix of the base.
    """
    inspection = inspection_of(data)
    layers = [(layer, changed(layer, layer.relative)) for layer in inspection.matrices]
    values = [value for _, found in layers for value in found.values() if value]
    canvas.require(values, "no expert changed a matrix of the base")
    moved = {expert: moved_by(inspection, expert) for expert in inspection.compared}
    movers = [expert for expert in moved if moved[expert]]
    most = max(movers, key=moved.__getitem__)
    least = min(movers, key=moved.__getitem__)
    title = f"{quoted(most)} moved {share(moved[most])} of the base's norm"
    times = number(moved[most] / moved[least], 2)
    if times == "1" and len(movers) == len(moved) > 1:
        title = f"All experts moved about {share(moved[most])} of the base's norm"
    elif times != "1":
        title += f", {times} times as far as {quoted(least)}"
    kinds = _by_kind(layers, most)
    if len(kinds) > 1:
        title += f"; farthest in {shorten(max(kinds, key=kinds.__getitem__), 40)}"
    scale = _Scale(
        "viridis",
        LogNorm(min(values), max(max(values), 1.001 * min(values)), clip=True),
        {tick: share(tick) for tick in _round_values(min(values), max(values))},
        "size of the update, ‖Δ‖ / ‖W₀‖, logarithmic",
    )
    return _heat_map(title, layers, scale, {e: share(v) for e, v in moved.items()})


def retention(data: Inspect) -> Figure:
    """Draw the share of every expert's contribution that the merged model keeps, layer by layer.

    Raises:
        NothingToDraw: nothing was merged.
    """
    inspection = inspection_of(data)
    shares = inspection.retention()
    canvas.require(
        shares, "no merged model was looked at; make a report of a merge (covmerge report OUT)"
    )
    layers = [(layer, layer.retention) for layer in inspection.matrices]
    scale = _Scale(
        "RdBu",
        Normalize(-1, 1, clip=True),
        {-1: f"{share(-1)} or less", 0: share(0), 1: share(1)},
        "share of the expert's contribution that is kept",
    )
    labels = {expert: share(shares.get(expert)) for expert in inspection.compared}
    return _heat_map(_who_keeps_least(inspection, shares, layers), layers, scale, labels)


def _who_keeps_least(
    inspection: Inspection,
    shares: Mapping[str, float],
    layers: Sequence[tuple[LayerView, _Values]],
) -> str:
    """Return a title on the lowest predicted retention; for adapters it is not valid (`page.RETENTION`)."""
    if inspection.adapters:
        return "What is predicted to be kept; of adapters it does not agree with accuracy"
    best = max(shares, key=shares.__getitem__)
    # Of several that keep nothing, the one that was harmed most.
    raw = {e: mean(layer.retention.get(e) for layer in inspection.matrices) or 0.0 for e in shares}
    worst = min(shares, key=lambda expert: (shares[expert], raw[expert]))
    if len(shares) > 1 and share(shares[best]) == share(shares[worst]):
        return f"By prediction every expert keeps {share(shares[worst])} of what it adds"
    title = f"{quoted(worst)} keeps least by prediction, {share(shares[worst])} of what it adds"
    if len(shares) == 1:
        title = f"By prediction {quoted(worst)} keeps {share(shares[worst])} of what it adds"
    blocks = _by_block(layers, worst)
    if len(blocks) > _WORST:
        least = sorted(blocks, key=blocks.__getitem__)[:_WORST]
        title += f", least in blocks {ranges(least)}"
    return title if best == worst else f"{title}; {quoted(best)} most, {share(shares[best])}"


def merged_cosines(data: Inspect) -> Figure:
    """Draw the cosine of every expert's update with the merged one, layer by layer.

    Raises:
        NothingToDraw: nothing was merged.
    """
    inspection = inspection_of(data)
    layers = [
        (layer, changed(layer, layer.merged_cosines))
        for layer in inspection.matrices
        if layer.merged_cosines
    ]
    found = {e: mean(v.get(e) for _, v in layers) for e in inspection.compared}
    known = {expert: value for expert, value in found.items() if value is not None}
    canvas.require(
        known, "no merged model was looked at; make a report of a merge (covmerge report OUT)"
    )
    most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    title = f"The merged update points most along {quoted(most)} (cosine {cosine(known[most])})"
    if len(known) == 1:
        title = (
            f"The merged update and that of {quoted(most)} have a cosine of {cosine(known[most])}"
        )
    elif cosine(known[most]) == cosine(known[least]) and len(known) > 1:
        title = f"The merged update points along every expert alike (cosine {cosine(known[most])})"
    elif most != least:
        title += f", least along {quoted(least)} ({cosine(known[least])})"
    limit = canvas.limit_of(v for _, values in layers for v in values.values() if v is not None)
    scale = _Scale(
        "RdBu",
        Normalize(-limit, limit),
        {value: number(value) for value in (-limit, 0.0, limit)},
        "cosine of the expert's update with the merged one; 0: unrelated, 1: the same",
    )
    return _heat_map(title, layers, scale, {e: cosine(v) for e, v in found.items()})


def _heat_map(
    title: str,
    layers: Sequence[tuple[LayerView, _Values]],
    scale: _Scale,
    means: Mapping[str, str],
) -> Figure:
    """Draw values by layer and expert; each expert's label has its mean."""
    shown = panels((kind_name(layer), values) for layer, values in layers)
    labels = [f"{shorten(expert, _LABEL)}  {text}" for expert, text in means.items()]
    left = 0.25 + canvas.LETTER * max(map(len, labels))
    column = canvas.column_width(shown, left, (0.045, 0.25))
    row = 0.2 if len(means) <= 10 else 0.17
    with canvas.style():
        sheet = canvas.panelled(
            title,
            [canvas.panel_width(panel, column) for panel in shown],
            row * len(labels),
            left=left,
            below=[canvas.room_below(panel) for panel in shown],
            bottom=0.65,
        )
        for panel, axes, first in zip(shown, sheet.axes, sheet.first, strict=True):
            _draw_panel(axes, panel, list(means), scale, column)
            axes.set_yticks(range(len(labels)), labels if first else [""] * len(labels))
        gaps = any(value is None for _, values in layers for value in values.values())
        _draw_key(sheet, scale, gaps)
        return canvas.finished(sheet.figure)


def _draw_panel(
    axes: Any, panel: Panel[_Values], experts: Sequence[str], scale: _Scale, column: float
) -> None:
    cells = [
        [mean(values.get(expert) for values in layers) for layers in panel.columns.values()]
        for expert in experts
    ]
    known = [[float("nan") if cell is None else cell for cell in line] for line in cells]
    axes.imshow(known, cmap=scale.colours, norm=scale.norm, aspect="auto", interpolation="none")
    for place in range(1, len(experts)):
        axes.axhline(place - 0.5, color=PAPER.light, lw=1)
    gaps = [(x, y) for y, line in enumerate(cells) for x, cell in enumerate(line) if cell is None]
    axes.plot([x for x, _ in gaps], [y for _, y in gaps], "x", color=MUTED.light, ms=3, mew=0.7)
    axes.set_title(canvas.panel_label(panel))
    canvas.set_columns(axes, panel, column)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_key(sheet: canvas.Sheet, scale: _Scale, gaps: bool) -> None:
    axes = canvas.add_axes(sheet.figure, 0.75, 0.22, 2.6, 0.1)
    ticks = {float(scale.norm(tick)): text for tick, text in scale.ticks.items()}
    canvas.draw_key(axes, scale.colours, ticks)
    axes.set_title(scale.label + ("; ×: the expert left the layer as it was" if gaps else ""))


def _by_kind(layers: Sequence[tuple[LayerView, _Values]], expert: str) -> dict[str, float]:
    found = {
        panel.label: mean(row.get(expert) for column in panel.columns.values() for row in column)
        for panel in panels((kind_name(layer), values) for layer, values in layers)
    }
    return {kind: value for kind, value in found.items() if value is not None}


def _by_block(layers: Sequence[tuple[LayerView, _Values]], expert: str) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for layer, values in layers:
        block, value = block_of(layer.name), values.get(expert)
        if block is not None and value is not None:
            found.setdefault(block, []).append(value)
    return {block: fmean(values) for block, values in found.items()}


def _round_values(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten in a range; only the powers if the range is wide."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    steps = (1,) if high > 300 * low else (1, 2, 5)
    return [v for p in powers for s in steps if low <= (v := s * 10.0**p) <= high]
