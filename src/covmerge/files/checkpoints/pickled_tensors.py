"""One file of a pickled dict of tensors that torch, allowed to run nothing, does not load.

`torch.save(state, file, pickle_protocol=4)` and `pickle.dump(state, file)` write such files.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from covmerge.files.checkpoints.pickle_bounds import SAVE_AGAIN
from covmerge.files.checkpoints.pickled import load_records
from covmerge.files.checkpoints.unpickler import Inert, Sealed
from covmerge.files.stores.store import stamp_of


class PickledTensors:
    """A dict of tensors, read without running anything that the pickle names.

    Files that are no zip are in memory as a whole.

    Raises:
        CheckpointError: it holds something else, is damaged, or promises more than it holds.
    """

    settings: Mapping[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = stamp_of(path.stat())
        self._laid = tensors_of(load_records(path), str(path))
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: TensorHeader(name, laid.shape, laid.dtype) for name, laid in self._laid.items()}
        )
        self.notes = (
            f"{path} is a pickle: its tensors were read, and nothing that it names was run",
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, str(self.path))
        if name not in self._laid:
            raise CheckpointError(f"{self.path} is closed: open the checkpoint again")
        check_unchanged(self.path, self._stamp, stamp_of(self.path.stat()))
        return whole_booleans(self._laid[name].tensor(rows), f"{self.path}: '{name}'")

    def close(self) -> None:
        """Let go of what is in memory."""
        self._laid = {}


def tensors_of(records: object, where: str) -> dict[str, Laid]:
    """Return the tensors of a pickled dict by their names.

    Raises:
        CheckpointError: it is no dict, or has something else than tensors named by strings.
    """
    if not isinstance(records, Mapping):
        raise CheckpointError(f"{where} holds a {kind_of(records)}, not a dict of tensors")
    found: dict[str, Laid] = {}
    for name, value in cast("Mapping[object, object]", records).items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{where} has the key {name!r}: tensors are named by strings, {SAVE_AGAIN}"
            )
        check_name(name, f"{where}: tensor {shorten(name)}")
        if not isinstance(value, Laid):
            raise CheckpointError(
                f"{where}: '{name}' is a {kind_of(value)}, not a plain tensor: {SAVE_AGAIN}"
            )
        found[name] = value
    if not found:
        raise CheckpointError(f"{where} holds a dict without tensors: is it the right file?")
    return found


def kind_of(value: object) -> str:
    """Return the class of a record, as the pickle names it."""
    return value.origin if isinstance(value, Inert | Sealed) else type(value).__name__


def whole_booleans(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor whose truth values are stored as 0 and 1.

    Raises:
        CheckpointError: one is another byte, of which torch's operations make different things.
    """
    is_bool = tensor.dtype is torch.bool and tensor.numel() > 0
    if is_bool and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError(
            f"{what} holds bytes other than 0 and 1, and is of bool: {SAVE_AGAIN}"
        )
    return tensor
