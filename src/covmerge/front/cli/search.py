"""`covmerge search`: the flags. What they do is in `searching`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def search(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yml",
            show_default=False,
            help="Recipe file with marked values, such as weight: {search: [0, 1.5]}; or a genome of "
            "mergekit-evolve.",
        ),
    ],
    score: Annotated[
        str,
        typer.Option(
            metavar="'COMMAND {model}'|NAME:WHAT",
            rich_help_panel=options.SCORE,
            help="Score every model, more is better; as for compare.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=options.OUTPUT,
            help="Folder of the record, the table, the best recipe and its model; else RECIPE-search.",
        ),
    ] = None,
    trials: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, rich_help_panel=options.HOW, help="Choices that are tried, in all."
        ),
    ] = 60,
    objectives: Annotated[
        list[str] | None,
        typer.Option(
            "--objective",
            metavar="TASK",
            rich_help_panel=options.SCORE,
            help="A task that is searched, once for each; by default the mean over all.",
        ),
    ] = None,
    all_examples: Annotated[
        bool,
        typer.Option(
            "--all-examples",
            rich_help_panel=options.SCORE,
            help="Have the search see all examples; nothing then says how far it fits them.",
        ),
    ] = False,
    sampler: Annotated[
        str,
        typer.Option(
            metavar="tpe|cmaes|random", rich_help_panel=options.HOW, help="What chooses, of Optuna."
        ),
    ] = "tpe",
    seed: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=options.HOW, help="Seed of what it draws.")
    ] = 0,
    together: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=options.RUN,
            help="Choices that are merged in one reading, where the memory holds so many.",
        ),
    ] = 4,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", rich_help_panel=options.OUTPUT, help="Go on with the search in DIR."
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
) -> None:
    """Choose marked values of a recipe by a score, with Optuna.

    covmerge search recipe.yml --score 'python eval.py {model}' --trials 60
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, searching

    searching.search(
        recipe,
        score=score,
        out=out or Path(f"{recipe.stem}-search"),
        trials=trials,
        objectives=objectives or (),
        sampler=sampler,
        seed=seed,
        together=together,
        all_examples=all_examples,
        run=flags.shown_options(given),
        as_json=as_json,
        as_csv=as_csv,
    )
