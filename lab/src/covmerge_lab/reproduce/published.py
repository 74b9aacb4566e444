"""What a published table says and what it was made of, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from covmerge.methods import registry

MEAN = "mean"  # the last column of every setting

Family = Literal["clip", "glue", "t5", "lm"]


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is.

    Attributes:
        hub: `org/name` or `org/name@revision`; None where it is on no hub, or nobody says where.
        folder: the folder inside that repository.
        file: its place under `--checkpoints`, as its authors lay their downloads out.
        where: what is to be done where neither is enough.
    """

    hub: str | None = None
    folder: str = ""
    file: str = ""
    where: str = ""


@dataclass(frozen=True)
class Column:
    """One task of a setting.

    Attributes:
        title: as printed.
        task: its name in the data.
        expert: whose head, or whose own score, belongs to it.
        metric: of `metrics.METRICS` for GLUE, of the task's own in lm-eval; elsewhere accuracy.
        runs_code: whether scoring it runs code that the model wrote.
    """

    title: str
    task: str
    expert: str
    metric: str = "accuracy"
    runs_code: bool = False


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        title: as printed.
        published: percent by column title, or by `MEAN`; the paper need not give every one.
        kind: `base` and `experts` (each on its own task) are bounds, the others merges.
        method: covmerge's name of it; empty for a bound.
        parameters: those that the paper states; the others stand at covmerge's defaults.
        note: what is not known of the paper's run.
        tensors: where its authors' code treats tensors otherwise than the setting says.
        predicted: percent by column title, or by `MEAN`, of a row that no paper has.
    """

    title: str
    published: Mapping[str, float]
    kind: Literal["base", "experts", "merge"] = "merge"
    method: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    predicted: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def key(self) -> str:
        """What `--methods` calls it."""
        if self.kind != "merge":
            return self.kind
        return "-".join([self.method, *filter(None, [self.parameters.get("inner")])])

    @property
    def data(self) -> str:
        """The statistics that its method needs of every expert; empty if none."""
        if self.kind != "merge" or (needed := registry.get(self.method).data) == "none":
            return ""
        return needed


@dataclass(frozen=True)
class Setting:
    """One base with its experts: a block of a table.

    Attributes:
        model: what the base is; the architecture's name in open_clip for `clip`.
        share: whether values are percent of the expert's own score.
        tensors: what the authors' code does to tensors by kind, as in a recipe.
        rules: its exceptions, as in a recipe.
        gigabytes: to be fetched from the hub, about.
        max_length: tokens read of a text.
    """

    name: str
    family: Family
    model: str
    base: Source
    experts: Mapping[str, Source]
    columns: Sequence[Column]
    rows: Sequence[Row]
    share: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    rules: Sequence[Mapping[str, Any]] = ()
    gigabytes: float = 0.0
    max_length: int = 512


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        name: what the command line calls it.
        paper: title and arXiv id.
        label: what the paper calls it.
        what: one line on its content.
        settings: its blocks.
        notes: what a reader must know beside the numbers.
    """

    name: str
    paper: str
    label: str
    what: str
    settings: Sequence[Setting]
    notes: Sequence[str] = ()


def scores(titles: Sequence[str], line: str) -> dict[str, float]:
    """Read a line of numbers; the last is the mean where there is one more than titles.

    Example:
        >>> scores(["a", "b"], "1.0 2.0 1.5")
        {'a': 1.0, 'b': 2.0, 'mean': 1.5}
    """
    return dict(zip([*titles, MEAN], map(float, line.split()), strict=False))
