"""Commands on a recipe alone: `covmerge plan`, `covmerge schema`, `covmerge import-mergekit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import say_all


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
    """Show what a merge would need: tensors, bytes, memory, time. Writes nothing.

    covmerge plan recipe.yml

    With flags instead of a recipe:

    covmerge merge --base B --expert code=./code --dry-run
    """
    from covmerge.front.cli import flags, merging
    from covmerge.run.engine.options import RunOptions

    read = flags.read_recipe(recipe, {})
    merging.dry_run(read, out, RunOptions(), as_json=as_json)


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from covmerge.plan.recipe import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def import_mergekit(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="THEIR.yml", help="Recipe file of mergekit.", show_default=False),
    ],
    lenient: Annotated[
        bool,
        typer.Option("--lenient", help="Leave out unknown keys and parameters with a warning."),
    ] = False,
) -> None:
    """Print a recipe of mergekit as a recipe of covmerge that makes the same model.

    Its relative paths are those of the working directory: save it there.
    """
    import yaml

    from covmerge.plan.recipe.load import import_recipe
    from covmerge.plan.recipe.mergekit.reading import ImportLog

    log = ImportLog(lenient)
    ours = import_recipe(recipe, log)
    say_all(log.warnings, log.notes)
    typer.echo(yaml.safe_dump(ours, sort_keys=False, allow_unicode=True), nl=False)
