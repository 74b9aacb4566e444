"""`covmerge compare`: the flags. What they do is in `comparing`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHAT, _HOW, _OUTPUT, _RUN = "What to merge", "How to merge", "Output", "Run"


def compare(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE.yml",
            show_default=False,
            help="Recipe file; its method and parameters are replaced.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            rich_help_panel=_WHAT,
            help="Folder, file or org/name@revision that the experts were fine-tuned from.",
        ),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE", rich_help_panel=_WHAT, help="One expert; once for each."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", rich_help_panel=_WHAT, help="Share of an expert; 1 is neutral."
        ),
    ] = None,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            rich_help_panel=_WHAT,
            help="Statistics of an expert, from `covmerge collect`.",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="all|NAME,NAME,...",
            rich_help_panel=_HOW,
            help="Methods to compare; all: every one that can run on what is given.",
        ),
    ] = "all",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.KEY=VALUE",
            rich_help_panel=_HOW,
            help="A parameter of one of the methods.",
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            rich_help_panel=_HOW,
            help="What happens to tensors of a kind, such as embeddings=base.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|float64", rich_help_panel=_HOW, help="Dtype of the computation."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_OUTPUT,
            help="Folder for the models, one each; without it only the table is made.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", rich_help_panel=_OUTPUT, help="Replace an earlier output of covmerge."
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda[:i]", rich_help_panel=_RUN, help="Where the mathematics runs."
        ),
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=_RUN, help="CPU threads."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=_RUN,
            help="Memory of the process, such as 8GB; refused before any work if too little.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_RUN, help="Print one JSON object.")
    ] = False,
) -> None:
    """Merge by many methods in one reading pass, and put them beside each other.

    covmerge compare --base B --expert code=./code --expert math=./math --methods all --out DIR
    """
    from covmerge.cli import comparing, flags
    from covmerge.recipe import parse_size

    comparing.compare(
        flags.read_recipe(
            recipe,
            flags.RecipeFlags(
                base=base,
                experts=expert or (),
                weights=weight or (),
                statistics=stats or (),
                tensors=tensors or (),
                dtype=dtype,
            ),
        ),
        methods=methods,
        parameters=flags.method_parameters(parameter or ()),
        out=out,
        overwrite=overwrite,
        device=device,
        threads=threads,
        max_memory=None if max_memory is None else parse_size(max_memory),
        as_json=as_json,
    )
