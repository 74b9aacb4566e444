"""Rows of numbers, as spreadsheets and data frames take them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import Any

from covmerge.base.errors import InputError
from covmerge.base.text import printable

Cell = str | bool | float | None

_LIBRARIES = ("pandas", "polars")
# A spreadsheet takes what begins so for a formula, and names of tensors come from strangers' files.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Table:
    """Rows of numbers; the first column names what they are of.

    Attributes:
        columns: headings, with units.
        rows: as many cells each; None where there is no number.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def csv(self) -> str:
        """Comma-separated values under one line of headings; numbers in full, nothing where there is none.

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
        """A data frame of pandas, or of polars where only that is installed.

        Raises:
            InputError: neither is.
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
    """What can be shown as a table; a subclass says which table, and says itself in a line."""

    def table(self) -> Table:
        """All rows."""
        raise NotImplementedError

    def html(self) -> str:
        """What a notebook shows: the most important in words, a table with bars, pictures."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.html()

    def to_dataframe(self) -> Any:
        """The rows of `table` as a data frame of pandas, or of polars where only that is installed.

        Raises:
            InputError: neither is.
        """
        return self.table().dataframe()


def _plain(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.startswith(_FORMULA) else text
