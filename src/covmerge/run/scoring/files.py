"""Examples of a file: CSV with a head line, or JSON lines; and transformers without its reports."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.files.stores.regular_file import read_regular

_MOST_BYTES = 2**30


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Keep transformers from reporting every model that it loads, and from drawing bars."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def digest_of(paths: Iterable[Path]) -> str:
    """Return a hash of the content of some files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(read_regular(path, _MOST_BYTES)).digest())
    return found.hexdigest()


def read_columns(path: Path, choices: Collection[tuple[str, ...]]) -> dict[str, list[Any]]:
    """Return the columns that a scorer needs.

    Args:
        path: `.csv`, or `.jsonl` with one object a line.
        choices: sets of columns; the first one that the file has is read.
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
