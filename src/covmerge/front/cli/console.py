"""Console output: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from covmerge.base.errors import InputError
from covmerge.base.table import Tabular
from covmerge.base.text import printable

# Readable durations and operation counts.


def format_seconds(seconds: float) -> str:
    """Return a duration with the precision that matters at its size.

    Example:
        >>> [format_seconds(s) for s in (0.042, 7.25, 59.99, 3599.8, 7500)]
        ['0.04 s', '7.2 s', '1 min 00 s', '1 h 00 min', '2 h 05 min']
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_flops(flops: float) -> str:
    """Return floating-point operations with a decimal unit.

    Example:
        >>> format_flops(1500), format_flops(3.14159e12)
        ('1.5 kFLOP', '3.14 TFLOP')
    """
    prefixes = iter(("k", "M", "G", "T", "P"))
    prefix = ""
    while flops >= 999.5 and (larger := next(prefixes, "")):
        flops, prefix = flops / 1000, larger
    return f"{flops:.3g} {prefix}FLOP"


NOTE, WARNING = "note", "warning"  # labels of facts that readers should not miss
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def stdout() -> Console:
    """Return a console for results."""
    # Names in checkpoints and paths are plain text, never markup.
    return Console(markup=False, emoji=False, highlight=False)


def stderr() -> Console:
    """Return a console for progress, warnings and errors."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def say(kind: str, message: str) -> None:
    """Print "kind: message" to stderr; kind is `error`, `warning` or `note`."""
    line = Text.assemble((f"{kind}: ", _STYLES[kind]), printable(message))
    stderr().print(line, soft_wrap=True)


def say_all(warnings: Iterable[str], notes: Iterable[str], before: str = "") -> None:
    """Print warnings, then notes; each begins with `before`."""
    for kind, messages in (("warning", warnings), ("note", notes)):
        for message in messages:
            say(kind, before + message)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON value to stdout, in ASCII, so that it passes through any pipe."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def check_one_form(*, as_json: bool, as_csv: bool) -> None:
    """Raise an error, before any work, if two output formats are asked for."""
    if as_json and as_csv:
        raise InputError("--json and --csv both say what is printed: leave out one of them")


def print_csv(found: Tabular) -> None:
    """Print the rows of a result to stdout."""
    typer.echo(found.table().csv(), nl=False)


# Tables.

_FACTS = {NOTE: "yellow", WARNING: "bold yellow"}


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns named in `right` hold numbers."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        empty.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",  # users look up full names
        )
    return empty


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels, each with its text."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(label, printable(text), style=_FACTS.get(label))
    return grid
