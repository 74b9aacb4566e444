"""The command line, with one module for each command.

Nothing here imports torch before a command needs it, so help and version appear at once.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from covmerge.base.version import __version__
from covmerge.front.cli.collect import collect
from covmerge.front.cli.commands import AllCommands, Command, TakesTheirFlags
from covmerge.front.cli.experts import compare, extract, inspect, search
from covmerge.front.cli.merge import merge
from covmerge.front.cli.methods import explain, methods
from covmerge.front.cli.outcome import interruptible
from covmerge.front.cli.outputs import push, report, verify, view
from covmerge.front.cli.recipes import import_mergekit, plan, schema

# Memory of a process that runs one command: garbage collection, and freed memory that malloc keeps.

_SETTINGS = (  # of mallopt(3): the environment variable with the same effect, parameter and value
    ("MALLOC_TRIM_THRESHOLD_", -1, 64 * 2**20),
    ("MALLOC_MMAP_THRESHOLD_", -3, 32 * 2**20),
    ("MALLOC_ARENA_MAX", -8, 1),
)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep some tens of MB of freed memory, and one heap for all threads.

    By default malloc returns the temporaries of every step to the system, which then has to clear
    their pages again for the next step. Without glibc, and for settings of the environment, nothing
    changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for variable, number, value in _SETTINGS:
        if variable not in os.environ:
            libc.mallopt(number, value)


# How many more objects must be created than freed before Python collects the youngest generation;
# its default is 700. Importing torch creates 200,000 objects and covmerge 130,000, and a plan of a
# few thousand work items has a million. None of these is garbage.
_YOUNG = 500_000


def collect_seldom() -> None:
    """Collect garbage rarely, and not at exit, when the process returns all memory anyway.

    Objects outside of cycles, such as tensors, are freed at once either way. At exit the
    interpreter would otherwise search everything that torch created on import once more.
    """
    gc.set_threshold(_YOUNG)
    atexit.register(gc.freeze)


__all__ = ["app", "main"]


app = typer.Typer(
    name="covmerge",
    cls=AllCommands,
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


def main() -> None:
    """Run the command line on the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        # Characters such as γ and Δ, and names in others' files, must not stop a merge on an ASCII
        # terminal.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    keep_freed_memory()
    collect_seldom()
    with interruptible():
        app(prog_name="covmerge")
