"""`covmerge plan`: what a merge would take, as `covmerge merge --dry-run` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yml", help="Recipe file.")],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="Where the output would be: there has to be room for it.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a merge would take: tensors, bytes, memory, time. Headers are read, and nothing is written.

    covmerge plan recipe.yml
    """
    from covmerge.front.cli import flags, merging
    from covmerge.run.engine.options import RunOptions

    read = flags.read_recipe(recipe, {})
    merging.dry_run(read, out, RunOptions(), as_json=as_json)
