"""`covmerge import-mergekit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli.console import say


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
    """Print a recipe of mergekit as one of covmerge's, which makes the same model.

    Its relative paths are those of the working directory: save it there.
    """
    import yaml

    from covmerge.plan.recipe.load import import_recipe
    from covmerge.plan.recipe.mergekit.reading import ImportLog

    log = ImportLog(lenient)
    ours = import_recipe(recipe, log)
    for kind, messages in (("warning", log.warnings), ("note", log.notes)):
        for message in messages:
            say(kind, message)
    typer.echo(yaml.safe_dump(ours, sort_keys=False, allow_unicode=True), nl=False)
