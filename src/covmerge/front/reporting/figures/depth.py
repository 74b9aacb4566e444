"""Quantities from input to output: γ with its gate, time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from covmerge.base.sizes import format_size
from covmerge.base.text import counted
from covmerge.front.reporting.data import (
    STATISTICS,
    Gamma,
    Inspect,
    Report,
    gammas,
    kind_name,
    thresholds,
)
from covmerge.front.reporting.figures import canvas
from covmerge.front.reporting.grid import Panel, panels
from covmerge.front.reporting.style import BLUE, INK, MUTED, ORANGE, RULE, share, shorten
from covmerge.maths.covariance.estimate import Statistic
from covmerge.run.judgement.layers import by_depth

_LEFT, _TALL = 0.65, 1.1  # inches
_LEAST = 0.02  # share of the tallest bar, below which bars are not drawn
_LINES: Mapping[Statistic, Any] = {
    "paper": {"color": BLUE.light, "marker": "o", "linestyle": "-"},
    "scale_free": {"color": ORANGE.light, "marker": "s", "linestyle": "--"},
}


def gamma(data: Inspect) -> Figure:
    """Draw γ over its threshold, for the paper's statistic and for the scale-free one.

    Raises:
        NothingToDraw: no matrix was changed by two experts.
    """
    found, taus = gammas(data), thresholds(data)
    canvas.require(found, "no two experts changed the same matrix")
    shown = panels((kind_name(entry.layer), entry) for entry in found)
    top = 2 * max([1.0, *(r for e in found for r in _ratios(e, taus).values() if r < inf)])
    with canvas.style():
        sheet, column = _strips(_what_fires(found, taus), shown)
        for panel, axes, first in zip(shown, sheet.axes, sheet.first, strict=True):
            axes.axhline(1, color=INK.light, lw=0.8)
            for statistic, line in _LINES.items():
                ratios = [
                    min(top, fmean(_ratios(entry, taus)[statistic] for entry in entries))
                    for entries in panel.columns.values()
                ]
                axes.plot(range(len(ratios)), ratios, markersize=2.5, clip_on=False, **line)
            axes.set_yscale("symlog", linthresh=0.1)
            axes.set_ylim(0, top)
            ticks = [
                tick for tick in (0.0, *(10.0**power for power in range(-1, 9))) if tick <= top
            ]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks] if first else [""] * len(ticks))
            axes.minorticks_off()
            _finish_strip(axes, panel, column, "γ / τ" if first else "")
        for statistic, name in STATISTICS.items():
            label = f"{name} γ, τ = {taus[statistic]:g}"
            sheet.axes[0].plot([], [], label=label, markersize=4, **_LINES[statistic])
        sheet.axes[0].plot([], [], color=INK.light, lw=0.8, label="the gate: above it γ fires")
        handles, labels = sheet.axes[0].get_legend_handles_labels()
        sheet.figure.legend(handles, labels, loc="lower left", ncols=3, borderaxespad=0.2)
        return canvas.finished(sheet.figure)


def costs(report: Report) -> Figure:
    """Draw the seconds for each tensor of the merge, or its operations if no time was measured.

    Raises:
        NothingToDraw: nothing was merged.
    """
    canvas.require(report.costs, "nothing was merged")
    timed = any(cost.seconds is not None for cost in report.costs.values())
    unit = "seconds" if timed else "GFLOP"
    spent = {n: (c.seconds or 0.0) if timed else c.flops / 1e9 for n, c in report.costs.items()}
    total = sum(spent.values()) or 1.0
    everything = panels((name, name) for name in by_depth(report.costs))
    first, most = max(_kinds(everything, spent), key=lambda kind: kind[1])
    largest = max(report.costs, key=lambda name: report.costs[name].memory)
    title = (
        f"{shorten(first, 40)} takes {share(most / total)} of the "
        f"{'time' if timed else 'work'}; the most memory, {format_size(report.costs[largest].memory)}, "
        f"is needed by {shorten(largest, 50)}"
    )
    tallest = max(height for panel in everything for height in _heights(panel, spent))
    shown = list(_without_crumbs(everything, spent, _LEAST * tallest))
    with canvas.style():
        sheet, column = _strips(title, shown)
        for panel, axes, first_of_row in zip(shown, sheet.axes, sheet.first, strict=True):
            heights = _heights(panel, spent)
            axes.bar(range(len(heights)), heights, width=0.7, color=BLUE.light)
            axes.set_ylim(0, 1.3 * tallest)
            axes.locator_params(axis="y", nbins=4)
            axes.tick_params(labelleft=first_of_row)
            _finish_strip(axes, panel, column, unit if first_of_row else "")
            memory = max(report.costs[n].memory for names in panel.columns.values() for n in names)
            axes.annotate(
                format_size(memory),
                (0, 1),
                (3, -2),
                xycoords="axes fraction",
                textcoords="offset points",
                va="top",
                fontsize=canvas.SMALL,
                color=MUTED.light,
            )
        return canvas.finished(sheet.figure)


def _what_fires(found: Sequence[Gamma], taus: Mapping[Statistic, float]) -> str:
    above = [sum(entry.values[s] > taus[s] for entry in found) for s in STATISTICS]
    fired = [entry.fired for entry in found if entry.fired is not None]
    matrices = counted(len(found), "matrix", "matrices")
    who = f"The gate fired in {sum(fired) or 'none'}" if fired else "ACE's gate would fire in none"
    if not any(above):
        return f"{who} of {matrices}: γ stays below both thresholds"
    paper, free = (count or "none" for count in above)
    if fired:
        return (
            f"{who} of {matrices}: the paper's γ is above its threshold in {paper}, the scale-free "
            f"one in {free}"
        )
    return (
        f"Of {matrices}, ACE's gate would fire in {paper} by the paper's γ, in {free} by the "
        "scale-free one"
    )


def _strips(title: str, shown: Sequence[Panel[Any]]) -> tuple[canvas.Sheet, float]:
    """Lay out panels with one axis of values; also return the width of a block."""
    column = canvas.column_width(shown, _LEFT, (0.03, 0.26))
    widths = [canvas.panel_width(panel, column) for panel in shown]
    below = [canvas.room_below(panel) for panel in shown]
    return canvas.panelled(title, widths, _TALL, left=_LEFT, below=below, bottom=0.35), column


def _finish_strip(axes: Any, panel: Panel[Any], column: float, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_title(canvas.panel_label(panel))
    axes.grid(axis="y", color=RULE.light, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=canvas.SMALL)
    canvas.set_columns(axes, panel, column, margin=0.1)


def _ratios(entry: Gamma, taus: Mapping[Statistic, float]) -> dict[Statistic, float]:
    return {s: value / taus[s] if taus[s] else inf for s, value in entry.values.items()}


def _kinds(shown: Sequence[Panel[str]], spent: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the cost of each kind of layer, and of each layer that occurs once."""
    for panel in shown:
        heights = _heights(panel, spent)
        if panel.numbered:
            yield panel.label, sum(heights)
        else:
            yield from zip(panel.columns, heights, strict=True)


def _heights(panel: Panel[str], spent: Mapping[str, float]) -> list[float]:
    return [sum(spent[name] for name in names) for names in panel.columns.values()]


def _without_crumbs(
    shown: Sequence[Panel[str]], spent: Mapping[str, float], least: float
) -> Iterator[Panel[str]]:
    """Leave out layers of negligible cost; a kind of layer keeps all its blocks, in order."""
    for panel in shown:
        heights = _heights(panel, spent)
        if max(heights) < least:
            continue
        if panel.numbered:
            yield panel
            continue
        columns = zip(panel.columns.items(), heights, strict=True)
        large = dict(column for column, height in columns if height >= least)
        yield replace(
            panel, columns=large, label=next(iter(large)) if len(large) == 1 else panel.label
        )
