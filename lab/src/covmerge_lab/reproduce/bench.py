"""What the families' scoring shares."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transformers

from covmerge.errors import InputError
from covmerge_lab.reproduce.published import Column, Setting
from covmerge_lab.reproduce.sources import Models

# Its annotations are partial.
_logging: Any = transformers.logging

Record = Mapping[str, Any]  # one example, by field


@dataclass(frozen=True)
class Bench:
    """A setting with all that scoring needs.

    Attributes:
        data: folder of the user's data; None: what the hub has is fetched.
        cache: folder for what is fetched.
        limit: examples of each task; None: all of them.
        device: where the models run.
        trusted: whether a task may run code that the model wrote.
    """

    setting: Setting
    models: Models
    data: Path | None
    cache: Path
    limit: int | None
    device: str
    trusted: bool


# Percent by column title; a column that cannot be scored here is left out.
Score = Callable[[Bench, Path, Sequence[Column]], Mapping[str, float]]


def optional(module: str) -> Any:
    """Import a package that only the reproduction of tables needs.

    Raises:
        InputError: it is not installed, or not for this torch.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision of another torch is a RuntimeError
        reason = str(error).splitlines()[0]
        raise InputError(
            f'this table needs {module} ({reason}): pip install "covmerge-lab[reproduce]"'
        ) from error


def read_records(path: Path, limit: int | None) -> list[Record]:
    """Read examples, one JSON object a line.

    Raises:
        InputError: there is no such file, or a line is no object.
    """
    if not path.is_file():
        raise InputError(
            f"there is no {path}: put the task's examples there, one JSON object a line"
        )
    records: list[Record] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record: object = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}, line {number} is no JSON ({error}): correct it"
                ) from error
            if not isinstance(record, dict):
                raise InputError(f"{path}, line {number} is no JSON object: correct it")
            records.append(cast("dict[str, Any]", record))
            if limit is not None and len(records) >= limit:
                break
    if not records:
        raise InputError(f"{path} is empty: put the task's examples there, one JSON object a line")
    return records


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Keep transformers from telling of every head that a backbone has not."""
    before, bars = _logging.get_verbosity(), _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.set_verbosity(before)
        if bars:
            _logging.enable_progress_bar()
