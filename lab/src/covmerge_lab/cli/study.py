"""`covmerge study`: the papers' questions, put to the experts of a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.errors import InputError
from covmerge.front.cli import options
from covmerge_lab.cli.cache import Cache, cache_folder


def study(
    name: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Its name; without one they are listed.")
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="SUITE", help="text, vision, llm or gpt2.")
    ] = "text",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=options.OUTPUT,
            help="Folder of the results; study-STUDY-SUITE.",
        ),
    ] = None,
    cache: Cache = None,
    kind: Annotated[
        str | None, typer.Option(metavar="full|lora", help="One kind of experts; both by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Trainings of each expert.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="One part of a study that goes through several; may be given again. Without STUDY they "
            "are listed.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run: its numbers mean nothing.")
    ] = False,
) -> None:
    """Answer a question of the papers on really trained experts, in numbers and pictures.

    covmerge study covariance --suite text
    """
    from covmerge_lab.run import list_studies, run_study

    if name is None and only:
        raise InputError("--only is a part of a study: name it, as in `covmerge study regimes`")
    if name is None:
        list_studies()
        return
    run_study(
        name,
        suite,
        out=out or Path(f"study-{name}-{suite}"),
        cache=cache_folder(cache),
        kinds=None if kind is None else (kind,),
        seeds=range(seeds),
        quick=quick,
        only=only or (),
    )
