"""A checkpoint under its model's own names, where a wrapper or another version wrote other ones."""

from __future__ import annotations

from collections.abc import Collection

from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.equivalent_names import (
    WRAPPERS,
    differences,
    respelled,
    without_wrappers,
)
from covmerge.files.checkpoints.view import View

_PARALLEL = "module."  # DistributedDataParallel, DataParallel and AveragedModel name the model so
_AVERAGED = "n_averaged"  # AveragedModel's own: how many models it has averaged


def unwrapped(checkpoint: Checkpoint, base: Collection[str] = ()) -> Checkpoint:
    """Return a checkpoint under the names that its model has by itself; often it is the same.

    `module.` before all names, and what wraps single modules, are no model's. An expert's tensors that
    the base has under an equivalent name (`equivalent_names`) get that.

    Args:
        checkpoint: the checkpoint. An adapter stays as it is.
        base: the base's names, if this is an expert.

    Example:
        >>> import torch
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> list(unwrapped(open_checkpoint({"module._orig_mod.w": torch.ones(1)})).headers)
        ['w']
    """
    if checkpoint.is_adapter:
        return checkpoint
    stored = list(checkpoint.headers)
    notes, left_out = list[str](), list[str]()
    if _AVERAGED in stored and all(n == _AVERAGED or n.startswith(_PARALLEL) for n in stored):
        stored.remove(_AVERAGED)
        notes.append(f"'{_AVERAGED}' (AveragedModel) is not the model's, and was left out")
    names = {without_wrappers(name): name for name in stored}
    left_out += [
        f"'{part}' ({by})" for part, by in WRAPPERS.items() if any(part in own for own in stored)
    ]
    while names and all(name.startswith(_PARALLEL) for name in names):
        names = {name.removeprefix(_PARALLEL): own for name, own in names.items()}
        left_out.append(f"'{_PARALLEL}' (DistributedDataParallel)")
    renamed = respelled(names, base)
    for theirs, ours in differences(renamed):
        if not theirs:
            notes.append(f"its tensors have no '{ours}.' in their names, as the base's have")
        elif ours:
            notes.append(f"'{theirs}' in the names of its tensors is the base's '{ours}'")
        else:
            left_out.append(f"'{theirs}.' (which the base has not)")
    names = {renamed.get(name, name): own for name, own in names.items()}
    # Two tensors must not become one.
    if len(names) < len(stored) or "" in names or list(names) == list(checkpoint.headers):
        return checkpoint
    if left_out:
        said = " and ".join(dict.fromkeys(left_out))
        notes.append(f"{said} was left out of the names of its tensors")
    return View(checkpoint, names, *(f"{checkpoint.source}: {note}" for note in notes))
