"""`covmerge inspect`: the flags. What they do is in `inspecting`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def inspect(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE.yml", show_default=False, help="Recipe file."),
    ] = None,
    base: options.Base = None,
    experts: options.Experts = None,
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    spectra: options.Spectra = "some",
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=options.OUTPUT, help="Write a report with pictures too."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", rich_help_panel=options.OUTPUT, help="Replace a FILE that is there."
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
) -> None:
    """Look at experts before merging: do they fit, what did they change, where do they clash?

    covmerge inspect --base B --expert code=./code --expert math=./math

    Reads every tensor once and merges nothing. Exits with 1 if a merge would fail or be worthless.
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, inspecting

    inspecting.inspect(
        flags.read_recipe(recipe, given),
        flags.shown_options(given),
        spectra=spectra,
        html=html,
        as_json=as_json,
        as_csv=as_csv,
    )
