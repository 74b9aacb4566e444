"""A merged model that is inspected: an output of covmerge, under the names of its base."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint
from covmerge.files.quantised.view import open_plain


@contextmanager
def open_merged(folder: Path, base: Checkpoint) -> Generator[Checkpoint]:
    """Open an output, and close it at the end.

    Raises:
        InputError: it cannot be opened.
    """
    output = open_plain(folder)
    if isinstance(output, AdapterCheckpoint) and output.form != PEFT_FORM:
        output = output.named_as(base.headers)
    try:
        yield output
    finally:
        output.close()
