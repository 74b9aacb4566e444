"""What a reader of an inspection must not miss, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from covmerge.types import Json


class Severity(str, Enum):
    """How bad it is."""

    FAULT = "fault"  # a merge would be refused, or worthless
    WARNING = "warning"  # a merge may be worse for it
    NOTE = "note"  # worth knowing

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: how bad it is.
        text: what it is, and what to do next.
        expert: whose; None: of the base, or of all.
        tensors: names in the base that it is about; empty: the whole model.
    """

    severity: Severity
    text: str
    expert: str | None = None
    tensors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """Plain JSON."""
        return {**asdict(self), "severity": str(self.severity), "tensors": list(self.tensors)}
