"""Singular values of a few matrices: experts, and the merged update before and after refinement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covmerge.base.settings import Hint
from covmerge.front.reporting.data import (
    BEFORE,
    MERGED,
    Inspect,
    curves,
    inspection_of,
    mean,
    shown_spectra,
)
from covmerge.front.reporting.figures.canvas import SMALL, finished, panelled, require, style
from covmerge.front.reporting.style import (
    BLUE,
    MUTED,
    ORANGE,
    RULE,
    needed_for_reports,
    share,
    shorten,
)
from covmerge.run.inspection.result import LayerView
from covmerge.run.judgement.layers import kind_of

with needed_for_reports():
    from matplotlib.figure import Figure

_SIDE = 1.9  # inches of a panel
_LABEL = 26  # characters
_FLOOR = 1e-4  # of the largest value; below lies what float32 leaves of an adapter's zeros
_LINES: dict[str, Any] = {
    BEFORE: {"color": ORANGE.light, "linestyle": "--", "linewidth": 1.6},
    MERGED: {"color": BLUE.light, "linestyle": "-", "linewidth": 1.6},
}


def spectra(data: Inspect) -> Figure:
    """Draw the singular values of a few matrices, on a logarithmic scale.

    Raises:
        NothingToDraw: no spectra were taken.
    """
    layers = shown_spectra(data)
    require(layers, f"no spectra were taken; take some by {Hint('spectra', 'some')}")
    with style():
        sheet = panelled(
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
            axes.set_yscale("log")
            axes.set_ylim(_FLOOR * top, top)
            axes.tick_params(labelsize=SMALL)
            ticks = [
                tick for power in range(-12, 7) if _FLOOR * top <= (tick := 10.0**power) <= top
            ]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks] if first else [""] * len(ticks))
            axes.minorticks_off()
            last = max(view.places[-1] for view in curves(layer).values()) + 1
            axes.set_xticks([1, (last + 1) // 2, last] if last > 2 else list(range(1, last + 1)))
            axes.grid(axis="y", color=RULE.light, lw=0.5)
            axes.set_title(_label(layer))
            axes.set_xlabel("number of the singular value", fontsize=SMALL)
            axes.set_ylabel("singular value σ" if first else "")
        labels = {
            text: handle
            for axes in sheet.axes
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        sheet.figure.legend(labels.values(), labels, loc="lower left", ncols=3, borderaxespad=0.2)
        return finished(sheet.figure)


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
    """A line for the block, and one for the layer in it."""
    kind = kind_of(layer.name)
    block = layer.name[: layer.name.rfind(kind)].rstrip(".")
    return f"{shorten(block, _LABEL)}\n{shorten(kind, _LABEL)}"
