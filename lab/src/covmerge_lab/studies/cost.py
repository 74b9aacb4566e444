"""What every method costs: time and memory of one merge, from disk to disk, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch

from covmerge_lab import merging
from covmerge_lab.alone import Cost, Order, run_alone
from covmerge_lab.bench import Bench
from covmerge_lab.models import Merge
from covmerge_lab.studies.layers import train
from covmerge_lab.studies.study import Findings, Study
from covmerge_lab.studies.tables import markdown
from covmerge_lab.suite import Variant
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_plt: Any = plt

PLAIN = "average"  # reads, sums, writes
REPEATS = 3
_QUICK = (PLAIN, "actmat", "ace")
_MB = 2**20


class CostOfMethods(Study):
    """ACE's Table 6."""

    name = "cost"
    about = (
        "What a merge costs (ACE, Table 6): seconds and peak memory of every method without data, one at a "
        f"time, each in a fresh process, beside `{PLAIN}`, which only reads, sums and writes. The medians "
        f"of {REPEATS} rounds."
    )

    def run(self, bench: Bench, variants: Sequence[Variant]) -> Findings:
        results: dict[str, Any] = {}
        texts: list[str] = []
        pictures: dict[str, Any] = {}
        quick = bench.suite.quick
        for variant in variants:
            folders = train(bench, variant)
            merges = [
                merge
                for merge in merging.catalogue(variant.kind, _QUICK if quick else None)
                if merging.statistics_of(merge) is None
            ]
            job = partial(measure, bench.suite.base, folders, merges, 1 if quick else REPEATS)
            # One job, so that no two merges share the machine.
            (costs,) = bench.work(f"{variant}: merges, each alone", {"all methods": job}).values()
            results[str(variant)] = {title: asdict(cost) for title, cost in costs.items()}
            texts.append(f"## {variant}, {len(folders)} experts\n\n{text(costs)}")
            pictures[f"cost-{variant}"] = _draw(f"{variant}, {len(folders)} experts", costs)
        return Findings({"variants": results}, "\n\n".join(texts), pictures)


def measure(
    base: Path,
    experts: Mapping[str, Path],
    merges: Sequence[Merge],
    rounds: int,
    on_progress: OnProgress,
) -> dict[str, Cost]:
    """Return the medians of some rounds; in each round all methods follow one another."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, list[Cost]] = {merge.title: [] for merge in merges}
    with tempfile.TemporaryDirectory() as scratch:
        for done in range(rounds * len(merges)):
            on_progress(done, rounds * len(merges))
            merge = merges[done % len(merges)]
            order = Order(
                base=str(base),
                experts={name: str(folder) for name, folder in experts.items()},
                method=merge.method,
                out=str(Path(scratch) / "merged"),
                parameters=merge.parameters,
                device=device,
            )
            found[merge.title].append(run_alone(order))
    on_progress(rounds * len(merges), rounds * len(merges))
    return {title: middle(costs) for title, costs in found.items()}


def middle(costs: Sequence[Cost]) -> Cost:
    """Return the median of every part of some costs.

    Example:
        >>> middle([Cost(1.0, 2.0, 3.0, 10, None), Cost(3.0, 2.0, 5.0, 20, None)])
        Cost(mathematics=2.0, merge=2.0, process=4.0, memory=15, device_memory=None)
    """
    on_gpu = [cost.device_memory for cost in costs if cost.device_memory is not None]
    return Cost(
        mathematics=median(cost.mathematics for cost in costs),
        merge=median(cost.merge for cost in costs),
        process=median(cost.process for cost in costs),
        memory=round(median(cost.memory for cost in costs)),
        device_memory=round(median(on_gpu)) if on_gpu else None,
    )


def text(costs: Mapping[str, Cost]) -> str:
    """Give the table, the cheapest first."""
    plain = costs[PLAIN]
    on_gpu = plain.device_memory is not None
    columns = ["method", "mathematics, s", "merge, s", f"of {PLAIN}", "process, s", "memory, MiB"]
    rows = [
        [
            title,
            f"{cost.mathematics:.2f}",
            f"{cost.merge:.2f}",
            f"{cost.merge / plain.merge:.1f}",
            f"{cost.process:.2f}",
            f"{cost.memory / _MB:.0f}",
            *([f"{(cost.device_memory or 0) / _MB:.0f}"] if on_gpu else []),
        ]
        for title, cost in sorted(costs.items(), key=lambda item: item[1].merge)
    ]
    legend = """\
mathematics: the method itself; merge: reading, merging, writing and verifying; process: Python's start \
and imports too; memory: most that was resident beyond imports and planning."""
    return f"{markdown([*columns, *(['GPU, MiB'] if on_gpu else [])], rows)}\n\n{legend}"


def _draw(title: str, costs: Mapping[str, Cost]) -> Any:
    titles = sorted(costs, key=lambda each: -costs[each].merge)
    figure, (left, right) = _plt.subplots(
        1, 2, figsize=(9, 0.26 * len(titles) + 1.6), sharey=True, layout="constrained"
    )
    left.barh(titles, [costs[t].merge for t in titles], color="#9a9a9a", label="whole merge")
    left.barh(titles, [costs[t].mathematics for t in titles], color="#1f5fa8", label="mathematics")
    right.barh(titles, [costs[t].memory / _MB for t in titles], color="#3d7f4d")
    left.set_xlabel("seconds")
    left.set_xscale("log")
    left.minorticks_off()
    right.set_xlabel("peak memory beyond imports, MiB")
    left.axvline(costs[PLAIN].merge, color="#b3541e", ls="--", lw=1, label=f"`{PLAIN}`")
    left.tick_params(axis="y", labelsize=8)
    left.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Time and memory of a merge, each method alone: {title}", fontsize=10)
    return figure
