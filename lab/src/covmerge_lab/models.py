"""What is put to the test: the base, the experts, and every merge of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Section(Enum):
    """What a model was allowed to see; the parts of the table, in its order."""

    BOUNDS = "bounds"
    DATA_FREE = "without any data"
    OWN_INPUTS = "no external data, forward passes only"
    TUNED = "tuned on labelled examples"
    WITH_DATA = "with unlabelled examples"
    PER_TASK = "a model for each task"


@dataclass(frozen=True)
class Merge:
    """A method and the parameters that are not at their defaults.

    Attributes:
        method: its name.
        parameters: by name.
        section: of the table.
        label: what it is called there, if not as method and parameters say.
        statistics: which it is given, see `collecting`; None: those of data that the method needs, if any.
    """

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    section: Section = Section.DATA_FREE
    label: str = ""
    statistics: str | None = None

    @property
    def title(self) -> str:
        """What it is called in the table."""
        given = (f"{name}={value}" for name, value in self.parameters.items())
        return self.label or " ".join([self.method, *given])


@dataclass(frozen=True)
class Model:
    """A model for all tasks, or one for each.

    Attributes:
        title: what it is called in the table.
        folders: its checkpoint, by task.
        merge: how it was made; None for the base and the experts.
        seconds: what its method's mathematics took.
    """

    section: Section
    title: str
    folders: Mapping[str, Path]
    merge: Merge | None = None
    seconds: float | None = None
