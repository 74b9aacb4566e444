"""The canvas of the pictures: colours, fonts, and the placement of panels."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from covmerge.base.errors import InputError
from covmerge.front.reporting.grid import Panel
from covmerge.front.reporting.style import INK, MUTED, PAPER, shorten

# matplotlib's annotations are partial.
_matplotlib: Any = matplotlib


# Sizes in inches; sizes of fonts in points.
WIDTH = 9.2
SMALL, NORMAL, LARGE = 8.0, 9.0, 11.0
LETTER = 0.072  # mean width of a letter in the normal font
_TITLE_LINE, _LINE, _ABOVE, _TICKS, _GAP = 0.2, 0.15, 0.12, 0.33, 0.15
_TITLE_CHARACTERS = 100
_NAME_CHARACTERS = 36

_STYLE = {
    "figure.facecolor": PAPER.light,
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": NORMAL,
    "axes.titlepad": 4.0,
    "axes.titlelocation": "left",
    "axes.labelsize": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": NORMAL,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "text.color": INK.light,
    "text.parse_math": False,  # names from checkpoints may contain a $
    "legend.frameon": False,
    "legend.fontsize": NORMAL,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "covmerge",  # so that a figure always has the same ids
}


@contextmanager
def style() -> Generator[None]:
    """Draw in covmerge's style, independent of the user's settings of matplotlib."""
    with _matplotlib.rc_context(), warnings.catch_warnings():
        # Names may have letters that matplotlib's font lacks, but browsers have.
        warnings.filterwarnings("ignore", r"Glyph .* missing", UserWarning)
        _matplotlib.rcdefaults()
        _matplotlib.rcParams.update(_STYLE)
        yield


@dataclass(frozen=True)
class Sheet:
    """A figure whose panels are in rows with labels at the left."""

    figure: Any
    axes: Sequence[Any]
    first: Sequence[bool]


def blank(title: str, height: float) -> Any:
    """Begin a figure of full width, with the given height in inches below its title."""
    lines = textwrap.wrap(title, _TITLE_CHARACTERS)
    tall = height + _TITLE_LINE * len(lines) + 0.1
    figure: Any = Figure(figsize=(WIDTH, tall))
    place = 1 - 0.08 / tall
    figure.suptitle("\n".join(lines), x=0.01, y=place, ha="left", va="top", fontsize=LARGE)
    return figure


def add_axes(figure: Any, left: float, up: float, width: float, height: float) -> Any:
    """Add axes at a place and of a size in inches, from the lower left corner."""
    across, tall = figure.get_size_inches()
    return figure.add_axes((left / across, up / tall, width / across, height / tall))


def panelled(
    title: str,
    widths: Sequence[float],
    height: float,
    *,
    left: float,
    below: Sequence[float],
    bottom: float,
    lines: int = 1,
) -> Sheet:
    """Arrange panels of one height in rows, in inches; each has a label of some `lines` above it.

    `left` is the room for the labels of a row, `below` for each panel's ticks, `bottom` below all panels.
    """
    above = _ABOVE + _LINE * lines
    rows: list[list[int]] = []
    used = 0.0
    for number, width in enumerate(widths):
        if not rows or used + width > WIDTH:
            rows.append([])
            used = left
        rows[-1].append(number)
        used += width + _GAP
    ticks = [max(below[number] for number in row) for row in rows]
    up = sum(ticks) + len(rows) * (above + height) + bottom
    figure = blank(title, up)
    axes: list[Any] = []
    first: list[bool] = []
    for row, room in zip(rows, ticks, strict=True):
        up -= above + height
        across = left
        for number in row:
            axes.append(add_axes(figure, across, up, widths[number], height))
            first.append(number == row[0])
            across += widths[number] + _GAP
        up -= room
    return Sheet(figure, axes, first)


def column_width(shown: Sequence[Panel[Any]], left: float, limits: tuple[float, float]) -> float:
    """Return the width of a column in inches so that three panels with the most columns fill a row."""
    most = max(len(panel.columns) for panel in shown)
    least, largest = limits
    return min(largest, max(least, ((WIDTH - left) / 3 - _GAP) / most))


def panel_width(panel: Panel[Any], column: float) -> float:
    """Return the width of a panel in inches: that of its columns, or of its label if that is wider."""
    return max(_column_of(panel, column) * len(panel.columns), LETTER * len(panel_label(panel)))


def set_columns(axes: Any, panel: Panel[Any], column: float, margin: float = 0.0) -> None:
    """Set the width of a panel's columns, which are at 0, 1, ..., and label them.

    If the label makes a panel wider, its right side stays empty.
    """
    width = _column_of(panel, column)
    axes.set_xlim(-0.5 - margin, panel_width(panel, column) / width - 0.5 + margin)
    names = list(panel.columns)
    if panel.numbered:
        step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s * width >= 0.22)
        places = range(0, len(names), step)
        axes.set_xticks(places, [names[place] for place in places])
        axes.set_xlabel("block", fontsize=SMALL, color=MUTED.light, labelpad=1)
    elif len(names) > 1:
        short = [shorten(name, _NAME_CHARACTERS) for name in names]
        axes.set_xticks(range(len(names)), short, rotation=90)
    else:
        axes.set_xticks([])


def _column_of(panel: Panel[Any], column: float) -> float:
    # Names are written vertically, and each needs a line's width.
    return column if panel.numbered else max(column, _LINE)


def panel_label(panel: Panel[Any]) -> str:
    """Return the kind of layer, shortened."""
    return shorten(panel.label, 36)


def room_below(panel: Panel[Any]) -> float:
    """Return the height in inches of the labels of a panel's columns; names are written vertically."""
    if panel.numbered or len(panel.columns) == 1:
        return _TICKS
    return _TICKS + LETTER * max(len(shorten(name, _NAME_CHARACTERS)) for name in panel.columns)


def draw_key(axes: Any, colours: str, ticks: Mapping[float, str]) -> None:
    """Draw the colour scale of a heat map; `ticks` are from 0 to 1."""
    axes.imshow(
        [[step / 255 for step in range(256)]],
        cmap=colours,
        aspect="auto",
        extent=(0, 1, 0, 1),
        interpolation="none",
    )
    axes.set_yticks([])
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.spines[:].set_visible(False)


def limit_of(values: Iterable[float]) -> float:
    """Return a round limit of a scale that covers all values, at most 1."""
    largest = max(map(abs, values))
    return next((step for step in (0.05, 0.1, 0.2, 0.5) if largest <= step), 1.0)


def finished(figure: Any) -> Figure:
    """Create the parts of a figure that depend on drawing while the style is active."""
    figure.draw_without_rendering()
    return figure


class NothingToDraw(InputError):
    """Error: a report has no data for a picture."""


def require(found: object, what: str) -> None:
    """Raise NothingToDraw, whose message says what is missing, if nothing was found."""
    if not found:
        raise NothingToDraw(f"there is nothing to draw: {what}")
