"""The tasks: which pictures, how many of them, and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covmerge_lab import splits
from covmerge_lab.vision import sources
from covmerge_lab.vision.canvas import Pixels
from covmerge_lab.vision.sources import Picture, Reader

# Alike for all tasks: homogeneous updates are what this suite is for.
TRAIN_SIZE = 3000
PER_LABEL = 800

_savez: Any = np.savez_compressed  # its annotation takes arrays for flags


@dataclass(frozen=True)
class Split:
    """Pictures `(n, channels, SIDE, SIDE)` and the index of each one's label."""

    pixels: Pixels
    labels: NDArray[np.int64]

    def first(self, size: int) -> Split:
        """Return the first pictures."""
        return Split(self.pixels[:size], self.labels[:size])


@dataclass(frozen=True)
class Task:
    """A classification task with its data."""

    labels: tuple[str, ...]
    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class TaskSpec:
    """What a task is made from."""

    name: str
    about: str
    read: Reader


# The first four stand for the others: a task each of handwriting, photographs, fonts and drawings.
SPECS = (
    TaskSpec("digits", "handwritten digit", sources.digits),
    TaskSpec("clothes", "kind of garment", sources.clothes),
    TaskSpec("letters", "capital letter in an unseen font", sources.letters),
    TaskSpec("emoji", "category of an emoji", sources.emoji),
    TaskSpec("scripts", "writing system of a letter", sources.scripts),
    TaskSpec("surfaces", "surface that a patch is cut from", sources.surfaces),
    TaskSpec("signs", "digit on a wall", sources.signs),
    TaskSpec("counts", "how many things there are", sources.counts),
)


def save(task: Task, path: Path) -> None:
    """Write a task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"train": task.train, "validation": task.validation, "test": task.test}
    arrays: dict[str, Any] = {"labels": np.array(task.labels)}
    for name, part in parts.items():
        arrays |= {f"{name}_pixels": part.pixels, f"{name}_labels": part.labels}
    _savez(path, **arrays)


@lru_cache
def load(path: Path) -> Task:
    """Read a task that was saved."""
    with np.load(path) as stored:
        arrays: dict[str, Any] = dict(stored)
    train, validation, test = (
        Split(arrays[f"{name}_pixels"], arrays[f"{name}_labels"])
        for name in ("train", "validation", "test")
    )
    return Task(tuple(map(str, arrays["labels"])), train, validation, test)


def build(spec: TaskSpec, cache: Path) -> Task:
    """Read and split one source; the same packages give the same task."""
    pictures = spec.read(cache, Random(splits.SEED))
    parts = splits.split(pictures, lambda picture: picture.pixels.tobytes(), PER_LABEL, TRAIN_SIZE)

    def stacked(part: list[Picture]) -> Split:
        return Split(
            np.stack([picture.pixels for picture in part]),
            np.array([parts.labels.index(picture.label) for picture in part]),
        )

    return Task(parts.labels, stacked(parts.train), stacked(parts.validation), stacked(parts.test))
