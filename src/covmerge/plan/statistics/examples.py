"""Examples for a model: texts from a file, or batches from a program."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import Tensor
from typing_extensions import TypedDict

from covmerge.base.errors import InputError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import counted
from covmerge.files.checkpoints.json_file import is_text, shorten, unique_keys
from covmerge.files.stores.regular_file import open_regular

Batch = Mapping[str, Tensor]
Examples = str | Path | Iterable[Batch]

MADE = 256  # number of examples that are made by default
AT_ONCE = 8  # number of examples in a batch by default
_MAX_LINE = 2**24  # characters of an example
_MAX_JSON = 2**26  # bytes of a list, which is read and parsed as a whole
_MOST_LABELS = 2**31
_LARGEST_LABEL = 1e38  # within the range of float32
_NUMBER = re.compile(r"\s*-?[0-9]{1,9}\s*")
_DECIMAL = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?\s*")
LABELS = "labels"  # key of the labels in a batch


class ReadingOptions(TypedDict, total=False):
    """The attributes of `Reading` as keyword arguments."""

    max_examples: int | None
    batch_size: int | None
    max_length: int | None
    tokenizer: str | Path | None
    text_column: str
    pair_column: str
    label_column: str


@dataclass(frozen=True)
class Reading:
    """How examples become batches.

    Attributes:
        max_examples: most examples to take; None: all, or 256 if they are made.
        batch_size: number of texts in a batch; None: 8, or for texts that a model writes, 32 or as
            many as fit into memory.
        max_length: number of tokens to which texts are cut; None: the model's limit.
        tokenizer: folder of the tokenizer; None: the model's.
        text_column: column, or JSON key, of the text.
        pair_column: column of a second text, if there is one.
        label_column: column of the label, if there is one: a number, or a name in the model's
            config.
    """

    max_examples: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    tokenizer: str | Path | None = None
    text_column: str = "text"
    pair_column: str = "text_pair"
    label_column: str = "label"

    def __post_init__(self) -> None:
        for name in ("max_examples", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: pass a positive number")

    @property
    def wanted(self) -> int:
        """Number of examples to make."""
        return self.max_examples or MADE

    @property
    def at_once(self) -> int:
        """Number of examples in a batch."""
        return self.batch_size or AT_ONCE


@dataclass(frozen=True)
class Text:
    """One example of a file; `pair` and `label` are None if the file has none."""

    text: str
    pair: str | None = None
    label: float | str | None = None
    where: str = field(default="", compare=False)


def read_texts(path: Path, reading: Reading) -> list[Text]:
    """Read texts from a file: one for each line (`.txt`), or in columns (`.jsonl`, `.json`, `.csv`).

    Empty lines and texts are skipped.
    """
    if path.suffix not in _READERS:
        raise InputError(
            f"{path} is no file of examples that covmerge reads ({', '.join(_READERS)}): convert it, "
            "or pass batches from Python"
        )
    with (
        _named_errors(path),
        TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file,
    ):
        records = _READERS[path.suffix](file)
        found = (_text(record, where, reading) for where, record in records)
        texts = list(islice((t for t in found if t.text.strip()), reading.max_examples))
    if not texts:
        raise InputError(f"{path} holds no text: pass a file with one example or more")
    return texts


@contextmanager
def _named_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error
    except InputError as error:
        raise InputError(f"{path}, {error}") from error


def _bounded(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raise if a line is so long that it could fill memory."""
    number = 1
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise InputError(
                f"line {number}: has more than {_MAX_LINE} characters: write shorter ones"
            )
        yield line
        number += 1


def _lines(file: TextIO) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_bounded(file), start=1):
        yield f"line {number}", line.rstrip("\r\n")


def _json_lines(file: TextIO) -> Iterator[tuple[str, object]]:
    for where, line in _lines(file):
        if str(line).strip():
            try:
                yield where, json.loads(str(line), object_pairs_hook=unique_keys(where))
            except ValueError as error:
                raise InputError(f"{where}: not JSON ({error})") from error


def _json(file: TextIO) -> Iterator[tuple[str, object]]:
    if os.fstat(file.fileno()).st_size > _MAX_JSON:
        raise InputError(
            f"the whole: has more than {_MAX_JSON} bytes: write .jsonl, a line for each example"
        )
    records: object = json.loads(file.read(), object_pairs_hook=unique_keys("the whole"))
    if not isinstance(records, list):
        raise InputError("the whole: a JSON list of texts or of objects is needed")
    for number, record in enumerate(cast("list[object]", records), start=1):
        yield f"entry {number}", record


def _csv(file: TextIO) -> Iterator[tuple[str, object]]:
    rows = csv.reader(_bounded(file))
    names: list[str] = next(rows, [""])
    filled = (row for row in rows if any(value.strip() for value in row))
    for number, row in enumerate(filled, start=1):
        if len(row) != len(names):
            raise InputError(
                f"row {number} has {counted(len(row), 'value')}, and the first line "
                f"{counted(len(names), 'name')}: correct it; a text with commas or quotes stands in quotes"
            )
        yield f"row {number}", dict(zip(names, row, strict=True))


_READERS = {".txt": _lines, ".jsonl": _json_lines, ".json": _json, ".csv": _csv}


def _text(record: object, where: str, reading: Reading) -> Text:
    if isinstance(record, str):
        return Text(_checked_text(record, where), where=where)
    if not isinstance(record, dict):
        raise InputError(f"{where} is {shorten(record)}, not a text or an object with one")
    columns = cast("dict[str, object]", record)
    if reading.text_column not in columns:
        raise InputError(
            f"{where} has no '{reading.text_column}'."
            + did_you_mean(reading.text_column, [str(key) for key in columns])
            + f" Name the column of the text with {Hint('text_column')}"
        )
    text = columns[reading.text_column]
    pair, label = columns.get(reading.pair_column), columns.get(reading.label_column)
    if not isinstance(label, int | float | str | None):
        raise InputError(f"{where}: the label {shorten(label)} is neither a number nor a name")
    second = None if pair is None else _checked_text(pair, where)
    return Text(_checked_text(text, where), second, label, where)


def _checked_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where}: {shorten(text)} is no text: correct it, or leave it out")
    if not is_text(text):
        raise InputError(
            f"{where}: {shorten(text)} holds half of a surrogate pair, which is not valid Unicode: "
            "correct it"
        )
    return text


def tokenized(
    texts: Sequence[Text], tokenizer: Any, config: Any, reading: Reading, *, labels: bool
) -> Iterator[Batch]:
    """Yield batches of a tokenizer's tensors, padded to the longest text of each batch.

    If labels are asked for and every text of a batch has one, they become `labels`.
    """
    limit = reading.max_length or longest_text(tokenizer, config)
    paired = any(text.pair is not None for text in texts)
    for start in range(0, len(texts), reading.at_once):
        part = texts[start : start + reading.at_once]
        batch: dict[str, Tensor] = dict(
            tokenizer(
                [text.text for text in part],
                [text.pair or "" for text in part] if paired else None,
                padding=len(part) > 1,
                truncation=limit is not None,
                max_length=limit,
                return_tensors="pt",
            )
        )
        if labels and all(text.label is not None for text in part):
            batch[LABELS] = torch.tensor([_label_of(text, config) for text in part])
        yield batch


def longest_text(tokenizer: Any, config: Any) -> int | None:
    """Return the model's limit of tokens, or None; tokenizers without a limit state 10³⁰."""
    positions = getattr(config, "max_position_embeddings", None)
    # A truth value is an int in Python.
    limits = [n for n in (tokenizer.model_max_length, positions) if type(n) is int and n > 0]
    return min(limits) if limits and min(limits) < 2**31 else None


def _label_of(text: Text, config: Any) -> float:
    """Return a label as a number for the model: a class, or the target of a regression."""
    label = text.label
    one_number = getattr(config, "num_labels", None) == 1
    if isinstance(label, str) and one_number:  # a CSV file contains only texts
        label = float(label) if _DECIMAL.fullmatch(label) else nan
    if isinstance(label, str):
        known: dict[str, int] = getattr(config, "label2id", None) or {}
        if label in known:
            return known[label]
        if not _NUMBER.fullmatch(label):
            raise InputError(
                f"{text.where}: the label '{label}' is not in the model's config."
                + did_you_mean(label, known)
            )
        return int(label)
    most = _LARGEST_LABEL if one_number else _MOST_LABELS
    # A truth value is an int in Python; NaN fails the comparison.
    if label is not None and not isinstance(label, bool) and abs(label) < most:
        if one_number:
            return float(label)
        if label == int(label):
            return int(label)
    wanted = "a finite number" if one_number else "the whole number of a class, or its name"
    raise InputError(
        f"{text.where}: the label {shorten(text.label)} is not {wanted}: correct it, or take the "
        f"model's own labels ({Hint('labels', 'model')})"
    )


def checked(batches: Iterable[Batch], max_examples: int | None) -> Iterator[Batch]:
    """Yield checked batches; the last one is cut to the number of examples asked for."""
    left = max_examples
    for number, batch in enumerate(batches, start=1):
        if left == 0:
            return
        _check_batch(batch, number)
        size = size_of(batch)
        if left is not None:
            size = min(size, left)
            left -= size
        yield {name: tensor[:size] for name, tensor in batch.items()}


def size_of(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return len(next(iter(batch.values())))


def single(batch: Batch) -> Iterator[Batch]:
    """Yield each example of a batch as a batch of one."""
    for index in range(size_of(batch)):
        yield {name: tensor[index : index + 1] for name, tensor in batch.items()}


def masks_of(batch: Batch) -> list[Tensor]:
    """Return the padding masks of a batch as booleans `(batch, sequence)`."""
    return [
        mask.bool()
        for name, mask in batch.items()
        if name in ("attention_mask", "decoder_attention_mask") and mask.ndim == 2
    ]


def _check_batch(batch: object, number: int) -> None:
    tensors = dict(cast("Batch", batch)) if isinstance(batch, Mapping) else {}
    sizes = {
        len(value) if isinstance(value, Tensor) and value.ndim else 0
        for value in cast("dict[str, object]", tensors).values()
    }
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(
            f"batch {number} is no mapping from names of inputs to tensors of one first axis, the "
            "examples: pass what the model takes, such as {'input_ids': ..., 'attention_mask': ...}"
        )
