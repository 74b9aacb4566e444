"""One file of a pickled module, of which only the tensors are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import check_name, check_unchanged, find_header
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.laid import Laid
from covmerge.files.checkpoints.layout import MAX_TENSORS
from covmerge.files.checkpoints.pickle_bounds import SAVE_AGAIN
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.unpickler import Inert, Sealed
from covmerge.files.stores.store import Stamp, stamp_of

_MAX_DEPTH = 100  # of modules in modules


class ModuleFile:
    """A file of `torch.save(module)`, of any version, or of `pickle.dump` of a module or a state dict.

    The tree of modules has the tensors, under the names of a state dict. Files that are no zip are in
    memory as a whole.
    """

    settings: Mapping[str, Any] | None = None

    def __init__(self, path: Path, stamp: Stamp, records: object) -> None:
        self.path = path
        self._stamp = stamp
        self._laid = _tensors(records, str(path))
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: TensorHeader(name, laid.shape, laid.dtype) for name, laid in self._laid.items()}
        )
        kind = f"a module of class {records.origin}" if isinstance(records, Inert) else "a dict"
        self.notes = (
            f"{path} is a pickle of {kind}: its tensors were read, and nothing that it names was run",
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._laid:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        check_unchanged(self.path, self._stamp, stamp_of(self.path.stat()))
        tensor = self._laid[name].tensor(rows)
        if (
            tensor.dtype is torch.bool
            and tensor.numel()
            and int(tensor.view(torch.uint8).max()) > 1
        ):
            raise CheckpointError(
                f"{self.path}: '{name}' holds bytes other than 0 and 1, and is of bool: {SAVE_AGAIN}"
            )
        return tensor

    def close(self) -> None:
        """Let go of what is in memory."""
        self._laid = {}


def open_module(path: Path) -> ModuleFile:
    """Open a pickled module, or a dict of tensors alone.

    Raises:
        CheckpointError: it holds something else, is damaged, or promises more than it holds.
    """
    stamp = stamp_of(path.stat())
    return ModuleFile(path, stamp, load_records(path))


def _tensors(records: object, where: str) -> dict[str, Laid]:
    found: dict[str, Laid] = {}
    kind, is_dict = _kind(records), isinstance(records, Mapping)
    if not is_dict and "_modules" not in _state(records):
        raise CheckpointError(f"{where} holds a {kind}, not a module or a dict of tensors")
    items = _items(records, where).items() if is_dict else _named(records, where)
    for name, value in items:
        check_name(name, f"{where}: tensor {shorten(name)}")
        if name in found:
            raise CheckpointError(f"{where} has two tensors '{name}': {SAVE_AGAIN}")
        if not isinstance(value, Laid):
            raise CheckpointError(
                f"{where}: '{name}' is a {_kind(value)}, not a plain tensor: {SAVE_AGAIN}"
            )
        found[name] = value
    if not found:
        raise CheckpointError(f"{where} holds a {kind} without tensors: is it the right file?")
    return found


def _named(root: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield parameters and buffers of a module and of those in it, named as in its state dict."""
    waiting, met = [("", root, 0)], 0
    while waiting:
        prefix, module, depth = waiting.pop()
        state = _state(module)
        if "_modules" not in state:
            raise CheckpointError(
                f"{where}: '{prefix[:-1]}' is a {_kind(module)}, which is stored as no module is: "
                f"{SAVE_AGAIN}"
            )
        parameters, buffers, modules = (
            _items(state.get(part), where) for part in ("_parameters", "_buffers", "_modules")
        )
        met += 1 + len(parameters) + len(buffers) + len(modules)
        # One module may be in many, and in itself.
        if depth > _MAX_DEPTH or met > MAX_TENSORS:
            raise CheckpointError(
                f"{where}: modules in modules without end at '{prefix}': {SAVE_AGAIN}"
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
        raise CheckpointError(f"{where} has a {_kind(content)} for a dict of tensors: {SAVE_AGAIN}")
    named = cast("Mapping[object, object]", content)
    stray = next((name for name in named if not isinstance(name, str)), None)
    if stray is not None:
        raise CheckpointError(f"{where} has the key {stray!r}: tensors are named by strings")
    return cast("Mapping[str, object]", named)


def _kind(value: object) -> str:
    return value.origin if isinstance(value, Inert | Sealed) else type(value).__name__


def _state(value: object) -> Mapping[object, object]:
    state = value.state if isinstance(value, Inert) else None
    return cast("Mapping[object, object]", state) if isinstance(state, Mapping) else {}


def _left_out(state: Mapping[object, object]) -> set[object]:
    """Names of the buffers that a state dict does not have. A set is pickled as a call of `set`."""
    found = state.get("_non_persistent_buffers_set")
    if isinstance(found, Inert) and found.args and isinstance(found.args[0], list):
        return {item for item in cast("list[object]", found.args[0]) if isinstance(item, str)}
    return cast("set[object]", found) if isinstance(found, set) else set()
