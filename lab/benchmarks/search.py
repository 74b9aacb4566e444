"""A search of 40 trials on the text suite from start to table, and what a trial takes beside merging anew.

    python -m benchmarks.search --cache DIR [--kind lora|full] [--trials 40]

Trains the suite's experts where they are not in the cache. `covmerge.search` chooses eight weights, the
method and its scale by one half of each task's validation examples. The other half, and the test examples,
say how far the best fits those that chose it, beside the default without a trial. CPU seconds: of merging a
trial they are the search's without its scorer, its start and its end with it, over the trials; anew, those
of a process `covmerge merge` of every fifth trial's recipe. Other kinds' figures are kept in
results/search.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

import covmerge
from benchmarks.measure import machine, spawn
from covmerge.plan.recipe.search import Template
from covmerge.run.scoring.table import Scored, ScoreTable
from covmerge.run.scoring.values import scores_of
from covmerge_lab.suite import Kind, Part, Variant
from covmerge_lab.text import TextSuite
from covmerge_lab.workers import ignore_progress

RESULTS = Path(__file__).parent / "results" / "search.json"
METHODS = ("task_arithmetic", "ties", "tsv_m", "iso_c")
_EVERY = 5  # trials of which one is merged anew
_COVMERGE = (sys.executable, "-m", "covmerge")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder of the suites")
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--trials", type=int, default=40)
    asked = parser.parse_args()
    suite = TextSuite(asked.cache)
    suite.prepare(ignore_progress)
    for task in suite.tasks:
        suite.train(task, Variant(asked.kind, 0), ignore_progress)
    with tempfile.TemporaryDirectory() as folder:
        found = searched(suite, asked.kind, asked.trials, Path(folder))
    command = f"python -m benchmarks.search --cache DIR --kind {asked.kind} --trials {asked.trials}"
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record[asked.kind] = {"command": command, "machine": machine(), **found}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record[asked.kind].items() if k != "trials"}, indent=1))


def scores(suite: TextSuite, kind: Kind, part: Part, model: Path) -> dict[str, list[float]]:
    folders = {task: suite.expert(task, Variant(kind, 0)) for task in suite.tasks}
    return {task: suite.score(task, part, model, expert) for task, expert in folders.items()}


def searched(suite: TextSuite, kind: Kind, trials: int, work: Path) -> dict[str, Any]:
    marked = recipe_of(suite, kind, weight={"search": [0, 1.5]})
    marked |= {
        "method": {"search": list(METHODS)},
        "parameters": {"scale": {"search": [0.1, 3, "log"]}},
    }
    scoring: list[float] = []

    def score(model: Path) -> dict[str, list[float]]:
        began = time.process_time()
        found = scores(suite, kind, "validation", model)
        scoring.append(time.process_time() - began)
        return found

    began, at = time.process_time(), time.perf_counter()
    search = covmerge.search(marked, score, work / "out", trials=trials)
    spent, seconds = time.process_time() - began, time.perf_counter() - at
    found: Any = search.as_json()
    merging = (spent - sum(scoring)) / trials
    _, *tried = found["trials"]
    anew = [merged(filled(marked, row), work) for row in tried[_EVERY - 1 :: _EVERY]]
    merged(recipe_of(suite, kind), work)
    models = {"best": work / "out" / "best", "without a search": work / "merged"}
    tests = {name: scores(suite, kind, "test", folder) for name, folder in models.items()}
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": {
            "search": round(spent, 1),
            "scoring a model": round(fmean(scoring), 2),
            "merging a trial": round(merging, 2),
            "merging it anew": round(fmean(anew), 2),
            "a trial / anew": round(merging / fmean(anew), 2),
            "with scoring": round((merging + fmean(scoring)) / (fmean(anew) + fmean(scoring)), 2),
        },
        "says": found["says"],
        "test": tested(tests),
        "trials": found["trials"],
    }


def recipe_of(suite: TextSuite, kind: Kind, **more: Any) -> dict[str, Any]:
    sources = {task: str(suite.expert(task, Variant(kind, 0))) for task in suite.tasks}
    experts = {task: {"source": source, **more} for task, source in sources.items()}
    return {"base": str(suite.base), "experts": experts, "tensors": {"few_rows": "allow"}}


def filled(marked: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a trial."""
    template = Template.of(marked)
    return template.filled(
        {m.name: v for m in template.marks if (v := row.get(m.name)) is not None}
    )


def written(recipe: Mapping[str, Any], work: Path) -> str:
    path = work / "recipe.yml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    return str(path)


def merged(recipe: Mapping[str, Any], work: Path) -> float:
    """Merge as a process of its own, and return its CPU seconds."""
    merge = ["merge", written(recipe, work), str(work / "merged"), "--overwrite"]
    return spawn([*_COVMERGE, *merge])["cpu_seconds"]


def tested(tests: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    rows = tuple(Scored(name, scores_of(found, name), 0.0) for name, found in tests.items())
    table = ScoreTable("test examples", rows, {})
    best, other = (row.label for row in rows)
    lead = table.lead(best, other, "mean")
    assert lead is not None
    means = {row.label: round(table.value(row, "mean") or 0.0, 4) for row in rows}
    return {**means, "gain": [round(end, 4) for end in (lead.mean, lead.low, lead.high)]}


if __name__ == "__main__":
    main()
