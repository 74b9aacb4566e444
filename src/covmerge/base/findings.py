"""Findings: faults and oddities of sources and results, as text for the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum

from covmerge.base.errors import did_you_mean
from covmerge.base.types import Json

UNCHANGED = "unchanged-expert"

# Faults that make a merge worthless, by the names under which a recipe's `allow` lets them pass.
FAULTS = {
    "not-a-fine-tune": "an expert was trained from another base than this one",
    "swapped-tensors": "an expert holds a layer of the base under the name of another",
    UNCHANGED: "an expert equals the base in all that is merged",
    "changed-integers": "an expert has other integers or truth values than the base",
}

# A fault that no recipe may allow: the output would lose nearly all that an expert stores.
LOST = "lost-update"


def fault_name(name: str) -> str:
    """Return a name of `FAULTS`.

    Raises:
        ValueError: there is no such fault; the message has the nearest name.
    """
    if name not in FAULTS:
        raise ValueError(f"'{name}' is no fault that may be allowed.{did_you_mean(name, FAULTS)}")
    return name


class Severity(str, Enum):
    """How bad a finding is."""

    FAULT = "fault"  # a merge would be refused, or worthless
    WARNING = "warning"  # a merge may be worse for it
    NOTE = "note"  # worth knowing

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """A fault or an oddity of a source, or of all of them."""

    severity: Severity
    text: str  # what was found, and what to do next
    expert: str | None = None  # the expert that it is about; None: the base, or all experts
    # names in the base of the tensors that it is about; empty: the whole model
    tensors: tuple[str, ...] = ()
    name: str | None = None  # the name of a fault of `FAULTS`, which a recipe may `allow`

    def __str__(self) -> str:
        whose = "" if self.expert is None else f"expert '{self.expert}': "
        return whose + self.text

    def as_json(self) -> dict[str, Json]:
        """Return the finding as plain JSON values."""
        return {**asdict(self), "severity": str(self.severity), "tensors": list(self.tensors)}


def by_text(findings: Iterable[Finding]) -> dict[tuple[Severity, str], list[Finding]]:
    """Return findings grouped by severity and text: one text may be found for several experts.

    Example:
        >>> same = [Finding(Severity.NOTE, "is an adapter", name) for name in ("a", "b")]
        >>> [[one.expert for one in found] for found in by_text(same).values()]
        [['a', 'b']]
    """
    found: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.severity, finding.text), []).append(finding)
    return found


@dataclass(frozen=True)
class Fit:
    """What a merge reports of its experts where no fault stops it."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
