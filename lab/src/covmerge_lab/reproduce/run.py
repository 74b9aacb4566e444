"""A table, done again: fetch, merge with every method from disk, score, put beside the paper's values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import covmerge
from covmerge.errors import InputError, did_you_mean
from covmerge.run.engine.progress import Progress
from covmerge_lab.module_file import as_weights
from covmerge_lab.reproduce import clip, glue, lm, t5
from covmerge_lab.reproduce.bench import Bench, Score
from covmerge_lab.reproduce.published import MEAN, Family, Row, Setting
from covmerge_lab.reproduce.sources import Given, resolve

SCORES: Mapping[Family, Score] = {
    "clip": clip.scores,
    "glue": glue.scores,
    "t5": t5.scores,
    "lm": lm.scores,
}
# Where training examples are at hand, statistics for RegMean and Fisher are made here.
COLLECTS: Mapping[Family, Callable[[Bench, Sequence[str]], dict[str, Path]]] = {
    "glue": glue.collect
}
_MAY_RUN_CODE = "HF_ALLOW_CODE_EVAL"  # the Hub's own switch for metrics that run what a model wrote

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How a table is done again.

    Attributes:
        methods: keys of rows; None: all.
        data: folder of the user's data.
        statistics: files by expert, for methods that need them.
        limit: examples of each task; None: all.
        stand_ins: whether the checkpoints are stand-ins, whose code tasks run nothing.
    """

    methods: Sequence[str] | None = None
    data: Path | None = None
    statistics: Mapping[str, Path] = field(default_factory=dict[str, Path])
    limit: int | None = None
    device: str = "cpu"
    threads: int | None = None
    max_memory: str | None = None
    progress: Progress | None = None
    stand_ins: bool = False


@dataclass(frozen=True)
class Line:
    """A row of the table with its own values; `own` is empty where it was not run, and `note` says why."""

    row: Row
    own: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Result:
    """A setting, done again.

    Attributes:
        folder: its merged models.
    """

    setting: Setting
    lines: Sequence[Line]
    folder: Path


def chosen_rows(setting: Setting, wanted: Sequence[str] | None) -> list[Row]:
    """Return the rows to run, in the table's order.

    Raises:
        InputError: the setting has no such row.
    """
    known = {row.key: row for row in setting.rows}
    for key in wanted or ():
        if key not in known:
            raise InputError(f"{setting.name} has no row '{key}'." + did_you_mean(key, known))
    return [row for key, row in known.items() if wanted is None or key in wanted]


def reproduce(
    setting: Setting, given: Given, options: Options, out: Path, on_progress: OnProgress
) -> Result:
    """Do one setting of a table again.

    Args:
        setting: what was published.
        given: where checkpoints are.
        options: what to run, and on what data.
        out: folder for the merged models; what an earlier run left is replaced.
        on_progress: called with a line for each step.

    Raises:
        InputError: something is missing, cannot be fetched or does not fit.
    """
    rows = chosen_rows(setting, options.methods)
    on_progress(f"{setting.name}: looking for {1 + len(setting.experts)} checkpoints")
    bench = Bench(
        setting=setting,
        models=resolve(setting, given),
        data=options.data,
        cache=given.cache,
        limit=options.limit,
        device=options.device,
        trusted=options.stand_ins or os.environ.get(_MAY_RUN_CODE) == "1",
    )
    merges = [row for row in rows if row.kind == "merge"]
    left_out = {row.key: why for row in merges if (why := _cannot_run(row, setting, options))}
    runnable = [row for row in merges if row.key not in left_out]
    statistics = _statistics(bench, runnable, options, on_progress)
    on_progress(f"{setting.name}: merging by {len(runnable)} methods")
    folders = _merge(bench, runnable, statistics, options, out)
    experts: Mapping[str, float] | None = None
    if setting.share or any(row.kind == "experts" for row in rows):
        on_progress(f"{setting.name}: scoring the experts, each on its task")
        experts = _score_experts(bench)
    lines: list[Line] = []
    for row in rows:
        if row.key in left_out:
            lines.append(Line(row, {}, left_out[row.key]))
            continue
        if row.kind == "experts" and experts is not None:
            own = experts
        else:
            on_progress(f"{setting.name}: scoring {row.title}")
            model = bench.models.base if row.kind == "base" else folders[row.key]
            own = SCORES[setting.family](bench, model, setting.columns)
        lines.append(Line(row, _finished(setting, own, experts), row.note))
    return Result(setting, lines, out)


def _cannot_run(row: Row, setting: Setting, options: Options) -> str:
    given = set(options.statistics) >= set(setting.experts)
    if not row.data or given or setting.family in COLLECTS:
        return ""
    return (
        f"needs statistics ({row.data}) of every expert: make them by `covmerge collect`, and pass "
        "--stats NAME=FILE for each"
    )


def _statistics(
    bench: Bench, rows: Sequence[Row], options: Options, on_progress: OnProgress
) -> dict[str, Path]:
    """Return what the rows' methods know of the data: given, or collected from training examples."""
    kinds = sorted({row.data for row in rows if row.data})
    if not kinds or set(options.statistics) >= set(bench.setting.experts):
        return dict(options.statistics)
    on_progress(f"{bench.setting.name}: collecting statistics ({', '.join(kinds)}) of the experts")
    return COLLECTS[bench.setting.family](bench, kinds)


def _merge(
    bench: Bench,
    rows: Sequence[Row],
    statistics: Mapping[str, Path],
    options: Options,
    out: Path,
) -> dict[str, Path]:
    """Merge by every method, and return the folder of each."""
    folders: dict[str, Path] = {}
    base = as_weights(bench.models.base, bench.cache)
    experts = {name: as_weights(own, bench.cache) for name, own in bench.models.experts.items()}
    for number, group in enumerate(_passes(rows), start=1):
        needs = any(row.data for row in group)
        compared = covmerge.compare(
            base,
            experts,
            [(row.method, row.parameters) for row in group],
            out / f"pass-{number}",
            statistics=statistics if needs else None,
            tensors={**bench.setting.tensors, **group[0].tensors},
            rules=bench.setting.rules,
            device=options.device,
            threads=options.threads,
            max_memory=options.max_memory,
            overwrite=True,
            progress=options.progress,
        )
        labels = [found.label for found in compared.rows]
        pairs = zip(group, labels, strict=True)
        folders |= {row.key: out / f"pass-{number}" / label for row, label in pairs}
    return folders


def _passes(rows: Sequence[Row]) -> list[list[Row]]:
    """Share the rows out: a pass treats tensors in one way."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            if group[0].tensors == row.tensors:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def _score_experts(bench: Bench) -> dict[str, float]:
    score = SCORES[bench.setting.family]
    found: dict[str, float] = {}
    for name, model in bench.models.experts.items():
        columns = [column for column in bench.setting.columns if column.expert == name]
        found.update(score(bench, model, columns))
    return found


def _finished(
    setting: Setting, own: Mapping[str, float], experts: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the values as the table has them, with their mean if no column is missing."""
    if setting.share and experts is not None:
        values = {c: 100 * value / experts[c] if experts[c] else 0.0 for c, value in own.items()}
    else:
        values = dict(own)
    if len(values) == len(setting.columns):
        values[MEAN] = fmean(values.values())
    return values
