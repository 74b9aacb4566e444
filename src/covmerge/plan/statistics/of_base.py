"""What a base's layers see, made by a merge itself: the base is run once on inputs that are drawn.

That is nobody's data, and the same for the same base: it is kept in the user's cache folder, which may be
deleted at any time.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import time
import warnings
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from covmerge.base import code
from covmerge.base.cache import user_cache
from covmerge.base.errors import CovmergeError, InputError
from covmerge.files.checkpoints import Checkpoint
from covmerge.files.stores.disk import disk_errors
from covmerge.files.stores.lock import Lock, TakenError
from covmerge.files.stores.regular_file import pieces, reading
from covmerge.files.tensors.skeleton import in_short
from covmerge.plan.statistics.collect import Progress, collect
from covmerge.plan.statistics.examples import MADE
from covmerge.plan.statistics.file import SUFFIX, StatisticsFile, probe
from covmerge.plan.statistics.generated import Generated
from covmerge.plan.statistics.model import require_transformers
from covmerge.plan.statistics.needed import check_disk, check_memory, disk_needed, memory_by_block

DRAWN = Generated("random")
HOW = f"{MADE} random inputs through the base"

# Of all files together, the latest used; beyond it only what may be in use.
_KEPT_BYTES = 16 * 2**30
_IN_USE = 24 * 3600.0  # seconds for which a merge may need a file that it began with
_LOOKS_EVERY = 0.5  # seconds
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
    path = _path(base, device)
    if _is_whole(path, base):
        return BaseInputs(path, None)
    folder = path.parent
    with disk_errors(folder):
        lock = _alone(folder / f".making-{path.name.removesuffix(SUFFIX)}", base)
    try:
        if _is_whole(path, base):
            return BaseInputs(path, None)
        return _made(base, path, device, max_memory, progress)
    finally:
        with suppress(OSError):  # the cache may be deleted at any time
            lock.remove_folder()
        lock.release()


def is_made(base: Checkpoint, device: torch.device) -> bool:
    """Whether an earlier run has made them, so that `base_inputs` needs room for nothing.

    Args:
        base: as of `base_inputs`; of a repository that is not fetched yet it is not known, and False.
        device: likewise.
    """
    if base.folder is None:
        return False
    try:
        require_transformers()
        path = _path(base, device)
    except InputError:  # nor is there a folder to keep the file in
        return False
    return _is_whole(path, base)


def _made(
    base: Checkpoint,
    path: Path,
    device: torch.device,
    max_memory: int | None,
    progress: Progress | None,
) -> BaseInputs:
    """Run a base, as the only process that does so for this file."""
    folder = path.parent
    check_disk(disk_needed(base), folder, "free some, or name another folder by COVMERGE_CACHE")
    check_memory(
        memory_by_block(base),
        max_memory,
        f"{HOW} ({base.source})",
        "collect them on a larger machine (covmerge collect BASE OUT --inputs random) and name that file, "
        "or leave out --base-stats random",
    )
    with disk_errors(folder):
        path.unlink(missing_ok=True)  # it is not whole
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


def _is_whole(path: Path, base: Checkpoint) -> bool:
    """Whether the file is there, of this base, and as it was written, so that it may be used.

    The use is noted beside it and not on it: a merge that reads it now would find that it changed.
    """
    try:
        with closing(StatisticsFile.open(path)) as file:
            file.check_model("the base", base)
            file.check_content()
    except InputError:
        return False
    with suppress(OSError):  # a cache that may be read and not written
        _used(path).touch()
    return True


def _used(path: Path) -> Path:
    """What has the time of a file's last use."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".used")


def _alone(folder: Path, base: Checkpoint) -> Lock:
    """Wait until no other process makes the same file; who comes later waits for this one."""
    said = False
    while True:
        try:
            return Lock(folder)
        except TakenError:
            if not said:
                warnings.warn(
                    f"another process runs {base.source} on random inputs: this one waits for it",
                    stacklevel=1,
                )
                said = True
            time.sleep(_LOOKS_EVERY)


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


def _path(base: Checkpoint, device: torch.device) -> Path:
    """Where the file of a base is kept, or will be."""
    return kept_in() / f"{_key(base, device)}{SUFFIX}"


def _key(base: Checkpoint, device: torch.device) -> str:
    """What decides the bytes of the file: the base, how it is run, and by which code."""
    transformers = importlib.import_module("transformers")
    known = [
        probe(base),
        base.config,
        _beside(base.folder),
        repr(DRAWN),
        code.digest(importlib.import_module("covmerge.plan.statistics")),
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
            with reading(path), path.open("rb") as file:
                for piece in pieces(file):
                    digest.update(piece)
            found[path.name] = digest.hexdigest()
    return found


def _make_room(folder: Path, newest: Path) -> None:
    """Delete what has not been used for longest, beyond what is kept."""
    now = time.time()
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another process deletes too
            status = path.stat()
            used = _used(path)
            last = max(status.st_mtime, used.stat().st_mtime if used.exists() else 0.0)
            found.append((now - last, status.st_size, path))
    total = 0
    for age, size, path in sorted(found):
        total += size
        if total > _KEPT_BYTES and path != newest and age > _IN_USE:
            with suppress(OSError):  # it is another user's, or open on Windows
                path.unlink(missing_ok=True)
                _used(path).unlink(missing_ok=True)
