"""The flags of `covmerge merge`; `flags` and `merging`, which need torch, do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.base.settings import TAKEN
from covmerge.front.cli import options


def merge(
    first: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE.yml",
            show_default=False,
            help="Recipe file, of covmerge or of mergekit; flags override what it says.",
        ),
    ] = None,
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            show_default=False,
            help="Folder to write, or s3://BUCKET/FOLDER; with --dry-run it may be left out.",
        ),
    ] = None,
    base: options.Base = None,
    experts: options.Experts = None,
    weights: options.Weights = None,
    run: options.Run = None,
    last: options.Last = None,
    tokens: options.Tokens = None,
    tokens_per_step: options.TokensPerStep = None,
    run_weights: options.RunWeights = None,
    decay: options.Decay = None,
    statistics: options.Statistics = None,
    method: Annotated[
        str | None,
        options.setting(
            *("method", options.HOW, "NAME"),
            help="Merge method, see `covmerge methods`. Without one, and without one in the recipe, "
            f"it is {TAKEN}.".replace("`", ""),
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        options.setting(
            *("parameters", options.HOW, "KEY=VALUE"),
            help="A parameter of the method, see `covmerge methods NAME`.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        options.setting(
            *("seed", options.HOW, "N"),
            min=0,
            help="Seed of methods that draw random numbers, as --set seed=N; others take no notice.",
        ),
    ] = None,
    lenient: Annotated[
        bool,
        options.setting(
            *("lenient", options.HOW),
            help="Leave out unknown keys and parameters of a mergekit recipe, with a warning.",
        ),
    ] = False,
    before: options.Before = None,
    after: options.After = None,
    tensors: options.Tensors = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out_dtype: options.OutDtype = None,
    form: Annotated[
        str | None, options.setting("form", options.OUTPUT, "model|adapter|peft|kohya|diffusers")
    ] = None,
    rank: Annotated[int | None, options.setting("rank", options.OUTPUT, "R", min=1)] = None,
    whole: options.Whole = False,
    shard_size: Annotated[str | None, options.setting("shard_size", options.OUTPUT, "SIZE")] = None,
    quantise: Annotated[str | None, options.setting("quantise", options.OUTPUT, "FORMAT")] = None,
    keep: Annotated[list[str] | None, options.setting("keep", options.OUTPUT, "PATTERN")] = None,
    stages: options.Stages = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    report: Annotated[
        bool,
        options.flag(
            options.OUTPUT,
            None,
            "Write OUT/report.html: pictures of what the merge did, and its time and memory.",
            "--report",
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    workers: options.Workers = "1",
    executor: options.Executor = None,
    address: options.Address = None,
    patience: options.Patience = 120.0,
    max_memory: options.MaxMemory = None,
    dry_run: Annotated[
        bool,
        options.flag(
            options.RUN,
            None,
            "Show the plan: tensors, bytes, memory, disk, time. Writes nothing.",
            "--dry-run",
        ),
    ] = False,
    verbose: options.Verbose = False,
    as_json: options.AsJson = False,
) -> None:
    """Merge fine-tuned models of one base into a folder that transformers loads.

    covmerge merge --base B --expert code=./code --expert math=./math OUT

    covmerge merge recipe.yml OUT

    Fold a LoRA adapter into its base:

    covmerge merge --base B --expert lora=./lora OUT

    Average the last five checkpoints of a training run:

    covmerge merge --run ./outputs --last 5 OUT
    """
    given = options.given(locals())
    from covmerge.front.cli import flags, merging
    from covmerge.front.cli.merging import merge_stages

    file, out = flags.place_paths(
        first, second, experts=bool(experts or run), dry_run=dry_run, stages=stages is not None
    )
    how = flags.shown_options(given)
    if windows := flags.read_windows(given):
        assert out is not None
        merging.merge_windows(windows, out, how, as_json=as_json)
    elif dry_run:
        merging.dry_run(flags.read_recipe(file, given), out, how, as_json=as_json)
    else:
        recipes = flags.read_stages(file, given, out, stages, report=report)
        place, recipe = recipes[-1]
        if report:
            merging.check_report(recipe, place)
        merge_stages(recipes, how)
        merging.merge_to(recipe, place, how, report=report, verbose=verbose, as_json=as_json)
