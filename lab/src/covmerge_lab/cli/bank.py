"""`covmerge bank`: every method on many small sets of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from covmerge_lab.bank import What
from covmerge_lab.cli.cache import Cache, cache_folder


def bank(
    stage: Annotated[
        Literal["train", "score", "table"],
        typer.Argument(help="Make experts, merge and score them, or show the table."),
    ],
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="design, validation, sealed, later, newest, a base or a set; may be given again."
        ),
    ] = None,
    what: Annotated[
        What,
        typer.Option(
            help="Score data-free methods, candidates for a default, auto with other constants, "
            "methods with inputs of each task, kept merges on halves of the examples, or criteria that "
            "need no data."
        ),
    ] = "methods",
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Score this method or candidate only, in place of those of --what; may be given again.",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all scores of a table as JSON.")
    ] = None,
    stored: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show the table of scores written so.")
    ] = None,
    form: Annotated[
        Literal["full", "adapters", "mixed"] | None,
        typer.Option(help="A table of the sets whose experts are stored so."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Show differences to this method in place of regret."),
    ] = None,
    halves: Annotated[
        bool,
        typer.Option("--halves", help="Judge regret on one half by what is best on the other."),
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="Show what each method keeps of a set's worst expert.")
    ] = False,
    choosing: Annotated[
        bool,
        typer.Option("--choosing", help="Show how well criteria without data choose a method."),
    ] = False,
    minutes: Annotated[float, typer.Option(help="Begin nothing more after so long.")] = 120,
    cache: Cache = None,
) -> None:
    """Measure merging methods on 94 sets of experts of 31 bases.

    covmerge bank train --part design

    A stage goes on where an earlier run of it stopped.
    """
    from covmerge_lab.bank import run
    from covmerge_lab.run import terminal

    folder, parts = cache_folder(cache), part or []
    if stage == "table":
        sets = run.scored(folder, parts) if stored is None else run.read(stored, parts)
        shown = [scored for scored in sets if form in (None, scored["card"]["form"])]
        asked: dict[run.Other, bool] = {"halves": halves, "worst": worst, "choosing": choosing}
        others: list[run.Other] = [name for name, wanted in asked.items() if wanted]
        typer.echo(run.show(shown, against, *others))
        if save is not None:
            run.write(sets, save)
    elif stage == "score":
        run.score(folder, parts, minutes, terminal(), what, method or ())
    else:
        run.train(folder, parts, minutes, terminal())
