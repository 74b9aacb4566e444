"""The commands on experts: `covmerge inspect`, `extract`, `compare` and `search`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from covmerge.front.cli import options
from covmerge.front.cli.console import check_one_form, print_csv, print_json, printable, stdout
from covmerge.front.keywords import CompareKeywords

if TYPE_CHECKING:
    from covmerge.run.inspection.job import SpectraOf


def inspect(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE.yml", show_default=False, help="Recipe file.")
    ] = None,
    base: options.Base = None,
    experts: options.Experts = None,
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    spectra: options.Spectra = "some",
    html: Annotated[
        Path | None, options.flag(options.OUTPUT, "FILE", "Write a report with pictures too.")
    ] = None,
    overwrite: Annotated[
        bool, options.flag(options.OUTPUT, None, "Replace a FILE that is there.", "--overwrite")
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
) -> None:
    """Look at experts before merging: do they fit, what did they change, where do they clash?

    covmerge inspect --base B --expert code=./code --expert math=./math

    Reads every tensor once and merges nothing. Exits with 1 if a merge would fail or be worthless.
    """
    given = options.given(locals())
    check_one_form(as_json=as_json, as_csv=as_csv)
    from covmerge.front.cli import flags, inspecting
    from covmerge.front.reporting.data import Report
    from covmerge.front.reporting.job import check_page, write_html
    from covmerge.run.inspection.job import InspectJob
    from covmerge.run.sources import open_recipe

    read, how = flags.read_recipe(recipe, given), flags.shown_options(given)
    if html is not None:
        check_page(html, overwrite=overwrite)
    with open_recipe(read) as checkpoints:
        found = InspectJob(read, cast("SpectraOf", spectra), how).run(checkpoints)
    if html is not None:
        title = f"Before a merge: {', '.join(found.experts)}"
        write_html(Report(title, found), html, overwrite=overwrite)
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        print_csv(found)
    else:
        inspecting.show(stdout(), found, verbose=verbose)
        if html is not None:
            stdout().print(printable(f"Report: {html}"), soft_wrap=True)
    if found.faults:
        raise typer.Exit(1)


def extract(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Folder, file or org/name@revision of the base.")
    ],
    expert: Annotated[
        str, typer.Argument(metavar="EXPERT", help="The model that was fine-tuned from it.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    rank: Annotated[
        int,
        options.setting("rank", options.OUTPUT, "R", min=1, help="Rank of the adapter."),
    ],
    form: Annotated[
        str,
        options.setting(
            *("form", options.OUTPUT, "adapter|kohya|diffusers"),
            help="For PEFT, or a LoRA file of a part of a diffusion model.",
        ),
    ] = "adapter",
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out_dtype: options.OutDtype = None,
    whole: options.Whole = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    workers: options.Workers = "1",
    max_memory: options.MaxMemory = None,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Turn a full fine-tune into an adapter: the best approximation of its rank, layer by layer.

    covmerge extract ./base ./code ./code-lora --rank 32
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, merging

    # The average of one expert is that expert.
    given |= {"experts": [f"expert={expert}"], "method": "average"}
    recipe = flags.read_recipe(None, given)
    merging.merge_to(recipe, out, flags.shown_options(given), verbose=verbose, as_json=as_json)


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
        options.flag(
            options.HOW,
            "all|NAME,NAME(KEY=VALUE),...",
            "Methods to compare, one of them several times if its parameters differ: "
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
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out: Annotated[
        Path | None,
        options.flag(
            options.OUTPUT,
            "DIR",
            "Folder for the models, one each; without it only the table is made.",
        ),
    ] = None,
    score: options.Score = None,
    bounds: options.Bounds = False,
    scorers: options.Scorers = 1,
    resume: options.ResumeScores = False,
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
    check_one_form(as_json=as_json, as_csv=as_csv)
    from covmerge.front.cli import comparing, flags
    from covmerge.front.cli.progress import scoring_shown
    from covmerge.run.comparison import CompareJob
    from covmerge.run.scoring.scorer import scorer_of
    from covmerge.run.sources import open_recipe

    job = CompareJob(
        flags.read_recipe(recipe, {**given, "parameters": ()}),
        methods,
        flags.method_parameters(parameters or ()),
        out,
        None if score is None else scorer_of(score),
        bounds,
        scorers,
        options=flags.shown_options(given),
    )
    with (
        scoring_shown("takes the scores that are known") as shown,
        open_recipe(job.recipe) as checkpoints,
    ):
        found = replace(job, scoring=shown).run(checkpoints)
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        print_csv(found.scores or found)
    else:
        comparing.show(stdout(), found, verbose=verbose)
    if found.scores is not None:
        comparing.check_scored(found.scores)


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
        options.setting("score", options.SCORE, "'COMMAND {model}'|NAME:WHAT", CompareKeywords),
    ],
    out: Annotated[
        Path | None,
        options.flag(
            options.OUTPUT,
            "DIR",
            "Folder of the record, the table, the best recipe and its model; else RECIPE-search.",
        ),
    ] = None,
    trials: options.Trials = 60,
    objectives: options.Objectives = None,
    all_examples: options.AllExamples = False,
    sampler: options.Sampler = "tpe",
    seed: options.SearchSeed = 0,
    together: options.AtOnce = 4,
    scorers: options.Scorers = 1,
    resume: options.ResumeSearch = False,
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
    check_one_form(as_json=as_json, as_csv=as_csv)
    from covmerge.front.cli import comparing, flags
    from covmerge.front.cli.progress import scoring_shown
    from covmerge.plan.recipe.search import Template
    from covmerge.run.scoring.scorer import scorer_of
    from covmerge.run.search.job import SearchJob

    with scoring_shown("goes on after the trials that are recorded") as shown:
        job = SearchJob(
            Template.of(recipe),
            scorer_of(score),
            out or Path(f"{recipe.stem}-search"),
            trials,
            objectives or (),
            sampler,
            seed,
            together,
            scorers,
            all_examples,
            options=flags.shown_options(given),
            scoring=shown,
        )
        found = job.run()
    if as_json:
        print_json(found.as_json())
    elif as_csv:
        print_csv(found)
    else:
        comparing.show_search(stdout(), found)
