"""What the demo found: a table for the terminal and a JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from demo.collecting import TEXTS
from demo.merging import SCALES
from demo.models import Model, Section
from demo.tasks import TEST_SIZE, VALIDATION_SIZE

Accuracies = Mapping[str, float]  # by task, in [0, 1]

LEGEND = f"""\
{Section.DATA_FREE.value}: parameters at their defaults; ace once more as its code was released, and wudi
  with its published optimiser
{Section.TUNED.value}: the best of {len(SCALES)} scales on {VALIDATION_SIZE} validation texts of each task
{Section.WITH_DATA.value}: {TEXTS["gram"]} training texts of each task; fisher {TEXTS["fisher"]} of them
{Section.PER_TASK.value}: not one model: whoever runs it must know which task a text belongs to
of experts: the model's accuracy over the expert's, mean over the tasks
seconds: the method's own mathematics on one core, without reading, writing, data and tuning
Every model runs with the classifier of the task's expert, on {TEST_SIZE} texts of each task: the standard
error is {100 * (0.25 / TEST_SIZE) ** 0.5:.1f} points at most, and that of the mean 1."""


@dataclass(frozen=True)
class Row:
    """A model and how it did.

    Attributes:
        share: mean over the tasks of its accuracy over the expert's.
    """

    model: Model
    accuracies: Accuracies
    share: float

    @property
    def mean(self) -> float:
        """Mean accuracy over the tasks."""
        return fmean(self.accuracies.values())


def rows(
    models: Sequence[Model], accuracies: Sequence[Accuracies], experts: Accuracies
) -> list[Row]:
    """Return the rows of the table: section by section, and the best first in each."""
    found = [
        Row(model, scores, fmean(scores[task] / experts[task] for task in experts))
        for model, scores in zip(models, accuracies, strict=True)
    ]
    order = list(Section)
    return sorted(found, key=lambda row: (order.index(row.model.section), -row.mean))


def table(rows: Sequence[Row], tasks: Sequence[str]) -> Table:
    """Lay out accuracies in percent."""
    result = Table(
        title="Accuracy on each task's test set, %", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    result.add_column("model", no_wrap=True)
    for name in (*tasks, "mean", "of experts", "seconds"):
        result.add_column(name, justify="right", min_width=5, overflow="fold")
    section = None
    for row in rows:
        if row.model.section is not section:
            section = row.model.section
            result.add_section()
            result.add_row(section.value, style="bold")
        values = [*(row.accuracies[task] for task in tasks), row.mean, row.share]
        seconds = "" if row.model.seconds is None else f"{row.model.seconds:.1f}"
        result.add_row(f"  {row.model.title}", *(f"{100 * value:.1f}" for value in values), seconds)
    return result


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows of the table, accuracies in [0, 1]."""
    return [
        {
            "section": row.model.section.value,
            "model": row.model.title,
            "method": row.model.method,
            "parameters": dict(row.model.parameters),
            "accuracy": dict(row.accuracies),
            "mean": row.mean,
            "normalized_mean": row.share,
            "seconds": row.model.seconds,
        }
        for row in rows
    ]
