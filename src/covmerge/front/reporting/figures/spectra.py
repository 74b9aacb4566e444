"""Singular values of a few matrices: experts, and the merged update before and after refinement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import Any

from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from covmerge.base.settings import Hint
from covmerge.front.reporting.data import (
    BEFORE,
    MERGED,
    Inspect,
    curves,
    inspection_of,
    mean,
    pairs,
    shown_spectra,
)
from covmerge.front.reporting.figures import canvas
from covmerge.front.reporting.style import BLUE, MUTED, ORANGE, RULE, cosine, quoted, share, shorten
from covmerge.run.inspection.result import LayerView
from covmerge.run.judgement.layers import kind_of

_SIDE = 1.9  # inches of a panel
_SPECTRA_LABEL = 26  # characters
_FLOOR = 1e-4  # of the largest value; below are float32 errors of an adapter's zeros
_LINES: dict[str, Any] = {
    BEFORE: {"color": ORANGE.light, "linestyle": "--", "linewidth": 1.6},
    MERGED: {"color": BLUE.light, "linestyle": "-", "linewidth": 1.6},
}


def spectra(data: Inspect) -> Figure:
    """Draw the singular values of a few matrices, on a logarithmic scale.

    Raises:
        NothingToDraw: no spectra were computed.
    """
    layers = shown_spectra(data)
    canvas.require(layers, f"no spectra were taken; take some by {Hint('spectra', 'some')}")
    with canvas.style():
        sheet = canvas.panelled(
            _title([layer for layer in inspection_of(data).matrices if layer.spectra]),
            [_SIDE] * len(layers),
            _SIDE,
            left=0.8,
            below=[0.4] * len(layers),
            bottom=0.35,
            lines=2,
        )
        top = 1.3 * max(view.sigma[0] for layer in layers for view in curves(layer).values())
        for layer, axes, first in zip(layers, sheet.axes, sheet.first, strict=True):
            _draw(axes, layer)
            axes.set_ylim(_FLOOR * top, top)  # before the scale: a matrix may have no value above 0
            axes.set_yscale("log")
            axes.tick_params(labelsize=canvas.SMALL)
            ticks = [
                tick for power in range(-12, 7) if _FLOOR * top <= (tick := 10.0**power) <= top
            ]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks] if first else [""] * len(ticks))
            axes.minorticks_off()
            last = max(view.places[-1] for view in curves(layer).values()) + 1
            axes.set_xticks([1, (last + 1) // 2, last] if last > 2 else list(range(1, last + 1)))
            axes.grid(axis="y", color=RULE.light, lw=0.5)
            axes.set_title(_label(layer))
            axes.set_xlabel("number of the singular value", fontsize=canvas.SMALL)
            axes.set_ylabel("singular value σ" if first else "")
        labels = {
            text: handle
            for axes in sheet.axes
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        sheet.figure.legend(labels.values(), labels, loc="lower left", ncols=3, borderaxespad=0.2)
        return canvas.finished(sheet.figure)


def _title(layers: Sequence[LayerView]) -> str:
    experts = mean(view.top_energy for layer in layers for view in layer.spectra.values())
    merged = mean(layer.merged.top_energy for layer in layers if layer.merged is not None)
    refined = [layer for layer in layers if layer.before is not None]
    said = "the top 5% of singular values hold"
    if refined:
        before = mean(layer.before.top_energy for layer in refined if layer.before is not None)
        after = mean(layer.merged.top_energy for layer in refined if layer.merged is not None)
        return (
            f"Refinement flattens the merged spectrum: {said} {share(before)} of its energy before "
            f"it and {share(after)} after it; {share(experts)} of an expert's"
        )
    if merged is not None:
        return f"In the merged update {said} {share(merged)} of the energy, in an expert's {share(experts)}"
    return f"In an expert's update {said} {share(experts)} of the energy"


def _draw(axes: Any, layer: LayerView) -> None:
    for name, view in curves(layer).items():
        line = _LINES.get(name, {"color": MUTED.light, "linewidth": 0.7, "alpha": 0.8})
        label = name if name in _LINES else "experts"
        places = [place + 1 for place in view.places]
        axes.plot(places, view.sigma, label=label, **line)


def _label(layer: LayerView) -> str:
    """Return a line for the block, and a line for the layer in it."""
    kind = kind_of(layer.name)
    block = layer.name[: layer.name.rfind(kind)].rstrip(".")
    return f"{shorten(block, _SPECTRA_LABEL)}\n{shorten(kind, _SPECTRA_LABEL)}"


# Measures of how much every two experts have in common: triangles, expert by expert.

_Pairs = Mapping[tuple[str, str], float]
_WRITTEN = 12  # with at most this many experts, cells have room for their numbers
_PAIRS_LABEL = 20
_CHANCE = 0.51
_LIGHT = 0.18  # luminance from which black is more readable than white


def cosines(data: Inspect) -> Figure:
    """Draw the cosine between the updates of every two experts, as a mean over the matrices.

    Raises:
        NothingToDraw: no two experts changed the same matrix.
    """
    found = {key: pair.cosine for key, pair in pairs(data).items() if pair.cosine is not None}
    canvas.require(found, "no two experts changed the same matrix")
    most = max(found, key=found.__getitem__)
    title = (
        f"{_both(most)} changed the base most alike: cosine {cosine(found[most])}; "
        f"{cosine(mean(found.values()))} in the mean of all pairs"
    )
    if len(found) == 1:
        title = f"The updates of {_both(most)} have a cosine of {cosine(found[most])}"
    elif len({cosine(value) for value in found.values()}) == 1:
        title = f"The updates of every two experts have a cosine of {cosine(found[most])}"
    limit = canvas.limit_of(found.values())
    label = "cosine; 0: unrelated, 1: the same"
    return _triangle(data, title, found, "RdBu", Normalize(-limit, limit), label, cosine)


def sign_conflicts(data: Inspect) -> Figure:
    """Draw the share of elements with opposite signs of two experts' updates, as a mean over the matrices.

    Raises:
        NothingToDraw: no two experts changed the same matrix.
    """
    found = {key: pair.conflict for key, pair in pairs(data).items() if pair.conflict is not None}
    canvas.require(found, "no two experts changed the same matrix")
    most, least = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    if found[most] > _CHANCE and len({share(value) for value in found.values()}) == 1:
        who = _both(most) if len(found) == 1 else "Every two experts"
        title = f"{who} pull {share(found[most])} of the weights apart; chance is {share(0.5)}"
    elif found[most] > _CHANCE:
        title = f"{_both(most)} disagree most: they pull {share(found[most])} of the weights apart"
    else:
        title = f"No two experts pull weights apart more often than by chance, {share(0.5)}"
    if share(found[most]) != share(found[least]):
        title += f"; {_both(least)} agree most, {share(found[least])}"
    limit = min(0.5, canvas.limit_of(value - 0.5 for value in found.values()))
    norm = Normalize(0.5 - limit, 0.5 + limit)
    label = f"moved in opposite directions; {share(0.5)}: chance"
    return _triangle(data, title, found, "RdBu_r", norm, label, share)


def overlaps(data: Inspect) -> Figure:
    """Draw the overlap of the inputs that matter most to two experts, as a mean over the matrices.

    Raises:
        NothingToDraw: no spectra were computed, or no two experts changed the same matrix.
    """
    found = pairs(data)
    known = {key: pair.overlap for key, pair in found.items() if pair.overlap is not None}
    canvas.require(
        known, f"no spectra of two experts were taken; take some by {Hint('spectra', 'some')}"
    )
    most = max(known, key=known.__getitem__)
    title = (
        f"{_both(most)} act most on the same inputs: {share(known[most])} of their leading "
        f"directions; chance is {share(found[most].chance)}"
    )
    if len({share(value) for value in known.values()}) == 1:
        who = _both(most) if len(known) == 1 else "Every two experts"
        title = (
            f"{who} share {share(known[most])} of their leading input directions; chance is "
            f"{share(found[most].chance)}"
        )
    label = f"shared leading inputs; {share(1.0)}: the same"
    return _triangle(data, title, known, "viridis", Normalize(0, max(known.values())), label, share)


def _triangle(
    data: Inspect,
    title: str,
    values: _Pairs,
    colours: str,
    norm: Any,
    label: str,
    write: Callable[[float], str],
) -> Figure:
    experts = inspection_of(data).compared
    rows, columns = experts[1:], experts[:-1]
    cells = [[values.get((column, row), nan) for column in columns] for row in rows]
    names = [shorten(name, _PAIRS_LABEL) for name in experts]
    longest = 0.2 + canvas.LETTER * max(map(len, names))
    side = min(0.4, (canvas.WIDTH - longest) / len(rows))
    tall = side * len(rows)
    with canvas.style():
        figure = canvas.blank(title, tall + longest + 0.6)
        axes = canvas.add_axes(figure, longest, longest + 0.6, tall, tall)
        axes.imshow(cells, cmap=colours, norm=norm, interpolation="none")
        axes.set_yticks(range(len(rows)), names[1:])
        axes.set_xticks(range(len(columns)), names[:-1], rotation=90, fontsize=canvas.NORMAL)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if len(experts) <= _WRITTEN:
            _write_cells(axes, cells, write)
        key = canvas.add_axes(figure, longest, 0.25, 1.6, 0.1)
        ends = {place: norm.vmin + place * (norm.vmax - norm.vmin) for place in (0.0, 0.5, 1.0)}
        canvas.draw_key(key, colours, {place: write(value) for place, value in ends.items()})
        key.set_title(label)
        return canvas.finished(figure)


def _write_cells(axes: Any, cells: list[list[float]], write: Callable[[float], str]) -> None:
    (image,) = axes.images
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            if isnan(value):
                continue
            red, green, blue, _ = (part**2.2 for part in image.cmap(image.norm(value)))
            light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > _LIGHT
            ink = "#000000" if light else "#ffffff"
            axes.text(x, y, write(value), ha="center", va="center", size=canvas.SMALL, color=ink)


def _both(pair: tuple[str, str]) -> str:
    return f"{quoted(pair[0])} and {quoted(pair[1])}"
