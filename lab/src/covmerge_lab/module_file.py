"""Files of pickled modules: their tensors are read, and nothing that they name is imported or run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import safetensors.torch
from torch import Tensor

from covmerge import open_checkpoint
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.unpickler import Inert, Laid, origin_of, whole_booleans

_MAX_DEPTH = 100  # of modules in modules
_MAX_TENSORS = 300_000
_MOST_TIMES = 16  # tensors may share a storage
_SAVE_AGAIN = "load it where you trust it, and save its state dict with safetensors.torch.save_file"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `covmerge` opens, or of a pickled module.

    Raises:
        CheckpointError: it is neither.
    """
    try:
        with closing(open_checkpoint(path)) as opened:
            return {name: opened.read(name) for name in opened.headers}
    except CheckpointError as refusal:
        try:
            return read_module(path)
        except CheckpointError as error:
            raise CheckpointError(f"{refusal}. As a module: {error}") from error


def read_module(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled module.

    It is a file of `torch.save(module)`, of any version, or of `pickle.dump`. The tree of modules has the
    tensors, under the names of a state dict.

    Raises:
        CheckpointError: it holds something else, is damaged, or promises more than it holds.
    """
    laid = _tensors(load_records(path), str(path))
    size, made = path.stat().st_size, sum(_nbytes(own) for own in laid.values())
    if made > _MOST_TIMES * size:
        raise CheckpointError(f"{path} has {size} bytes, and its tensors {made}: {_SAVE_AGAIN}")
    found = {name: own.tensor() for name, own in laid.items()}
    return {name: whole_booleans(tensor, f"{path}: '{name}'") for name, tensor in found.items()}


def as_weights(path: Path, cache: Path) -> Path:
    """Return a path that `covmerge` opens: it, or a copy of its tensors in a folder of its own.

    Raises:
        CheckpointError: it is neither weights nor a pickled module.
    """
    try:
        open_checkpoint(path).close()
    except CheckpointError:
        if not path.is_file():
            raise
        stamp = path.stat()
        known = f"{path.resolve()} {stamp.st_size} {stamp.st_mtime_ns}"
        out = cache / "modules" / f"{sha256(known.encode()).hexdigest()[:16]}.safetensors"
        if not out.exists():
            save_weights(read_weights(path), out)
        return out
    return path


def save_weights(tensors: dict[str, Tensor], out: Path) -> None:
    """Write safetensors, whole or not at all."""
    saving: Any = safetensors.torch  # its annotations are partial
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        saving.save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _nbytes(laid: Laid) -> int:
    return math.prod(laid.shape) * laid.dtype.itemsize


def _tensors(records: object, where: str) -> dict[str, Laid]:
    found: dict[str, Laid] = {}
    if "_modules" not in _state(records):
        raise CheckpointError(f"{where} holds a {origin_of(records)}, not a module")
    for name, value in _named(records, where):
        if name in found:
            raise CheckpointError(f"{where} has two tensors '{name}': {_SAVE_AGAIN}")
        if not isinstance(value, Laid):
            raise CheckpointError(
                f"{where}: '{name}' is a {origin_of(value)}, not a plain tensor: {_SAVE_AGAIN}"
            )
        found[name] = value
    if not found:
        raise CheckpointError(f"{where} holds a module without tensors: is it the right file?")
    return found


def _named(root: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield parameters and buffers of a module and of those in it, named as in its state dict."""
    waiting, met = [("", root, 0)], 0
    while waiting:
        prefix, module, depth = waiting.pop()
        state = _state(module)
        if "_modules" not in state:
            raise CheckpointError(
                f"{where}: '{prefix[:-1]}' is a {origin_of(module)}, which is stored as no module is: "
                f"{_SAVE_AGAIN}"
            )
        parameters, buffers, modules = (
            _items(state.get(part), where) for part in ("_parameters", "_buffers", "_modules")
        )
        met += 1 + len(parameters) + len(buffers) + len(modules)
        # One module may be in many, and in itself.
        if depth > _MAX_DEPTH or met > _MAX_TENSORS:
            raise CheckpointError(
                f"{where}: modules in modules without end at '{prefix}': {_SAVE_AGAIN}"
            )
        skipped = _left_out(state)
        kept = ((name, item) for name, item in buffers.items() if name not in skipped)
        for name, item in (*parameters.items(), *kept):
            if item is not None:
                yield f"{prefix}{name}", item
        inner = [
            (f"{prefix}{n}.", item, depth + 1) for n, item in modules.items() if item is not None
        ]
        waiting += reversed(inner)


def _items(content: object, where: str) -> Mapping[str, object]:
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{where} has a {origin_of(content)} for a dict of tensors: {_SAVE_AGAIN}"
        )
    named = cast("Mapping[object, object]", content)
    stray = next((name for name in named if not isinstance(name, str)), None)
    if stray is not None:
        raise CheckpointError(f"{where} has the key {stray!r}: tensors are named by strings")
    return cast("Mapping[str, object]", named)


def _state(value: object) -> Mapping[object, object]:
    state = value.state if isinstance(value, Inert) else None
    return cast("Mapping[object, object]", state) if isinstance(state, Mapping) else {}


def _left_out(state: Mapping[object, object]) -> set[object]:
    """Names of the buffers that a state dict does not have. A set is pickled as a call of `set`."""
    found = state.get("_non_persistent_buffers_set")
    if isinstance(found, Inert) and found.args and isinstance(found.args[0], list):
        return {item for item in cast("list[object]", found.args[0]) if isinstance(item, str)}
    return cast("set[object]", found) if isinstance(found, set) else set()
