"""Options that several commands have, each said once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from covmerge.base.cache import user_cache
from covmerge.base.errors import InputError

WHAT, HOW, OUTPUT, SCORE, RUN = "What to merge", "How to merge", "Output", "Score", "Run"

Base = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        rich_help_panel=WHAT,
        help="Folder, file, address (s3://, https://) or org/name@revision that the experts were "
        "fine-tuned from.",
    ),
]
Experts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SOURCE", rich_help_panel=WHAT, help="One expert; once for each."),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER",
        rich_help_panel=WHAT,
        help="Share of an expert, 1 is neutral; of an expert alone the share of its update.",
    ),
]
Run = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=WHAT,
        help="Average the checkpoints of one training run: the folder of its checkpoint-500/ and so on.",
    ),
]
Last = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=WHAT,
        help="The run's last N checkpoints; all without it.",
    ),
]
RunWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="equal|step|ema",
        rich_help_panel=WHAT,
        help="What a checkpoint of the run counts for: as much as any other, as its number, or --decay "
        "times what the next one counts for.",
    ),
]
Decay = Annotated[
    float | None,
    typer.Option(metavar="D", rich_help_panel=WHAT, help="Decay of --weights ema, such as 0.8."),
]
Stats = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FILE",
        rich_help_panel=WHAT,
        help="Statistics of an expert, from `covmerge collect`, for methods that use data.",
    ),
]
Before = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STEP",
        rich_help_panel=HOW,
        help="A step before the method, see `covmerge methods`; several in order.",
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(metavar="STEP", rich_help_panel=HOW, help="A step after the method, likewise."),
]
Tensors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        rich_help_panel=HOW,
        help="What happens to tensors of a kind, such as embeddings=base.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="float32|float64", rich_help_panel=HOW, help="Dtype of the computation."),
]
OutDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel=OUTPUT,
        help="Stored dtype: base (the base's), float32, float16, bfloat16 or float64.",
    ),
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole",
        rich_help_panel=OUTPUT,
        help="Have the adapter hold what full models changed outside their layers, as it is.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FAULT",
        rich_help_panel=HOW,
        help="Go on in spite of a fault of the experts that makes a merge worthless: "
        "not-a-fine-tune, swapped-tensors, unchanged-expert or changed-integers.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", rich_help_panel=OUTPUT, help="Go on with an interrupted merge."),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", rich_help_panel=OUTPUT, help="Replace an earlier output of covmerge."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="cpu|cuda[:i]|auto", rich_help_panel=RUN, help="Where the mathematics runs."
    ),
]
Stages = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Folder of the named ones of several recipes in a file; OUT.stages without it.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=RUN, help="CPU threads."),
]
Workers = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        rich_help_panel=RUN,
        help="Processes that share the work, with the same bytes. auto: as many as the work, the cores and "
        "the memory are worth; it says why.",
    ),
]
Executor = Annotated[
    str | None,
    typer.Option(
        metavar="threads|processes|ranks|ray",
        rich_help_panel=RUN,
        help="What does the work. ranks: this command was started several times, by srun or torchrun, for "
        "one output, and all share the work. ray: the nodes of a Ray cluster do it. By default threads, or "
        "processes with --workers.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        rich_help_panel=RUN,
        help="The Ray cluster of --executor ray; within `ray job submit` it is known.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        rich_help_panel=RUN,
        help="How long a rank that is not heard of is taken to be there.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel=RUN,
        help="Memory of the process, such as 8GB; obeyed, or refused before any work.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", rich_help_panel=RUN, help="Print everything that is known.")
]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=RUN, help="Print one JSON object.")]
AsCsv = Annotated[
    bool,
    typer.Option(
        "--csv",
        rich_help_panel=RUN,
        help="Print one table of comma-separated values and nothing else.",
    ),
]
Spectra = Annotated[
    str,
    typer.Option(
        metavar="all|some|none",
        rich_help_panel=HOW,
        help="Whose singular values are taken, for ranks and overlaps: of all matrices, of some where "
        "all would be long, or of none.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=RUN,
        help="Folder of what is fetched and trained; by default COVMERGE_CACHE or ~/.cache/covmerge.",
    ),
]


def cache_folder(given: Path | None) -> Path:
    """Return the folder of what is fetched and trained; it need not exist.

    Raises:
        InputError: it can be neither made nor written to.
    """
    folder = (user_cache() if given is None else given).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "not a folder" if not there.is_dir() else "not writable"
        raise InputError(
            f"the cache folder {folder} cannot be used: {there} is {what}. Name another by --cache "
            "or COVMERGE_CACHE"
        )
    return folder
