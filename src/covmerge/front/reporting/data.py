"""What a report shows, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covmerge.base.diagnostics import TensorDiagnostics
from covmerge.base.notebook import paragraph
from covmerge.base.table import Table, Tabular
from covmerge.base.types import Json
from covmerge.run.inspection.result import Inspection
from covmerge.run.verification import Verification


@dataclass(frozen=True)
class LayerCost:
    """What merging one tensor cost.

    Attributes:
        seconds: of mathematics; None where it was not measured.
        memory: bytes alive while it is merged, by the plan.
        flops: by the method's cost model.
    """

    seconds: float | None
    memory: int
    flops: float


@dataclass(frozen=True, repr=False)
class Report(Tabular):
    """An inspection of experts, and of what a merge made of them.

    Attributes:
        title: a name for people: the output folder's, or the base's.
        inspection: what was measured, layer by layer.
        manifest: covmerge.json of the merged model; None before a merge.
        diagnostics: its methods' diagnostics, by tensor; empty before a merge.
        verification: outcome of re-reading it.
        costs: by tensor of the merge; empty before one.
        run: seconds and memory of the whole merge, where it was just run; as in `MergeResult.run`.
    """

    title: str
    inspection: Inspection
    manifest: Mapping[str, Any] | None = None
    verification: Verification | None = None
    diagnostics: Mapping[str, TensorDiagnostics] = field(
        default_factory=dict[str, TensorDiagnostics]
    )
    costs: Mapping[str, LayerCost] = field(default_factory=dict[str, LayerCost])
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __repr__(self) -> str:
        ok = self.verification is not None and self.verification.ok
        return f"<Report: {self.title}{', verified' if ok else ''}; {self.inspection!r}>"

    def table(self) -> Table:
        """The rows of its inspection."""
        return self.inspection.table()

    def html(self) -> str:
        """What a notebook shows."""
        return paragraph(repr(self)) + self.inspection.html()

    def as_json(self) -> dict[str, Json]:
        """All of it as plain JSON."""
        return {
            "title": self.title,
            "inspection": self.inspection.as_json(),
            "manifest": None if self.manifest is None else dict(self.manifest),
            "verification": None if self.verification is None else self.verification.summary(),
            "costs": {name: vars(cost) for name, cost in self.costs.items()},
            "run": dict(self.run),
        }
