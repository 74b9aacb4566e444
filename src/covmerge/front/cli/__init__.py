"""The command line: one module a command.

Nothing here imports torch before a command needs it, so that help and version come at once.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from covmerge.base.version import __version__
from covmerge.front.cli.collect import collect
from covmerge.front.cli.command import Command
from covmerge.front.cli.compare import compare
from covmerge.front.cli.explain import explain
from covmerge.front.cli.extensions import OpenGroup
from covmerge.front.cli.extract import extract
from covmerge.front.cli.import_mergekit import import_mergekit
from covmerge.front.cli.inspect import inspect
from covmerge.front.cli.merge import merge
from covmerge.front.cli.methods import methods
from covmerge.front.cli.outcome import ReportingGroup, interruptible
from covmerge.front.cli.plan import plan
from covmerge.front.cli.process import collect_seldom, keep_freed_memory
from covmerge.front.cli.push import push
from covmerge.front.cli.report import report
from covmerge.front.cli.schema import schema
from covmerge.front.cli.search import search
from covmerge.front.cli.theirs import TakesTheirFlags
from covmerge.front.cli.verify import verify
from covmerge.front.cli.view import view

__all__ = ["app", "main"]


class _Commands(ReportingGroup, OpenGroup):
    """Which there are, and how they end."""


app = typer.Typer(
    name="covmerge",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Merge fine-tuned models of one base into one, without data.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted, 143 terminated.",
)
app.command(cls=TakesTheirFlags)(merge)
for command in (
    *(inspect, extract, compare, search, collect, methods, explain),
    *(plan, verify, report, view, push, schema, import_mergekit),
):
    app.command(cls=Command)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"covmerge {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that need no command."""
    del version  # its callback has acted


def main() -> None:
    """Run the command line on the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        # γ, Δ and the names in strangers' files must not end a merge on an ASCII terminal.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    keep_freed_memory()
    collect_seldom()
    with interruptible():
        app(prog_name="covmerge")
