"""What the demo found: a table for the terminal and a JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

Accuracies = Mapping[str, float]  # by task, in [0, 1]


@dataclass(frozen=True)
class Row:
    """One model, or the set of experts."""

    title: str
    accuracies: Accuracies
    merge_seconds: float | None = None

    @property
    def mean(self) -> float:
        """Mean accuracy over the tasks."""
        return fmean(self.accuracies.values())

    def normalized_mean(self, experts: Accuracies) -> float:
        """Mean over the tasks of this model's accuracy over the expert's."""
        return fmean(self.accuracies[task] / experts[task] for task in experts)


def table(base: Row, experts: Row, merged: Sequence[Row], about: Mapping[str, str]) -> Table:
    """Lay out accuracies in percent: base, experts, then every merged model."""
    result = Table(
        title="Accuracy on each task's test set, %", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    result.add_column("model")
    for name in (*about, "mean", "of experts", "seconds"):
        result.add_column(name, justify="right", min_width=5, overflow="fold")
    for row in (base, experts, *merged):
        values = [*(row.accuracies[task] for task in about), row.mean]
        share = row.normalized_mean(experts.accuracies)
        seconds = "" if row.merge_seconds is None else f"{row.merge_seconds:.1f}"
        result.add_row(
            row.title,
            *(f"{100 * value:.1f}" for value in (*values, share)),
            seconds,
            end_section=row is experts,
        )
    return result


def legend(about: Mapping[str, str]) -> str:
    """Say what the columns are and what each row was allowed to see."""
    return "\n".join(
        [
            *(f"{name}: {text}" for name, text in about.items()),
            "of experts: the model's accuracy over the expert's, mean over the tasks",
            "seconds: to merge, from disk to disk",
            "Every model runs with the classifier of the task's expert. No merge saw any data but",
            "the tuned one: its λ is the best of 0.1 ... 1.0 on labelled validation texts.",
        ]
    )


def as_json(base: Row, experts: Row, merged: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows of the table, accuracies in [0, 1]."""
    return [
        {
            "model": row.title,
            "accuracy": dict(row.accuracies),
            "mean": row.mean,
            "normalized_mean": row.normalized_mean(experts.accuracies),
            "merge_seconds": row.merge_seconds,
        }
        for row in (base, experts, *merged)
    ]
