"""`covmerge reproduce`: the flags. What it does is in `reproducing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options

DATA = "Data and checkpoints"


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE", show_default=False, help="Such as ace/table2; none: list all tables."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=options.OUTPUT,
            help="Folder for all that is fetched and merged, and for the results.",
        ),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", rich_help_panel=options.WHAT, help="Some blocks of the table only."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=options.WHAT,
            help="Some rows only: methods, base, experts.",
        ),
    ] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE",
            rich_help_panel=DATA,
            help="A checkpoint in place of the one that is known; once for each, `base` is the base.",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=DATA,
            help="Checkpoints that are on no hub, laid out as their authors do.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=DATA, help="Test data, where the hub's is not taken."
        ),
    ] = None,
    stats: options.Statistics = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=DATA, help="Examples of each task."),
    ] = None,
    stand_ins: Annotated[
        bool,
        typer.Option(
            "--stand-ins",
            rich_help_panel=DATA,
            help="Tiny random models and data in the same formats: tries everything, offline.",
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    as_json: options.AsJson = False,
) -> None:
    """Do a published table again: fetch, merge by every method, score, compare with the paper.

    covmerge reproduce ace/table2 --cache ./reproduced
    """
    from covmerge_lab.cli import reproducing

    reproducing.reproduce(
        reproducing.Flags(
            table=table,
            cache=cache,
            settings=setting,
            methods=methods,
            experts=expert or (),
            checkpoints=checkpoints,
            data=data,
            statistics=stats or (),
            limit=limit,
            stand_ins=stand_ins,
            device=device,
            threads=threads,
            max_memory=max_memory,
            as_json=as_json,
        )
    )
