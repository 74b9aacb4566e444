"""Merge the experts with every method of covmerge, from disk to disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import covmerge
from covmerge.methods import Method, registry
from demo import collecting
from demo.evaluate import Exam, accuracies
from demo.models import Model, Section
from demo.workers import Job, Steps, Tell, untold

Methods = Mapping[str, Mapping[str, Any]]  # name -> parameters that are not at their defaults

AS_RELEASED: Methods = {"ace": {"eps": 1e-2}, "wudi": {"solver": "adam"}}
SCALES = tuple(tenths / 10 for tenths in range(1, 11))


def jobs(
    base: Path,
    experts: Mapping[str, Path],
    statistics: Path,
    validation: Sequence[Exam],
    out: Path,
) -> dict[str, Job[list[Model]]]:
    """Return jobs that merge by every registered method; the longest come first.

    Args:
        base: folder of the base.
        experts: folders of the experts, by task.
        statistics: folder of the statistics files.
        validation: what Task Arithmetic is tuned on.
        out: folder of the merged models.
    """
    merge = partial(_merge, base, experts)
    needs = {method.name: _needs(method) for method in registry}

    def defaults(need: str) -> Methods:
        return {name: {} for name, needed in needs.items() if needed == need}

    return {
        "as released": partial(merge, Section.DATA_FREE, AS_RELEASED, out / "as-released"),
        "without data": partial(merge, Section.DATA_FREE, defaults(""), out / "without-data"),
        "task_arithmetic, tuned": partial(_tuned, merge, validation, out / "tuned"),
        **{
            f"with {kind}": partial(
                merge,
                Section.WITH_DATA,
                defaults(kind),
                out / f"with-{kind}",
                statistics=collecting.files(statistics, kind, list(experts)),
            )
            for kind in sorted({*needs.values()} - {"", "task"})
        },
        "for each task": partial(merge, Section.PER_TASK, defaults("task"), out / "per-task"),
    }


def _needs(method: Method) -> str:
    """Say what a merged model needs beside weights: the kind of statistics, the task, or nothing."""
    if method.writes_masks:
        return "task"
    if method.data == "none":
        return ""
    return method.data if method.protocol == "inputs" else method.protocol


def _merge(
    base: Path,
    experts: Mapping[str, Path],
    section: Section,
    methods: Methods,
    out: Path,
    tell: Tell = untold,
    *,
    statistics: Mapping[str, Path] | None = None,
) -> list[Model]:
    """Merge by several methods in one reading pass, in place of what an earlier run left."""
    rows = covmerge.compare(
        base,
        experts,
        list(methods),
        out,
        parameters=methods,
        statistics=statistics,
        tensors={"few_rows": "allow"},  # 256 single words have fewer tokens than a layer has inputs
        overwrite=True,
        progress=Steps(tell),
    ).rows
    return [
        Model(
            section,
            " ".join([row.method, *(f"{k}={v}" for k, v in methods[row.method].items())]),
            dict.fromkeys(experts, out / row.method),
            row.method,
            methods[row.method],
            row.seconds,
            masked=registry.get(row.method).writes_masks,
        )
        for row in rows
    ]


def _tuned(
    merge: Callable[..., list[Model]], validation: Sequence[Exam], out: Path, tell: Tell
) -> list[Model]:
    """Keep Task Arithmetic at the scale of the best mean accuracy; delete the others."""
    steps = len(SCALES) + len(validation)
    models: list[Model] = []
    for scale in SCALES:
        tell(len(models), steps)
        parameters = {"task_arithmetic": {"scale": scale}}
        models += merge(Section.TUNED, parameters, out / f"scale={scale}")
    scores: list[list[float]] = []
    for exam in validation:
        tell(len(models) + len(scores), steps)
        scores.append(accuracies(exam, models))
    tell(steps, steps)
    means = [fmean(of_model) for of_model in zip(*scores, strict=True)]
    best = means.index(max(means))
    for scale in SCALES[:best] + SCALES[best + 1 :]:
        shutil.rmtree(out / f"scale={scale}")
    return [models[best]]
