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
    TUNED = "tuned on labelled texts"
    WITH_DATA = "with unlabelled texts"
    PER_TASK = "a model for each task"


@dataclass(frozen=True)
class Model:
    """A model for all tasks, or one for each.

    Attributes:
        title: what it is called in the table.
        folders: its checkpoint, by task.
        method: how it was merged.
        parameters: those of the method that are not at their defaults.
        seconds: what its method's mathematics took.
        masked: whether the checkpoint holds a mask for each task, which makes a model of its own.
    """

    section: Section
    title: str
    folders: Mapping[str, Path]
    method: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float | None = None
    masked: bool = False
