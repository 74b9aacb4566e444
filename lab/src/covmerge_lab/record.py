"""evaluation.json: what was measured of a model, kept beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covmerge.base.types import Json
from covmerge.errors import InputError
from covmerge.files.checkpoints.json_file import dumps, read_object
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, MAX_BYTES
from covmerge.files.stores.disk import replace_file
from covmerge.files.stores.regular_file import read_regular

FILE_NAME = "evaluation.json"
LM_EVAL, PYTHON = "lm-eval", "python"  # the harnesses


@dataclass(frozen=True)
class Metric:
    """A number, and how far it may be off.

    Attributes:
        name: what the harness calls it.
        value: None where it is not finite, as the perplexity of a ruined model may be.
        stderr: its standard error, where the harness tells one.
    """

    name: str
    value: float | None
    stderr: float | None = None

    def __str__(self) -> str:
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        return value if self.stderr is None else f"{value} ± {self.stderr:.2g}"


@dataclass(frozen=True)
class Result:
    """How a model does on a task.

    Attributes:
        task: the task's name in its harness.
        harness: `lm-eval`, or `python` for a callback.
        version: of the harness, where it has one.
        metrics: what was measured.
        examples: how many were put to the model, where the harness tells.
        limit: the most that were asked for, where not all were.
        date: when, in UTC.
        seconds: what the whole run took, of all tasks that were asked for together.
        model: SHA-256 of the model's covmerge.json, where it has one.
    """

    task: str
    harness: str
    version: str | None
    metrics: tuple[Metric, ...]
    examples: int | None
    limit: int | None
    date: str
    seconds: float
    model: str | None

    def summary(self) -> dict[str, Json]:
        """Return it as JSON."""
        return asdict(self)


def finite(value: float) -> float | None:
    """Return a number that JSON has, or None."""
    return float(value) if math.isfinite(value) else None


def fingerprint(folder: Path) -> str | None:
    """Return SHA-256 of a model's covmerge.json, or None: it names every source and every parameter."""
    try:
        content = read_regular(folder / MANIFEST_NAME, MAX_BYTES)
    except FileNotFoundError:
        return None
    return hashlib.sha256(content).hexdigest()


def read(folder: Path) -> list[Result]:
    """Return what was measured of a model before.

    Raises:
        InputError: the file is none of ours, or is of another model.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return []
    try:
        results = [_result(entry) for entry in read_object(path)["results"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} was not written by covmerge: move it away") from error
    model = fingerprint(folder)
    if any(result.model != model for result in results):
        raise InputError(
            f"{path} holds results of another model than {folder} is now: move it away, "
            "or delete it"
        )
    return results


def write(folder: Path, measured: Sequence[Result]) -> list[Result]:
    """Add results to what was measured before, in place of those of the same tasks; return all."""
    again = {(result.harness, result.task) for result in measured}
    kept = [result for result in read(folder) if (result.harness, result.task) not in again]
    results = [*kept, *measured]
    content = dumps({"results": [r.summary() for r in results]}, what=FILE_NAME, indent=1)
    replace_file(folder / FILE_NAME, content + "\n")
    return results


def _result(entry: dict[str, Any]) -> Result:
    metrics = tuple(Metric(**metric) for metric in entry.pop("metrics"))
    return Result(**entry, metrics=metrics)
