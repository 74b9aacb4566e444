"""`covmerge merge`: the flags. What they do is in `flags` and `merging`, which need torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHAT, _HOW, _OUTPUT, _RUN = "What to merge", "How to merge", "Output", "Run"


def merge(
    first: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE.yml",
            show_default=False,
            help="Recipe file; flags override what it says.",
        ),
    ] = None,
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            show_default=False,
            help="Folder to write; with --dry-run it may be left out.",
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
            metavar="NAME=NUMBER",
            rich_help_panel=_WHAT,
            help="Share of an expert; 1 is neutral.",
        ),
    ] = None,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            rich_help_panel=_WHAT,
            help="Statistics of an expert, from `covmerge collect`, for methods that use data.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_HOW,
            help="Merge method, see `covmerge methods`; ace unless the recipe says otherwise.",
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            rich_help_panel=_HOW,
            help="A parameter of the method, see `covmerge methods NAME`.",
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
    out_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            rich_help_panel=_OUTPUT,
            help="Stored dtype: base (the base's), float32, float16, bfloat16 or float64.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="model|adapter",
            rich_help_panel=_OUTPUT,
            help="Write merged weights, or, of adapters, one adapter of the same base.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="R",
            rich_help_panel=_OUTPUT,
            help="Largest rank of the merged adapter; exact, of all ranks together, without it.",
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_OUTPUT, help="Largest file, such as 5GB or 512MiB."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", rich_help_panel=_OUTPUT, help="Go on with an interrupted merge."),
    ] = False,
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
            help="Memory of the process, such as 8GB; obeyed, or refused before any work.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=_RUN,
            help="Show the plan: tensors, bytes, memory, disk, time. Writes nothing.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_RUN, help="Print one JSON object.")
    ] = False,
) -> None:
    """Merge fine-tuned models of one base into a folder that transformers loads.

    covmerge merge --base B --expert code=./code --expert math=./math OUT

    covmerge merge recipe.yml OUT
    """
    from covmerge.cli import flags, merging
    from covmerge.recipe import parse_size

    file, out = flags.place_paths(first, second, experts=bool(expert), dry_run=dry_run)
    recipe = flags.read_recipe(
        file,
        flags.RecipeFlags(
            base=base,
            experts=expert or (),
            weights=weight or (),
            statistics=stats or (),
            method=method,
            parameters=parameter or (),
            tensors=tensors or (),
            dtype=dtype,
            out_dtype=out_dtype,
            shard_size=shard_size,
            form=form,
            rank=rank,
        ),
    )
    how = merging.RunFlags(
        device=device,
        threads=threads,
        max_memory=None if max_memory is None else parse_size(max_memory),
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
    )
    if out is None or dry_run:
        merging.dry_run(recipe, out, how)
    else:
        merging.merge_to(recipe, out, how)
