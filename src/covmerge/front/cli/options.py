"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from covmerge.base.settings import flag_of
from covmerge.front.keywords import (
    CompareKeywords,
    MergeKeywords,
    ScoringKeywords,
    SearchKeywords,
    descriptions,
)

WHAT, HOW, OUTPUT, SCORE, RUN = "What to merge", "How to merge", "Output", "Score", "Run"


def setting(
    name: str, panel: str, metavar: str | None = None, of: Any = MergeKeywords, **more: Any
) -> Any:
    """Return the flag of a setting; its help is the description of the Python keyword."""
    text = descriptions(of).get(name, "").replace("`", "")
    more.setdefault("help", text[:1].upper() + text[1:])
    return typer.Option(flag_of(name), metavar=metavar, rich_help_panel=panel, **more)


def flag(panel: str, metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """Return a flag that has no Python keyword; `metavar` is None for a switch, which needs its `names`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text, **more)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags of a command, without those that are None, empty or off."""
    found = {name: value for name, value in flags.items() if value is not None and value != []}
    return {name: value for name, value in found.items() if value is not False}  # 0 counts as given


Base = Annotated[
    str | None,
    setting(
        *("base", WHAT, "SOURCE"),
        help="Folder, file, address (s3://, https://) or org/name@revision that the experts were "
        "fine-tuned from.",
    ),
]
Experts = Annotated[
    list[str] | None, setting("experts", WHAT, "NAME=SOURCE", help="One expert; once for each.")
]
Weights = Annotated[list[str] | None, setting("weights", WHAT, "NAME=NUMBER")]
Run = Annotated[
    str | None,
    flag(
        WHAT,
        "DIR",
        "Average the checkpoints of one training run. DIR is the folder with checkpoint-500/ and so on.",
    ),
]
Last = Annotated[
    str | None,
    setting(
        *("last", WHAT, "N|N,M,..."),
        help="Take the last N checkpoints of the run; all by default. N,M writes two models: OUT/last-N "
        "and OUT/last-M.",
    ),
]
Tokens = Annotated[
    str | None,
    setting(
        *("tokens", WHAT, "12B|8B,12B,..."),
        help="In place of --last: take the checkpoints of the last 12B (12 billion) tokens of the run.",
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
    flag(
        WHAT,
        "equal|step|ema|linear|cosine|1-sqrt,...",
        "Weights of the run's checkpoints. equal: all alike. step: by the step's number. ema: --decay "
        "times that of the next checkpoint. linear, cosine, 1-sqrt: the mean imitates a learning rate "
        "that decays so.",
        "--weights",
    ),
]
Decay = Annotated[
    float | None, setting("decay", WHAT, "D", help="Decay of --weights ema, such as 0.8.")
]
Statistics = Annotated[list[str] | None, setting("statistics", WHAT, "NAME=FILE")]
Before = Annotated[list[str] | None, setting("before", HOW, "STEP")]
After = Annotated[list[str] | None, setting("after", HOW, "STEP")]
Tokenizer = Annotated[str | None, setting("tokenizer", HOW, "union|base|NAME")]
Tensors = Annotated[list[str] | None, setting("tensors", HOW, "KEY=VALUE")]
Dtype = Annotated[str | None, setting("dtype", HOW, "float32|float64")]
Allow = Annotated[list[str] | None, setting("allow", HOW, "FAULT")]
Score = Annotated[
    str | None, setting("score", SCORE, "'COMMAND {model}'|NAME:WHAT", CompareKeywords)
]
Bounds = Annotated[bool, setting("bounds", SCORE, of=CompareKeywords)]
Scorers = Annotated[int, setting("scorers", SCORE, "N", ScoringKeywords, min=1)]
ResumeScores = Annotated[bool, setting("resume", SCORE, of=CompareKeywords)]
Trials = Annotated[int, setting("trials", HOW, "N", SearchKeywords, min=1)]
Objectives = Annotated[list[str] | None, setting("objectives", SCORE, "TASK", SearchKeywords)]
AllExamples = Annotated[bool, setting("all_examples", SCORE, of=SearchKeywords)]
Sampler = Annotated[str, setting("sampler", HOW, "tpe|cmaes|random", SearchKeywords)]
SearchSeed = Annotated[int, setting("seed", HOW, "N", SearchKeywords)]
AtOnce = Annotated[int, setting("together", RUN, "N", SearchKeywords, min=1)]
ResumeSearch = Annotated[bool, setting("resume", OUTPUT, of=SearchKeywords)]
OutDtype = Annotated[str | None, setting("out_dtype", OUTPUT, "DTYPE")]
Whole = Annotated[bool, setting("whole", OUTPUT)]
Resume = Annotated[bool, setting("resume", OUTPUT)]
Overwrite = Annotated[bool, setting("overwrite", OUTPUT)]
Stages = Annotated[
    Path | None,
    flag(
        OUTPUT,
        "DIR",
        "Folder of the named stages of a file of mergekit's; OUT.stages without it.",
    ),
]
Device = Annotated[str, setting("device", RUN, "cpu|cuda[:i]|auto")]
Threads = Annotated[int | None, setting("threads", RUN, "N", min=1)]
Workers = Annotated[str, setting("workers", RUN, "N|auto")]
Executor = Annotated[str | None, setting("executor", RUN, "NAME")]
Address = Annotated[str | None, setting("address", RUN, "HOST:PORT|auto")]
Patience = Annotated[float, setting("patience", RUN, "SECONDS")]
MaxMemory = Annotated[str | None, setting("max_memory", RUN, "SIZE")]
Verbose = Annotated[bool, flag(RUN, None, "Print everything that is known.", "--verbose")]
AsJson = Annotated[bool, flag(RUN, None, "Print one JSON object.", "--json")]
AsCsv = Annotated[
    bool, flag(RUN, None, "Print one table of comma-separated values and nothing else.", "--csv")
]
Spectra = Annotated[
    str,
    flag(
        HOW,
        "all|some|none",
        "Whose singular values are taken, for ranks and overlaps: of all matrices, of some where "
        "all would be long, or of none.",
    ),
]
