"""Tables of numbers, and their forms for spreadsheets, data frames and notebooks."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from io import StringIO
from math import isfinite, log10
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.text import printable

Cell = str | bool | float | None

_LIBRARIES = ("pandas", "polars")
# A spreadsheet reads text with such a start as a formula, and tensor names come from strangers' files.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Table:
    """Rows of numbers. The first column names what each row is about."""

    columns: tuple[str, ...]  # headings, with units
    rows: tuple[tuple[Cell, ...], ...]  # rows with a cell for each column; None: there is no number

    def csv(self) -> str:
        """Return comma-separated values under one line of headings: numbers in full, missing ones empty.

        Text that a spreadsheet would run as a formula gets an apostrophe before it.

        Example:
            >>> print(Table(("layer", "norm"), (("a,b", 0.5), ("=1+1", None))).csv())
            layer,norm
            "a,b",0.5
            '=1+1,
            <BLANKLINE>
        """
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([map(_plain, row) for row in (self.columns, *self.rows)])
        return text.getvalue()

    def dataframe(self) -> Any:
        """Return a data frame of pandas, or of polars where only that is installed.

        Raises:
            InputError: neither is installed.
        """
        columns = {name: [row[i] for row in self.rows] for i, name in enumerate(self.columns)}
        for library in _LIBRARIES:
            try:
                return import_module(library).DataFrame(columns)
            except ImportError:
                continue
        raise InputError(
            "a data frame needs pandas or polars: pip install pandas; or take `.table().csv()`"
        )


class Tabular:
    """A result that can be shown as a table. A subclass defines the table and its HTML."""

    def table(self) -> Table:
        """Return all rows."""
        raise NotImplementedError

    def html(self) -> str:
        """Return what a notebook shows: a summary in words, a table with bars, and plots."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.html()

    def to_dataframe(self) -> Any:
        """Return the rows of `table` as a data frame of pandas, or of polars where only that is installed.

        Raises:
            InputError: neither is installed.
        """
        return self.table().dataframe()


def _plain(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.startswith(_FORMULA) else text


# Tables and plots for notebooks: one piece of HTML, without scripts, style sheets or files.

_ROWS = 20
# Colours that are visible on white and on black.
_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#eeca3b", "#72b7b2", "#9d755d", "#79706e")
_BAR = "rgba(76,120,168,.35)"
_WIDTH, _HEIGHT, _EDGE = 480, 120, 8


def table_html(table: Table, *, drawn: Collection[str] = (), most: int = _ROWS) -> str:
    """Return a table as HTML. Of more than `most` rows, those in the middle are replaced by their count.

    The numbers in the columns `drawn` are not negative, and have a bar behind them.

    Example:
        >>> table_html(Table(("x",), (("<b>",),)))
        '<table><tr><th>x</th></tr><tr><td style="text-align:left">&lt;b&gt;</td></tr></table>'
    """
    rows = list(table.rows)
    head = rows[: most - most // 2] if len(rows) > most else rows
    tail = rows[len(rows) - most // 2 :] if len(rows) > most else []
    longest = {
        name: max(_sizes(row[place] for row in rows), default=0.0)
        for place, name in enumerate(table.columns)
        if name in drawn
    }
    lines = ["".join(f"<th>{_text(name)}</th>" for name in table.columns)]
    lines += [_row(table.columns, row, longest) for row in head]
    if tail:
        span, hidden = len(table.columns), len(rows) - len(head) - len(tail)
        lines.append(f'<td colspan="{span}" style="text-align:left">… {hidden} more</td>')
    lines += [_row(table.columns, row, longest) for row in tail]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def result_html(
    result: Tabular,
    said: Iterable[str] = (),
    *,
    more: str = "",
    drawn: tuple[str, ...] = (),
    most: int = _ROWS,
) -> str:
    """Return a result as HTML: its line, what is said of it, more HTML, and its table.

    Columns with headings that start with one of `drawn` get a bar behind each number.
    """
    table = result.table()
    bars = {name for name in table.columns if name.startswith(drawn)}
    lines = [paragraph(text) for text in (repr(result), *said)]
    return "".join([*lines, more, table_html(table, drawn=bars, most=most)])


def lines_svg(series: Mapping[str, Sequence[float | None]], label: str) -> str:
    """Return a plot with a line for each name, on a logarithmic scale from the least positive number.

    Return an empty text where there are fewer than two numbers to draw.
    """
    positive = [
        v for values in series.values() for v in values if v is not None and 0.0 < v and isfinite(v)
    ]
    if len(positive) < 2:
        return ""
    low, high = log10(min(positive)), log10(max(positive))
    parts = [
        _polyline(values, low, high, _COLOURS[place % len(_COLOURS)])
        for place, values in enumerate(series.values())
    ]
    said = f"{label}: {min(positive):.2g} to {max(positive):.2g}, logarithmic"
    legend = " ".join(
        f'<span style="color:{_COLOURS[place % len(_COLOURS)]}">■</span> {_text(name)}'
        for place, name in enumerate(series)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{_text(said)}" '
        f'style="display:block">{"".join(parts)}</svg><div>{_text(said)}. {legend}</div>'
    )


def paragraph(text: str) -> str:
    """Return text as a paragraph of HTML."""
    return f"<div>{_text(text)}</div>"


def _polyline(values: Sequence[float | None], low: float, high: float, colour: str) -> str:
    step = (_WIDTH - 2 * _EDGE) / max(1, len(values) - 1)
    tall, span = _HEIGHT - 2 * _EDGE, high - low or 1.0
    points = " ".join(
        f"{_EDGE + place * step:.1f},{_HEIGHT - _EDGE - tall * (log10(value) - low) / span:.1f}"
        for place, value in enumerate(values)
        if value is not None and 0.0 < value and isfinite(value)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _row(columns: Sequence[str], row: Sequence[Cell], longest: Mapping[str, float]) -> str:
    return "".join(_cell(cell, longest.get(name)) for name, cell in zip(columns, row, strict=True))


def _cell(cell: Cell, longest: float | None) -> str:
    if isinstance(cell, str):
        return f'<td style="text-align:left">{_text(cell)}</td>'
    text = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    (size,) = list(_sizes([cell])) or [0.0]
    if not longest or not size:
        return f"<td>{text}</td>"
    share = f"{100 * size / longest:.0f}%"
    return f'<td style="background:linear-gradient(90deg,{_BAR} {share},transparent {share})">{text}</td>'


def _sizes(cells: Iterable[Cell]) -> Iterable[float]:
    """Yield the lengths that bars can show: finite numbers, with negative ones as 0."""
    for cell in cells:
        if isinstance(cell, int | float) and not isinstance(cell, bool) and isfinite(cell):
            yield max(0.0, float(cell))


def _text(text: str) -> str:
    return escape(printable(text))
