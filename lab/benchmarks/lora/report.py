"""What was measured: a table for the terminal, and rows for the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.lora.merging import Order

Accuracies = Mapping[str, float]  # by task, in [0, 1]


@dataclass(frozen=True)
class Model:
    """What is put to the test.

    Attributes:
        adapters: what is put on the base for each task; None: nothing.
        order: how it was merged.
        measured: what the merge took.
    """

    title: str
    adapters: Mapping[str, Path | None]
    order: Order | None = None
    measured: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """A model and how it did, beside the experts."""

    model: Model
    accuracies: Accuracies
    experts: Accuracies

    @property
    def mean(self) -> float:
        """Mean accuracy over the tasks."""
        return fmean(self.accuracies.values())

    @property
    def share(self) -> float:
        """Mean over the tasks of the accuracy over the expert's."""
        return fmean(self.accuracies[task] / self.experts[task] for task in self.experts)

    def as_json(self) -> dict[str, Any]:
        """Return the row, accuracies in [0, 1]."""
        return {
            "model": self.model.title,
            "order": self.model.order and asdict(self.model.order),
            "accuracy": dict(self.accuracies),
            "mean": self.mean,
            "of_experts": self.share,
            **(self.model.measured or {}),
        }


def table(name: str, rows: Sequence[Row]) -> Table:
    """Lay out accuracies in percent, seconds, and memory beyond the imported packages."""
    title = f"{name}: accuracy in %, seconds, MB beyond the imports"
    result = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("model", no_wrap=True)
    for column in (
        *rows[0].experts,
        "mean",
        "of experts",
        "load",
        "merge",
        "save",
        "MB",
        "off sum",
    ):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = [*row.accuracies.values(), row.mean, row.share]
        measured = row.model.measured
        result.add_row(
            row.model.title,
            *(f"{100 * value:.1f}" for value in values),
            *(_costs(measured) if measured else ()),
        )
    return result


def _costs(measured: Mapping[str, Any]) -> list[str]:
    seconds: Mapping[str, float] = measured["seconds"]
    stages = [f"{seconds[s]:.1f}" if s in seconds else "" for s in ("load", "merge", "save")]
    memory = f"{(measured['peak_bytes'] - measured['imported_bytes']) / 1e6:.0f}"
    distance = measured.get("distance_to_sum")
    return [*stages, memory, "" if distance is None else f"{distance:.2g}"]
