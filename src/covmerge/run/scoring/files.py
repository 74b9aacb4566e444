"""Score models on the examples of files (CSV with a header line, or JSON lines) with a library."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.files.stores.regular_file import read_regular
from covmerge.files.tensors.skeleton import quiet
from covmerge.run.scoring.values import Scores

_MOST_BYTES = 2**30


class FilesScorer:
    """A scorer on the examples of files, named after the library that it uses.

    Args:
        library: name of the library.
        wanted: paths of the files.
        check: raises for a file that cannot be read.
        score: returns a model's scores on the files.
    """

    def __init__(
        self,
        library: str,
        wanted: Sequence[str],
        check: Callable[[Path], object],
        score: Callable[[Path, Sequence[Path]], Scores],
    ) -> None:
        self._files = [Path(each) for each in wanted]
        self._library = library
        self.name = f"{library}:{','.join(map(str, self._files))}"
        self._check, self._score = check, score

    @property
    def key(self) -> str:
        return f"{self.name} {version(self._library)} {digest_of(self._files)}"

    def check(self) -> None:
        for file in self._files:
            self._check(file)

    def score(self, model: Path) -> Scores:
        with quiet(import_module("transformers")):
            return self._score(model, self._files)


def digest_of(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of some files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(read_regular(path, _MOST_BYTES)).digest())
    return found.hexdigest()


def read_columns(path: Path, choices: Collection[tuple[str, ...]]) -> dict[str, list[Any]]:
    """Return the columns that a scorer needs.

    Args:
        path: a `.jsonl` or `.ndjson` file with one object a line; any other file is read as CSV.
        choices: sets of columns; the first set that the file has is read.
    """
    try:
        text = read_regular(path, _MOST_BYTES).decode()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8: convert it") from error
    try:
        if path.suffix in (".jsonl", ".ndjson"):
            rows = [dict(json.loads(line)) for line in text.splitlines() if line.strip()]
        else:
            rows = [dict(row) for row in csv.DictReader(StringIO(text))]
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"{path} is neither CSV with a head line nor JSON lines: {error}"
        ) from error
    there = list(rows[0]) if rows else []
    for columns in choices:
        if rows and set(columns) <= set(there):
            if any(row.get(name) is None for row in rows for name in columns):
                raise InputError(f"{path} has rows without {' or '.join(columns)}: complete them")
            return {name: [row[name] for row in rows] for name in columns}
    wanted = "; or ".join(", ".join(columns) for columns in choices)
    has = f"the columns {', '.join(map(str, there))}" if rows else "no rows"
    raise InputError(f"{path} has {has}: name its columns {wanted}")
