"""Merge the experts of a suite, from disk to disk, by covmerge's own engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import safetensors.torch

import covmerge
from covmerge import load_expert
from covmerge.methods import Method, registry
from covmerge_lab import collecting
from covmerge_lab.collecting import OWN
from covmerge_lab.models import Merge, Model, Section
from covmerge_lab.regmean_pp import OFF_DIAGONAL
from covmerge_lab.suite import Kind, Suite, Variant
from covmerge_lab.workers import MergeSteps, OnProgress, ignore_progress

# Their annotations are partial.
_PeftModel: Any = peft.PeftModel
_files: Any = safetensors.torch

SCALES = tuple(tenths / 10 for tenths in range(1, 11))  # that Task Arithmetic is tuned over
TUNED = "task_arithmetic, tuned"
# Merges in one reading: few, so that every worker has some. Merges that are on disk at once, until they
# are scored: what an interrupted run repeats.
_IN_ONE_READING, _ON_DISK = 4, 8

# Beside the defaults: ACE as its code was released. WUDI's published optimiser is left out: it takes a
# hundred times as long as the closed form of its loss.
_AS_RELEASED = (Merge("ace", {"eps": 1e-2}),)
# RegMean on what merged blocks see.
REGMEAN_PP = Merge(
    "regmean",
    {"off_diagonal": OFF_DIAGONAL},
    Section.WITH_DATA,
    label="regmean++",
    statistics="regmean++",
)
# The best of what data makes possible, without data.
_ON_OWN_INPUTS = (
    Merge("regmean", section=Section.OWN_INPUTS, label="regmean, own inputs", statistics=OWN),
    Merge(
        "auto_measured",
        section=Section.OWN_INPUTS,
        label="auto_measured, own inputs",
        statistics=OWN,
    ),
)
# They merge inside a space that adapters share; full updates share none.
_FOR_ADAPTERS = ("knots", "core_space", "ctm", "ssr")


@dataclass(frozen=True)
class Experts:
    """The experts of a suite that are merged together.

    Attributes:
        base: folder of their base: the suite's, or what a study made of it.
        folders: as they were trained, by task: whole models or adapters. What has another name than a
            task is merged with them, and has no examples to be scored on.
        whole: whole models, by task.
        statistics: folder of the statistics files of the whole models.
        work: folder for merged models.
    """

    suite: Suite
    variant: Variant
    base: Path
    folders: Mapping[str, Path]
    whole: Mapping[str, Path]
    statistics: Path
    work: Path

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a merge of them is scored on."""
        return tuple(name for name in self.folders if name in self.suite.tasks)


def catalogue(kind: Kind, only: Sequence[str] | None = None) -> tuple[Merge, ...]:
    """Return every merge of the tables.

    All methods at their defaults, as others released them, and on inputs that experts make themselves.
    Those that see weights and not updates are left out: they are for mergekit's recipes, which set them.

    Args:
        kind: of the experts.
        only: names of methods, or `regmean++`; None for all.
    """
    own = [method for method in registry if method.sees == "updates"]
    defaults = [Merge(method.name, section=_section(method)) for method in own]
    return tuple(
        merge
        for merge in (*defaults, *_AS_RELEASED, REGMEAN_PP, *_ON_OWN_INPUTS)
        if (kind == "lora" or merge.method not in _FOR_ADAPTERS)
        and (only is None or _named(merge) in only)
    )


def statistics_of(merge: Merge) -> str | None:
    """Return the kind of statistics that a merge needs."""
    if merge.statistics is not None:
        return merge.statistics
    data = registry.get(merge.method).data
    return None if data == "none" else data


def _named(merge: Merge) -> str:
    """What `--methods` calls it."""
    return merge.title if merge is REGMEAN_PP else merge.method


def passes(merges: Sequence[Merge]) -> list[list[Merge]]:
    """Split merges so that each part can be run in one reading of the experts."""
    return _split(merges, _IN_ONE_READING)


def parts(merges: Sequence[Merge]) -> list[list[Merge]]:
    """Split merges so that each part needs one kind of statistics, and little room on disk."""
    return _split(merges, _ON_DISK)


def _split(merges: Sequence[Merge], most: int) -> list[list[Merge]]:
    of_kind: dict[str | None, list[Merge]] = {}
    for merge in merges:
        of_kind.setdefault(statistics_of(merge), []).append(merge)
    return [
        of[start : start + most] for of in of_kind.values() for start in range(0, len(of), most)
    ]


def merge_together(
    experts: Experts,
    merges: Sequence[Merge],
    folder: str,
    on_progress: OnProgress = ignore_progress,
) -> list[Model]:
    """Merge by several methods in one reading of the experts.

    Args:
        experts: what to merge.
        merges: of one part of `passes`.
        folder: name inside the work folder; what an earlier run left there is replaced.
        on_progress: called with the steps done and all steps.
    """
    out = experts.work / folder
    kind = statistics_of(merges[0])
    # Statistics of experts speak of whole models.
    sources = experts.folders if kind is None else experts.whole
    files = None if kind is None else collecting.files(experts.statistics, kind, list(sources))
    rows = covmerge.compare(
        experts.base,
        sources,
        [(merge.method, merge.parameters) for merge in merges],
        out,
        statistics=files,
        tensors={"few_rows": "allow"},  # 256 single words have fewer tokens than a layer has inputs
        overwrite=True,
        progress=MergeSteps(on_progress),
    ).rows
    return [
        Model(
            merge.section,
            merge.title,
            _folders(experts, merge, out / row.label),
            merge,
            row.seconds,
        )
        for merge, row in zip(merges, rows, strict=True)
    ]


def tuned_task_arithmetic(experts: Experts, on_progress: OnProgress) -> list[Model]:
    """Keep Task Arithmetic at the scale of the best mean accuracy on the validation examples."""
    scales = SCALES[2::4] if experts.suite.quick else SCALES
    grid = [{"scale": scale} for scale in scales]
    return [tuned(experts, "task_arithmetic", grid, on_progress)]


def tuned(
    experts: Experts, method: str, grid: Sequence[Mapping[str, Any]], on_progress: OnProgress
) -> Model:
    """Keep a method at the parameters of the best mean accuracy on the validation examples.

    Args:
        experts: what to merge.
        method: its name.
        grid: the parameters that are tried; of equal ones the first is kept.
        on_progress: called with the steps done and all steps.
    """
    suite, tasks = experts.suite, experts.tasks
    steps = len(grid) * (1 + len(tasks))
    done = 0
    best: tuple[float, Model] | None = None
    merges = [Merge(method, parameters, Section.TUNED) for parameters in grid]
    for model in merge_together(experts, merges, f"tuned-{method}"):
        means: list[float] = []
        for task in tasks:
            done += 1
            on_progress(done, steps)
            folder, expert = model.folders[task], experts.folders[task]
            means.append(fmean(suite.score(task, "validation", folder, expert)))
        done += 1
        on_progress(done, steps)
        if best is None or fmean(means) > best[0]:
            best, worse = (fmean(means), replace(model, title=f"{method}, tuned")), best
        else:
            worse = (0.0, model)
        if worse is not None:
            remove(worse[1])
    assert best is not None
    return best[1]


def make_whole(suite: Suite, task: str, adapter: Path, out: Path, on_progress: OnProgress) -> Path:
    """Write the whole model that an adapter makes of the base, with its head, as PEFT merges it."""
    on_progress(0, 1)
    model = _PeftModel.from_pretrained(suite.fresh(task), adapter)
    model.merge_and_unload().save_pretrained(out)
    on_progress(1, 1)
    return out


def remove(model: Model) -> None:
    """Delete a merged model's folders."""
    for folder in set(model.folders.values()):
        shutil.rmtree(folder, ignore_errors=True)


def _section(method: Method) -> Section:
    if method.writes_masks:
        return Section.PER_TASK
    return Section.DATA_FREE if method.data == "none" else Section.WITH_DATA


def _folders(experts: Experts, merge: Merge, merged: Path) -> dict[str, Path]:
    """Return the checkpoint that each task is run with."""
    if merge.section is not Section.PER_TASK:
        return dict.fromkeys(experts.folders, merged)
    folders = {task: merged.with_name(f"{merged.name}-{task}") for task in experts.folders}
    for task, folder in folders.items():
        weights = load_expert(merged, task, experts.base)
        shutil.copytree(
            merged,
            folder,
            ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "heads"),
            dirs_exist_ok=True,
        )
        _files.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folders
