"""Where text goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from covmerge.base.errors import InputError
from covmerge.base.table import Tabular
from covmerge.base.text import printable

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def stdout() -> Console:
    """Console of results."""
    # Names in checkpoints and paths are text, never markup.
    return Console(markup=False, emoji=False, highlight=False)


def stderr() -> Console:
    """Console of progress, warnings and errors."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


def say(kind: str, message: str) -> None:
    """Print "kind: message" to stderr; kind is `error`, `warning` or `note`."""
    line = Text.assemble((f"{kind}: ", _STYLES[kind]), printable(message))
    stderr().print(line, soft_wrap=True)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON value to stdout, in ASCII, so that it survives every pipe."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def check_one_form(*, as_json: bool, as_csv: bool) -> None:
    """Refuse two forms of one output, before the work.

    Raises:
        InputError: both are wanted.
    """
    if as_json and as_csv:
        raise InputError("--json and --csv both say what is printed: leave out one of them")


def print_csv(found: Tabular) -> None:
    """Print the rows of a result to stdout."""
    typer.echo(found.table().csv(), nl=False)
