"""One file of `torch.save`, never unpickled beyond what `weights_only` allows."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, cast

import torch
from torch import Tensor

from covmerge.checkpoints.base import check_unchanged, copy_rows, find_header, header_of, stamp_of
from covmerge.checkpoints.regular_file import open_regular
from covmerge.errors import CheckpointError
from covmerge.types import TensorHeader

_WRAPPERS = ("state_dict", "model", "module")
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_LEGACY_BYTES = 4 * 2**30
_MAX_PICKLE_BYTES = 100_000_000
_MAX_STEPS = 2_000_000  # a tensor takes 40
_LEGACY_PICKLES = 5  # a mark, a version, the machine, the state dict, the keys of its storages
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_SAVE_AGAIN = "load it where you trust it, and save its state dict with safetensors.torch.save_file"


class TorchFile:
    """A `.bin`, `.pt`, `.pth` or `.ckpt` file that holds a state dict.

    The tensors are memory-mapped. Files older than torch 1.6 cannot be, and are loaded whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded, loading = _load(path)
        tensors, unwrapping = _state_dict(loaded, str(path))
        self.notes = loading + unwrapping
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: header_of(name, tensor, str(path)) for name, tensor in tensors.items()}
        )
        status = path.stat()
        self._stamp = stamp_of(status)
        _check_sizes(self.headers, path, status.st_size)
        self._tensors = tensors

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        # A map of a file that was cut short kills the process, so this is asked before, not after.
        check_unchanged(self.path, self._stamp, stamp_of(self.path.stat()))
        return copy_rows(self._tensors[name], rows)

    def close(self) -> None:
        """Unmap the file."""
        self._tensors = {}


def _load(path: Path) -> tuple[object, tuple[str, ...]]:
    try:
        with open_regular(path) as file:
            magic = file.read(len(_ZIP_MAGIC))
            size = file.seek(0, 2)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if magic == b"vers":
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"
        )
    notes: tuple[str, ...] = ()
    if magic == _ZIP_MAGIC:
        _check_archive(path)
    elif size > _MAX_LEGACY_BYTES:
        raise CheckpointError(
            f"{path} is {size} bytes in torch's format from before 1.6, which has to be loaded "
            f"whole, and the most that is loaded so is {_MAX_LEGACY_BYTES}: {_SAVE_AGAIN}"
        )
    else:
        with open_regular(path) as file:
            _check_steps(file, path, _LEGACY_PICKLES)
        notes = (f"{path} is in torch's format from before 1.6: all {size} bytes are in memory",)
    try:
        loaded: object = torch.load(
            path, map_location="cpu", weights_only=True, mmap=magic == _ZIP_MAGIC
        )
    except Exception as error:  # hostile bytes make the unpickler raise anything
        raise _refusal(path, error) from error
    return loaded, notes


def _check_archive(path: Path) -> None:
    """Check what torch takes for granted about its own zip files before it maps one."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_entries(archive, path)
    except CheckpointError:
        raise
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path} is a damaged archive ({error}): the download was probably cut short, fetch "
            "the file again"
        ) from error


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise CheckpointError(f"{path} is TorchScript, which is code: {_SAVE_AGAIN}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{path} holds the compressed entry {entry.filename!r}, which torch would map as "
                f"if it were tensors: {_SAVE_AGAIN}"
            )
        if entry.filename.endswith("/data.pkl") and entry.file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{path} describes its tensors in {entry.file_size} bytes, and the most that is "
                f"read is {_MAX_PICKLE_BYTES}: {_SAVE_AGAIN}"
            )
        if entry.filename.endswith("/data.pkl"):
            with archive.open(entry) as description:
                _check_steps(description, path)


def _check_steps(pickled: IO[bytes], path: Path, pickles: int = 1) -> None:
    """Count the steps of pickles, each of which may make an object; nothing is made here."""
    steps = 0
    # What is no pickle is left to torch to refuse.
    with suppress(ValueError, MemoryError):
        for _ in range(pickles):
            for _ in pickletools.genops(pickled):
                steps += 1
                if steps > _MAX_STEPS:
                    break
    if steps > _MAX_STEPS:
        raise CheckpointError(
            f"{path} describes its tensors in more than {_MAX_STEPS} steps, which is far more than "
            f"any model needs: {_SAVE_AGAIN}"
        )


def _refusal(path: Path, error: Exception) -> CheckpointError:
    found = _REFUSED_GLOBAL.search(str(error))
    if found:
        return CheckpointError(
            f"{path} holds more than tensors: loading it would run {found[1]}, and code in a "
            f"checkpoint is never run. If it is a whole module or a training state, {_SAVE_AGAIN}"
        )
    reason = (str(error).strip().splitlines() or [""])[-1]
    return CheckpointError(
        f"{path} cannot be loaded as tensors ({type(error).__name__}: {reason}): fetch the file "
        f"again, or {_SAVE_AGAIN}"
    )


def _state_dict(loaded: object, where: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Find the dict of tensors: the file itself, or one of the usual keys of a training state."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(loaded).__name__}, not a dict of tensors: {_SAVE_AGAIN}"
        )
    content = cast("Mapping[object, object]", loaded)
    if _all_tensors(content):
        return cast("dict[str, Tensor]", dict(content)), ()
    found = [key for key in _WRAPPERS if content.get(key) and _all_tensors(content[key])]
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds several state dicts ({', '.join(found)}): save the one to merge by "
            "itself"
        )
    if not found:
        key, value = next((k, v) for k, v in content.items() if not isinstance(v, Tensor))
        raise CheckpointError(
            f"{where}: {key!r} is a {type(value).__name__}, not a tensor, and none of "
            f"{', '.join(_WRAPPERS)} holds a dict of tensors only: {_SAVE_AGAIN}"
        )
    others = ", ".join(sorted(repr(key) for key in content if key != found[0]))
    left = f"; not read: {others}" if others else ""
    note = f"{where}: the tensors are those under '{found[0]}'{left}"
    return cast("dict[str, Tensor]", dict(cast("Mapping[str, object]", content[found[0]]))), (note,)


def _all_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, Tensor) for item in cast("Mapping[object, object]", value).values()
    )


def _check_sizes(headers: Mapping[str, TensorHeader], path: Path, size: int) -> None:
    # A stride of 0 lets one stored number pass for a tensor of any size, which a read would copy.
    for header in headers.values():
        if header.nbytes > size:
            raise CheckpointError(
                f"{path}: '{header.name}' of shape {list(header.shape)} takes {header.nbytes} "
                f"bytes, and the whole file has {size}: {_SAVE_AGAIN}"
            )
