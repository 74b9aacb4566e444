"""`covmerge bench`: from the name of a suite to its results."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from covmerge.errors import InputError, did_you_mean
from covmerge.methods import registry
from covmerge_lab import bench, figures, report
from covmerge_lab.bench import Bench
from covmerge_lab.collecting import EXAMPLES, MADE
from covmerge_lab.llm import Gpt2Suite, LlmSuite
from covmerge_lab.merging import REGMEAN_PP
from covmerge_lab.studies import STUDIES, save
from covmerge_lab.suite import Kind, Scores, Suite, Variant
from covmerge_lab.summary import Group, summarise
from covmerge_lab.text import TextSuite
from covmerge_lab.vision import VisionSuite
from covmerge_lab.workers import Workers, ignore_progress, prepare

_SUITES: dict[str, type[Suite]] = {
    suite.name: suite for suite in (TextSuite, VisionSuite, LlmSuite, Gpt2Suite)
}


def open_suite(
    name: str, cache: Path, *, quick: bool = False, counts: Sequence[int] | None = None
) -> Suite:
    """Return a suite by its name.

    Raises:
        InputError: there is none of that name, or it has not so many tasks.
    """
    if name not in _SUITES:
        raise InputError(f"unknown suite '{name}'.{did_you_mean(name, _SUITES)}")
    suite = _SUITES[name](cache.resolve(), quick, None if counts is None else tuple(counts))
    for count in counts or ():
        if not 1 < count <= len(suite.available):
            raise InputError(
                f"{count} experts cannot be merged: '{name}' has {len(suite.available)} tasks, and a "
                "merge takes two or more"
            )
    return suite


def terminal() -> Console:
    """Return the console that progress and tables go to."""
    # A log file has no width of its own; the tables need this much.
    return Console(width=None if sys.stdout.isatty() else 160)


def run_bench(
    name: str,
    *,
    out: Path,
    cache: Path,
    kinds: Sequence[str] | None,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    quick: bool,
    counts: Sequence[int] | None = None,
) -> list[Group]:
    """Run a suite and write `results.json`, its tables and pictures.

    Args:
        name: of the suite.
        out: folder of the results; an earlier run's are replaced.
        cache: folder of what is fetched and trained.
        kinds: of experts; None for all that the suite has.
        seeds: one training of all experts each.
        methods: merge by these only; None for all.
        quick: a smoke run.
        counts: of experts, a table each; None for those that the suite usually has.

    Raises:
        InputError: an unknown name, a folder of something else, or data that cannot be fetched.
    """
    suite = open_suite(name, cache, quick=quick, counts=counts)
    chosen = _kinds(suite, kinds)
    _check(out, cache, methods)
    prepare()
    console = terminal()
    groups: list[Group] = []
    with Workers(console) as workers:
        bench = Bench(suite, workers, console)
        bench.prepare()
        for kind in chosen:
            for tasks in suite.subsets:
                outcomes = [bench.run(Variant(kind, seed), tasks, methods) for seed in seeds]
                groups.append(summarise(outcomes))
                console.print(report.table(groups[-1]))
    console.print(report.LEGEND, style="dim", highlight=False)
    asked = _command(f"bench {name}", kinds, seeds, methods, quick, counts)
    _save(bench, groups, out, asked)
    recipe = _write_experts(suite, Variant(chosen[0], seeds[0]), out)
    console.print(f"{sum(bench.seconds.values()):.0f} s in all; results are in {out}/")
    smoke = " --quick" if quick else ""
    by = f"covmerge bench {name} --kind {chosen[0]} --cache {shlex.quote(str(cache))}{smoke}"
    console.print(
        "To score these experts' merges yourself: "
        f"covmerge compare {recipe} --out study --score {shlex.quote(f'{by} --score {{model}}')}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return groups


def score_model(
    name: str, model: Path, *, cache: Path, kind: str, quick: bool
) -> dict[str, Scores]:
    """Return how a model does on each test example of a suite, by task; heads are the experts'.

    Raises:
        InputError: an unknown name, or experts that are not trained.
    """
    suite = open_suite(name, cache, quick=quick)
    (trained,) = _kinds(suite, [kind])
    experts = {task: suite.expert(task, Variant(trained, 0)) for task in suite.tasks}
    for expert in experts.values():
        if not expert.is_dir():
            raise InputError(
                f"{expert} is not there: train the experts first, by `covmerge bench {name}` with the same "
                "--cache and --kind"
            )
    suite.prepare(ignore_progress)
    return {task: suite.score(task, "test", model, expert) for task, expert in experts.items()}


def list_studies() -> None:
    """Print the studies and what they ask."""
    console = terminal()
    for name, study in STUDIES.items():
        console.print(f"[bold]{name}[/]: {escape(study.about)}", highlight=False)
        if study.parts:
            named = " ".join(shlex.quote(part) for part in study.parts)
            console.print(
                f"  --only: {escape(named)}", style="dim", highlight=False, soft_wrap=True
            )


def run_study(
    name: str,
    suite_name: str,
    *,
    out: Path,
    cache: Path,
    kinds: Sequence[str] | None,
    seeds: Sequence[int],
    quick: bool,
    only: Sequence[str] = (),
) -> None:
    """Run a study and write `results.json`, its text and its pictures.

    Raises:
        InputError: an unknown name, experts or parts that it is not of, a folder of something else, or
            data that cannot be fetched.
    """
    if name not in STUDIES:
        raise InputError(f"unknown study '{name}'.{did_you_mean(name, STUDIES)}")
    suite = open_suite(suite_name, cache, quick=quick)
    study = STUDIES[name](only)
    wanted = _kinds(suite, kinds)
    of: list[Kind] = [kind for kind in study.kinds if kind in wanted]
    if not of:
        its = " or ".join(study.kinds)
        raise InputError(f"study '{name}' is of other experts: pass --kind {its}, or leave it out")
    study.check(suite, of)
    variants = [Variant(kind, seed) for kind in of for seed in seeds]
    _check(out, cache, None)
    prepare()
    console = terminal()
    with Workers(console) as workers:
        bench = Bench(suite, workers, console)
        bench.prepare()
        found = study.run(bench, variants)
    of_suite = f"study {name} --suite {suite_name}"
    asked = _command(of_suite, kinds, seeds, None, quick, only=study.only)
    save(study, bench, found, out, asked)
    console.print(Markdown(found.text))
    console.print(f"{sum(bench.seconds.values()):.0f} s in all; results are in {out}/")


def _kinds(suite: Suite, wanted: Sequence[str] | None) -> tuple[Kind, ...]:
    for kind in wanted or ():
        if kind not in suite.kinds:
            raise InputError(
                f"suite '{suite.name}' has no '{kind}' experts.{did_you_mean(kind, suite.kinds)}"
            )
    return tuple(kind for kind in suite.kinds if wanted is None or kind in wanted)


def _check(out: Path, cache: Path, methods: Sequence[str] | None) -> None:
    for method in methods or ():
        if method != REGMEAN_PP.title:
            registry.get(method)
    try:
        # Before hours of work: what cannot be written is not to be found out after it.
        out.mkdir(parents=True, exist_ok=True)
        # The cache may lie in it: it is all that is there where an earlier run was interrupted.
        held = any(path.resolve() != cache.resolve() for path in out.iterdir())
    except OSError as error:
        raise InputError(
            f"{out} is no folder for results ({error.strerror}): give another --out"
        ) from error
    if held and not (out / "results.json").exists():
        raise InputError(f"{out} holds something else than results of a suite: give another --out")
    if not os.access(out, os.W_OK):
        raise InputError(f"{out} cannot be written to: give another --out")


def _command(
    of: str,
    kinds: Sequence[str] | None,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    quick: bool,
    counts: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> str:
    """Return the command that gives these results again, wherever its folders are."""
    options = [
        *(f"--kind {kind}" for kind in kinds or ()),
        f"--seeds {len(seeds)}",
        *([f"--experts {','.join(map(str, counts))}"] if counts else []),
        *([f"--methods {','.join(methods)}"] if methods else []),
        *(f"--only {shlex.quote(part)}" for part in only),
        *(["--quick"] if quick else []),
    ]
    return " ".join(["covmerge", of, *options])


def _write_experts(suite: Suite, variant: Variant, out: Path) -> Path:
    """Write a recipe of the experts, as `covmerge compare` takes it; return its path."""
    path = out / "experts.yml"
    lines = [
        f"base: {json.dumps(str(suite.base))}",
        "experts:",
        *(f"  {t}: {json.dumps(str(suite.expert(t, variant)))}" for t in suite.tasks),
        "method: average",
        "tensors: {few_rows: allow}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _save(of: Bench, groups: Sequence[Group], out: Path, command: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    drawn = {"accuracy": figures.accuracy, "tasks": figures.tasks}
    pictures = {
        f"{what}-{group.kind}-{len(group.tasks)}": draw(group)
        for what, draw in drawn.items()
        for group in groups
    }
    results = {
        "suite": of.suite.name,
        "accuracy": of.suite.accuracy,
        "command": command,
        "quick": of.suite.quick,
        "tasks": {task: of.suite.describe(task) for task in of.suite.tasks},
        "unlabelled_examples": EXAMPLES,
        "own_inputs": MADE,
        "seconds": of.seconds,
        "machine": bench.machine(),
    }
    report.save(results, groups, figures.save(pictures, out), out)
