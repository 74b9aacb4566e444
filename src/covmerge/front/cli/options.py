"""Options that several commands have, each said once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from covmerge.base.code import user_cache
from covmerge.base.errors import InputError
from covmerge.base.settings import flag_of
from covmerge.front.keywords import descriptions

WHAT, HOW, OUTPUT, SCORE, RUN = "What to merge", "How to merge", "Output", "Score", "Run"
_HELP = descriptions()


def setting(name: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    """Return the flag of a setting, with what Python says of it for its help.

    Args:
        name: of the setting, in Python.
        panel: of the help.
        metavar: what stands for its value.
        **more: as `typer.Option` takes it.
    """
    text = _HELP.get(name, "").replace("`", "")
    more.setdefault("help", text[:1].upper() + text[1:])
    return typer.Option(flag_of(name), metavar=metavar, rich_help_panel=panel, **more)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given of the flags of a command: neither nothing, nor off."""
    found = {name: value for name, value in flags.items() if value is not None and value != []}
    return {name: value for name, value in found.items() if value is not False}  # 0 is a number


Base = Annotated[
    str | None,
    setting(
        *("base", WHAT, "SOURCE"),
        help="Folder, file, address (s3://, https://) or org/name@revision that the experts were "
        "fine-tuned from.",
    ),
]
Experts = Annotated[
    list[str] | None,
    setting("experts", WHAT, "NAME=SOURCE", help="One expert; once for each."),
]
Weights = Annotated[list[str] | None, setting("weights", WHAT, "NAME=NUMBER")]
Run = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=WHAT,
        help="Average the checkpoints of one training run: the folder of its checkpoint-500/ and so on.",
    ),
]
Last = Annotated[
    str | None,
    setting(
        *("last", WHAT, "N|N,M,..."),
        help="The run's last N checkpoints; all without it. Several are several models in one reading: "
        "OUT/last-N, OUT/last-M.",
    ),
]
Tokens = Annotated[
    str | None,
    setting(
        *("tokens", WHAT, "12B|8B,12B,..."),
        help="In place of --last: the checkpoints of the run's last so many tokens.",
    ),
]
TokensPerStep = Annotated[
    int | None,
    setting(
        *("tokens_per_step", WHAT, "N"),
        min=1,
        help="Tokens of a step, where the checkpoints' trainer_state.json does not count them.",
    ),
]
RunWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="equal|step|ema|linear|cosine|1-sqrt,...",
        rich_help_panel=WHAT,
        help="What a checkpoint of the run counts for: as much as any other, as its number, --decay times "
        "what the next one counts for, or so that the mean imitates a learning rate that decays "
        "linearly, by a cosine or as 1 − √x.",
    ),
]
Decay = Annotated[
    float | None, setting("decay", WHAT, "D", help="Decay of --weights ema, such as 0.8.")
]
Statistics = Annotated[list[str] | None, setting("statistics", WHAT, "NAME=FILE")]
Before = Annotated[list[str] | None, setting("before", HOW, "STEP")]
After = Annotated[list[str] | None, setting("after", HOW, "STEP")]
Tensors = Annotated[list[str] | None, setting("tensors", HOW, "KEY=VALUE")]
Dtype = Annotated[str | None, setting("dtype", HOW, "float32|float64")]
Allow = Annotated[list[str] | None, setting("allow", HOW, "FAULT")]
OutDtype = Annotated[str | None, setting("out_dtype", OUTPUT, "DTYPE")]
Whole = Annotated[bool, setting("whole", OUTPUT)]
Resume = Annotated[bool, setting("resume", OUTPUT)]
Overwrite = Annotated[bool, setting("overwrite", OUTPUT)]
Stages = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Folder of the named ones of several recipes in a file; OUT.stages without it.",
    ),
]
Device = Annotated[str, setting("device", RUN, "cpu|cuda[:i]|auto")]
Threads = Annotated[int | None, setting("threads", RUN, "N", min=1)]
Workers = Annotated[str, setting("workers", RUN, "N|auto")]
Executor = Annotated[str | None, setting("executor", RUN, "threads|processes|ranks|ray")]
Address = Annotated[str | None, setting("address", RUN, "HOST:PORT|auto")]
Patience = Annotated[float, setting("patience", RUN, "SECONDS")]
MaxMemory = Annotated[str | None, setting("max_memory", RUN, "SIZE")]
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
