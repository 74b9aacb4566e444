"""`covmerge merge`: the flags. What they do is in `flags` and `merging`, which need torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covmerge.base.choice import TAKEN
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
    expert: options.Experts = None,
    weight: options.Weights = None,
    run: options.Run = None,
    last: options.Last = None,
    run_weights: options.RunWeights = None,
    decay: options.Decay = None,
    stats: options.Stats = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=options.HOW,
            help="Merge method, see `covmerge methods`. Without one, and without one in the recipe, "
            f"it is {TAKEN}.".replace("`", ""),
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            rich_help_panel=options.HOW,
            help="A parameter of the method, see `covmerge methods NAME`.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=options.HOW,
            help="Seed of methods that draw random numbers, as --set seed=N; others take no notice.",
        ),
    ] = None,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            rich_help_panel=options.HOW,
            help="Leave out unknown keys and parameters of a mergekit recipe, with a warning.",
        ),
    ] = False,
    before: options.Before = None,
    after: options.After = None,
    tensors: options.Tensors = None,
    dtype: options.Dtype = None,
    allow: options.Allow = None,
    out_dtype: options.OutDtype = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="model|adapter|peft|kohya|diffusers",
            rich_help_panel=options.OUTPUT,
            help="Write merged weights, or one adapter of the base, in the experts' form or the one named.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="R",
            rich_help_panel=options.OUTPUT,
            help="Largest rank of the merged adapter; exact, of all ranks together, without it.",
        ),
    ] = None,
    whole: options.Whole = False,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=options.OUTPUT,
            help="Largest file, such as 5GB or 512MiB.",
        ),
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            rich_help_panel=options.OUTPUT,
            help="Write linear layers quantised: same (as the base), fp8-block, nf4, gptq and others "
            "(docs/quantised.md).",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            rich_help_panel=options.OUTPUT,
            help="Tensors that --quantise leaves plain, such as '*.down_proj.*'; may be given again.",
        ),
    ] = None,
    stages: options.Stages = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            rich_help_panel=options.OUTPUT,
            help="Write OUT/report.html: pictures of what the merge did, and its time and memory.",
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
        typer.Option(
            "--dry-run",
            rich_help_panel=options.RUN,
            help="Show the plan: tensors, bytes, memory, disk, time. Writes nothing.",
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
    from covmerge.front.cli import flags, merging
    from covmerge.front.cli.stages import merge_stages

    file, out = flags.place_paths(
        first, second, experts=bool(expert or run), dry_run=dry_run, stages=stages is not None
    )
    said = flags.RecipeFlags(
        base=base,
        experts=expert or (),
        weights=weight or (),
        run=run,
        last=last,
        run_weights=run_weights,
        decay=decay,
        statistics=stats or (),
        method=method,
        parameters=parameter or (),
        before=before or (),
        after=after or (),
        tensors=tensors or (),
        dtype=dtype,
        allow=allow or (),
        out_dtype=out_dtype,
        shard_size=shard_size,
        form=form,
        rank=rank,
        whole=whole or None,
        quantise=quantise,
        keep=keep or (),
        seed=seed,
        lenient=lenient,
    )
    how = flags.run_options(
        device,
        threads,
        max_memory,
        workers=workers,
        executor=executor,
        address=address,
        patience=patience,
        resume=resume,
        overwrite=overwrite,
    )
    if dry_run:
        merging.dry_run(flags.read_recipe(file, said), out, how, as_json=as_json)
    else:
        recipes = flags.read_stages(file, said, out, stages, report=report)
        place, recipe = recipes[-1]
        if report:
            merging.check_report(recipe, place)
        merge_stages(recipes, how)
        merging.merge_to(recipe, place, how, report=report, verbose=verbose, as_json=as_json)
