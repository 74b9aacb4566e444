"""`covmerge compare`: the flags. What they do is in `comparing`, which needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.front.cli import options


def compare(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE.yml",
            show_default=False,
            help="Recipe file; its method and parameters are replaced.",
        ),
    ] = None,
    base: options.Base = None,
    experts: options.Experts = None,
    weights: options.Weights = None,
    statistics: options.Statistics = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="all|NAME,NAME(KEY=VALUE),...",
            rich_help_panel=options.HOW,
            help="Methods to compare, one of them several times if its parameters differ: "
            "'ties,task_arithmetic(scale=0.1),task_arithmetic(scale=0.3)'; all: every one that can run on "
            "what is given.",
        ),
    ] = "all",
    parameters: Annotated[
        list[str] | None,
        options.setting(
            *("parameters", options.HOW, "METHOD.KEY=VALUE"),
            help="A parameter of one of the methods.",
        ),
    ] = None,
    before: options.Before = None,
    after: options.After = None,
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=options.OUTPUT,
            help="Folder for the models, one each; without it only the table is made.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="'COMMAND {model}'|NAME:WHAT",
            rich_help_panel=options.SCORE,
            help="Score every model, more is better: by a command that prints a number, or JSON of task -> "
            "number, or of task -> list of one number for each example; or by lm-eval:TASKS, "
            "sentence-transformers:FILE or transformers:FILE.",
        ),
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds", rich_help_panel=options.SCORE, help="Score the base and each expert too."
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=options.SCORE,
            help="Take the models that lie in DIR, and score those that have no score.",
        ),
    ] = False,
    overwrite: options.Overwrite = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    workers: options.Workers = "1",
    max_memory: options.MaxMemory = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
) -> None:
    """Merge by many methods in one reading pass, and score them by a command of your own.

    covmerge compare --base B --expert code=./code --expert math=./math --methods auto,ties,iso_c
    --out DIR --score 'python eval.py {model}'
    """
    given = options.given(locals())
    from covmerge.front.cli import comparing, flags

    comparing.compare(
        flags.read_recipe(recipe, {**given, "parameters": ()}),
        methods=methods,
        parameters=flags.method_parameters(parameters or ()),
        out=out,
        score=score,
        bounds=bounds,
        run=flags.shown_options(given),
        verbose=verbose,
        as_json=as_json,
        as_csv=as_csv,
    )
