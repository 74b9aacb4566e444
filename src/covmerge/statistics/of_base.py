"""What a base's layers see, made by a merge itself: the base is run once on inputs that are drawn.

That is nobody's data, and the same for the same base: it is kept in the user's cache folder, which may be
deleted at any time.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from covmerge import code
from covmerge.cache import user_cache
from covmerge.checkpoints import Checkpoint
from covmerge.errors import CovmergeError, InputError
from covmerge.statistics.collect import Progress, collect
from covmerge.statistics.examples import MADE
from covmerge.statistics.file import SUFFIX, StatisticsFile, probe
from covmerge.statistics.generated import Generated
from covmerge.statistics.model import require_transformers
from covmerge.statistics.needed import check_disk, check_memory, disk_needed, memory_by_block
from covmerge.stores.disk import disk_errors
from covmerge.tensors.skeleton import in_short

DRAWN = Generated("random")
HOW = f"{MADE} random inputs through the base"

_KEPT_BYTES = 16 * 2**30  # of all files together, the latest used
_READ_FROM = frozenset({".json", ".model", ".txt", ".tiktoken"})


@dataclass(frozen=True)
class BaseInputs:
    """The statistics of a base, made or found.

    Attributes:
        path: the file.
        seconds: that making it took; None: an earlier run had made it.
        notes: what a user should know.
    """

    path: Path
    seconds: float | None
    notes: tuple[str, ...] = ()


def base_inputs(
    base: Checkpoint,
    *,
    device: torch.device,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> BaseInputs:
    """Run a base on inputs that are drawn, unless that was done before, and return what its layers saw.

    Args:
        base: a folder, or a repository of the Hub.
        device: where it runs.
        max_memory: bytes that the process may take; None: what the machine has free.
        progress: called for every batch.

    Raises:
        InputError: transformers cannot run it, or there is no folder to keep the file in.
        ResourceError: it does not fit the memory or the disk.
    """
    require_transformers()
    base.materialize()
    folder = kept_in()
    path = folder / f"{_key(base, device)}{SUFFIX}"
    with suppress(InputError):  # not there, or not whole
        StatisticsFile.open(path).close()
        with suppress(OSError):  # a cache that may be read and not written
            os.utime(path)
        return BaseInputs(path, None)
    check_disk(disk_needed(base), folder, "free some, or name another folder by COVMERGE_CACHE")
    check_memory(
        memory_by_block(base),
        max_memory,
        f"{HOW} ({base.source})",
        "collect them on a larger machine (covmerge collect BASE OUT --inputs random) and name that file, "
        "or leave out --base-stats random",
    )
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    try:
        made = collect(
            base,
            DRAWN,
            path,
            device=device,
            max_memory=max_memory,
            progress=progress,
            overwrite=True,
        )
    except CovmergeError:
        raise
    except Exception as error:  # a stranger's model and tokenizer can make it fail in any way
        raise InputError(f"{base.source} cannot be run: {in_short(error)}") from error
    _make_room(folder, path)
    return BaseInputs(path, made.seconds, made.notes)


def kept_in() -> Path:
    """Return the folder of what is kept, which need not exist.

    Raises:
        InputError: there can be none.
    """
    try:
        return user_cache() / "base-inputs"
    except RuntimeError as error:
        raise InputError(
            "there is no folder to keep the base's inputs in: name one by COVMERGE_CACHE"
        ) from error


def _key(base: Checkpoint, device: torch.device) -> str:
    """What decides the bytes of the file: the base, how it is run, and by which code."""
    transformers = importlib.import_module("transformers")
    known = [
        probe(base),
        base.config,
        _beside(base.folder),
        repr(DRAWN),
        code.digest(importlib.import_module("covmerge.statistics")),
        transformers.__version__,
        torch.__version__,
        device.type,
        torch.get_num_threads(),
    ]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode())
    return digest.hexdigest()[:32]


def _beside(folder: Path | None) -> dict[str, str]:
    """Hashes of what tokenizers and preprocessors are read from, which decide what is drawn."""
    found: dict[str, str] = {}
    for path in () if folder is None else folder.iterdir():
        if path.suffix in _READ_FROM and path.is_file():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
            found[path.name] = digest.hexdigest()
    return found


def _make_room(folder: Path, newest: Path) -> None:
    """Delete what has not been used for longest, beyond what is kept."""
    by_age = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime)
    total = newest.stat().st_size
    for path in by_age:
        if path != newest:
            total += path.stat().st_size
            if total > _KEPT_BYTES:
                path.unlink(missing_ok=True)
