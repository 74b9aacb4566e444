"""`covmerge bench`: which method, on which kind of experts, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.errors import InputError
from covmerge.front.cli import options
from covmerge.front.cli.console import print_json
from covmerge_lab.cli.cache import Cache, cache_folder


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="text, vision, llm or gpt2.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=options.OUTPUT,
            help="Folder of the results; bench-SUITE.",
        ),
    ] = None,
    cache: Cache = None,
    kind: Annotated[
        str | None, typer.Option(metavar="full|lora", help="One kind of experts; both by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Trainings of each expert.")] = 3,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="N,M",
            help="So many experts, a table each; text has up to 16, and 8 by default.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="These methods only; all by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run: its numbers mean nothing.")
    ] = False,
    score: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Score this folder only, and print what `covmerge compare --score` reads.",
        ),
    ] = None,
) -> None:
    """Train experts of a real base, merge them by every method, put all models to the test.

    covmerge bench text --seeds 1 --kind full

    Everything that is fetched and trained is kept in the cache folder; a run that is interrupted goes
    on where it was.
    """
    from covmerge_lab.run import run_bench, score_model

    if score is not None:
        found = score_model(
            suite, score, cache=cache_folder(cache), kind=kind or "full", quick=quick
        )
        print_json(found)
        return
    run_bench(
        suite,
        out=out or Path(f"bench-{suite}"),
        cache=cache_folder(cache),
        kinds=None if kind is None else (kind,),
        seeds=range(seeds),
        methods=None if methods is None else [name.strip() for name in methods.split(",")],
        quick=quick,
        counts=None if experts is None else _counts(experts),
    )


def _counts(given: str) -> list[int]:
    try:
        found = [int(each) for each in given.split(",")]
    except ValueError:
        raise InputError(f"--experts is {given}: name numbers, such as 2,4,8") from None
    if len(set(found)) < len(found):
        raise InputError(f"--experts is {given}: name each number once")
    return found
