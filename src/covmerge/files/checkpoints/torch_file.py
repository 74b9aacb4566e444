"""A file of `torch.save`, unpickled only as far as `weights_only` allows."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import (
    check_unchanged,
    copy_rows,
    find_header,
    header_of,
    tensor_name,
)
from covmerge.files.checkpoints.pickle_bounds import (
    SAVE_AGAIN,
    ZIP_MAGIC,
    check_archive,
    check_steps,
    check_whole,
)
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.unpickler import Laid, LaidPart, origin_of
from covmerge.files.stores.regular_file import open_regular
from covmerge.files.stores.store import stamp_of

_USUAL = ("state_dict", "model", "module", "model_state_dict")
_LEGACY_PICKLES = 5  # a magic number, a version, the machine, the state dict, its storages' keys
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class NotLoadedError(CheckpointError):
    """A file that torch does not load with `weights_only`."""


class TorchFile:
    """A `.bin`, `.pt`, `.pth` or `.ckpt` file with a state dict.

    The tensors are memory-mapped. Files from before torch 1.6 cannot be mapped and are loaded whole.
    """

    settings: Mapping[str, Any] | None = None

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
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        # A mapped file that was cut short would kill the process, so check before reading.
        check_unchanged(self.path, self._stamp, stamp_of(self.path.stat()))
        return copy_rows(self._tensors[name], rows)

    def close(self) -> None:
        """Release the map of the file."""
        self._tensors = {}


def _load(path: Path) -> tuple[object, tuple[str, ...]]:
    try:
        with open_regular(path) as file:
            magic = file.read(len(ZIP_MAGIC))
            size = file.seek(0, 2)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if magic == b"vers":
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"
        )
    notes: tuple[str, ...] = ()
    if magic == ZIP_MAGIC:
        _check_archive(path)
    else:
        check_whole(size, str(path))
        with open_regular(path) as file:
            check_steps(file, str(path), _LEGACY_PICKLES)
        notes = (f"{path} is in torch's format from before 1.6: all {size} bytes are in memory",)
    try:
        loaded: object = torch.load(
            path, map_location="cpu", weights_only=True, mmap=magic == ZIP_MAGIC
        )
    except Exception as error:  # hostile bytes make the unpickler raise anything
        raise _refusal(path, error) from error
    return loaded, notes


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, str(path))
    except CheckpointError:
        raise
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path} is a damaged archive ({error}): the download was probably cut short, fetch "
            "the file again"
        ) from error


def _refusal(path: Path, error: Exception) -> NotLoadedError:
    found = _REFUSED_GLOBAL.search(str(error))
    if found:
        return NotLoadedError(
            f"{path} holds more than tensors: loading it would run {found[1]}, and code in a "
            "checkpoint is never run. If it is a whole module, save it by torch.save(module.state_dict(), "
            "FILE) where its code is; if it is a training state, "
            f"{SAVE_AGAIN}"
        )
    reason = (str(error).strip().splitlines() or [""])[-1]
    return NotLoadedError(
        f"{path} cannot be loaded as tensors ({type(error).__name__}: {reason}): fetch the file "
        f"again, or {SAVE_AGAIN}"
    )


def _state_dict(loaded: object, where: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the dict of tensors: the file's content, or one entry of a training state; and notes."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(loaded).__name__}, not a dict of tensors: {SAVE_AGAIN}"
        )
    content, notes = _of_state(cast("Mapping[object, object]", loaded), Tensor, where)
    if not _all(content, Tensor):
        key, value = next((k, v) for k, v in content.items() if not isinstance(v, Tensor))
        raise CheckpointError(
            f"{where}: {key!r} is a {type(value).__name__}, not a tensor, and no key of it holds a dict of "
            f"tensors only: {SAVE_AGAIN}"
        )
    return cast("dict[str, Tensor]", dict(content)), notes


def _of_state(
    content: Mapping[object, object], kind: type, where: str
) -> tuple[Mapping[object, object], tuple[str, ...]]:
    """Return the weights in a training state with a note, or the whole content if it has no weights.

    If there are several dicts of tensors, the one under a usual key has the model's weights. A dict
    under another key counts only if it is the only one. `kind` is the class of the file's tensors.

    Raises:
        CheckpointError: there are several dicts, and no key tells which one has the model's weights.
    """
    if _all(content, kind):
        return content, ()
    held = [key for key, value in content.items() if _all(value, kind) and value]
    found = [key for key in _USUAL if key in held]
    # Tensors beside a dict of tensors, or another object under a usual key, may be the model's weights.
    plain = not any(isinstance(value, kind) for value in content.values())
    if plain and not any(isinstance(content.get(key), Mapping) for key in _USUAL):
        found = held
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds several state dicts ({', '.join(map(str, found))}): save the one to merge by "
            "itself"
        )
    if not found:
        return content, ()
    names = cast("Mapping[object, object]", content[found[0]])
    rest = {key: value for key, value in content.items() if key != found[0]}
    left = f"; not read: {', '.join(sorted(map(repr, rest)))}" if rest else ""
    note = f"{where}: the tensors are those under '{found[0]}'{left}"
    if other := next(_weights_of(names, rest, kind), None):
        note += (
            f". Other weights of the same names are under '{other}', such as an average: to merge those, "
            "save them by themselves"
        )
    return names, (note,)


def _all(value: object, kind: type) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, kind) for item in cast("Mapping[object, object]", value).values()
    )


def _weights_of(
    names: Mapping[object, object], value: object, kind: type, depth: int = 3
) -> Iterator[str]:
    """Yield the keys, joined by `/`, of other dicts of tensors with the same names."""
    if not isinstance(value, Mapping):
        return
    for key, held in cast("Mapping[object, object]", value).items():
        if _all(held, kind) and names.keys() <= cast("Mapping[object, object]", held).keys():
            yield str(key)
        elif depth > 1:
            yield from (f"{key}/{more}" for more in _weights_of(names, held, kind, depth - 1))


def _check_sizes(headers: Mapping[str, TensorHeader], path: Path, size: int) -> None:
    # A stride of 0 makes one stored number look like a tensor of any size, which a read would copy.
    for header in headers.values():
        if header.nbytes > size:
            raise CheckpointError(
                f"{path}: '{header.name}' of shape {list(header.shape)} takes {header.nbytes} "
                f"bytes, and the whole file has {size}: {SAVE_AGAIN}"
            )


# A file with a pickled dict of tensors that torch does not load with `weights_only`.
#
# `torch.save(state, file, pickle_protocol=4)` and `pickle.dump(state, file)` write such files, and
# so do training scripts that save their arguments (argparse, OmegaConf) beside the weights.


class PickledTensors:
    """A dict of tensors, or a training state with one, read without running what the pickle names.

    Files that are not zip archives are held in memory as a whole.
    """

    settings: Mapping[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        stamp = stamp_of(path.stat())
        records, notes = load_records(path), tuple[str, ...]()
        if isinstance(records, Mapping):
            records, notes = _of_state(cast("Mapping[object, object]", records), Laid, str(path))
        laid = tensors_of(records, str(path))
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: TensorHeader(name, one.shape, one.dtype) for name, one in laid.items()}
        )
        self._parts = {name: LaidPart(path, stamp, name, one) for name, one in laid.items()}
        self.notes = (
            f"{path} is a pickle: its tensors were read, and nothing that it names was run",
            *notes,
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._parts:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        return self._parts[name](rows)

    def close(self) -> None:
        """Release the tensors in memory."""
        self._parts = {}


def tensors_of(records: object, where: str) -> dict[str, Laid]:
    """Return the tensors of a pickled dict, by name."""
    if not isinstance(records, Mapping):
        raise CheckpointError(f"{where} holds a {origin_of(records)}, not a dict of tensors")
    found: dict[str, Laid] = {}
    for key, value in cast("Mapping[object, object]", records).items():
        name = tensor_name(key, where, f", {SAVE_AGAIN}")
        if not isinstance(value, Laid):
            raise CheckpointError(
                f"{where}: '{name}' is a {origin_of(value)}, not a plain tensor: {SAVE_AGAIN}"
            )
        found[name] = value
    if not found:
        raise CheckpointError(f"{where} holds a dict without tensors: is it the right file?")
    return found
