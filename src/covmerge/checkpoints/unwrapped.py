"""A checkpoint whose names begin with what a wrapper of the model put before them, seen without that."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from covmerge.checkpoints.adapter import AdapterCheckpoint
from covmerge.checkpoints.base import Checkpoint, find_header
from covmerge.checkpoints.view import View
from covmerge.types import TensorHeader

# DistributedDataParallel and DataParallel name the model so, torch.compile each module that it compiled.
_PARALLEL = "module."
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
# A training script's module that holds the model calls it so (Lightning's mostly); but it is also the
# name of many models' own backbone.
_HELD = "model."


class Unwrapped(View):
    """A view of a checkpoint under other names.

    Args:
        stored: the checkpoint.
        names: of all its tensors, the name there by the name here.
        said: what was taken off, for a note.
    """

    def __init__(self, stored: Checkpoint, names: Mapping[str, str], said: str) -> None:
        super().__init__(stored)
        self.source = stored.source
        self.config: Mapping[str, Any] | None = stored.config
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: replace(stored.headers[own], name=name) for name, own in names.items()}
        )
        self.notes = (
            *stored.notes,
            f"{stored.source}: {said} was left out of the names of its tensors",
        )
        self._names = dict(names)

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        find_header(self.headers, name, rows, self.source)
        return self._stored.read(self._names[name], rows)


def unwrapped(checkpoint: Checkpoint, base: Collection[str] = ()) -> Checkpoint:
    """Return a checkpoint under the names that its model has by itself; often it is the same.

    `module.` before all names, and `_orig_mod.` anywhere, are no model's. `model.` before all names is
    taken off where there is no config, and only so the names are the base's.

    Args:
        checkpoint: the checkpoint. An adapter stays as it is.
        base: the base's names, if this is an expert.

    Example:
        >>> import torch
        >>> from covmerge.checkpoints.open import open_checkpoint
        >>> list(unwrapped(open_checkpoint({"module._orig_mod.w": torch.ones(1)})).headers)
        ['w']
    """
    if isinstance(checkpoint, AdapterCheckpoint):
        return checkpoint
    names, said = {name: name for name in checkpoint.headers}, list[str]()
    if any(_COMPILED.search(name) for name in names):
        names = {_COMPILED.sub("", name): own for name, own in names.items()}
        said.append("'_orig_mod.' (torch.compile)")
    while names and all(name.startswith(_PARALLEL) for name in names):
        names = {name.removeprefix(_PARALLEL): own for name, own in names.items()}
        said.append(f"'{_PARALLEL}' (DistributedDataParallel)")
    inner = {name.removeprefix(_HELD): own for name, own in names.items()}
    held = all(name.startswith(_HELD) for name in names) and not names.keys() & set(base)
    if held and checkpoint.config is None and inner.keys() & set(base):
        names = inner
        said.append(f"'{_HELD}' (the module that was trained)")
    # Two tensors must not become one.
    if not said or len(names) < len(checkpoint.headers) or "" in names:
        return checkpoint
    return Unwrapped(checkpoint, names, " and ".join(dict.fromkeys(said)))
