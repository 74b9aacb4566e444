"""A checkpoint under its model's own names, although a wrapper or another version wrote other names."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.text import counted
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.conversions import converted, divided
from covmerge.files.checkpoints.part import as_part
from covmerge.files.checkpoints.pieces import Assembled, Assembly, Masked, StoredTensor
from covmerge.files.checkpoints.view import WRAPPERS, View, differences, respelled, without_wrappers

_PARALLEL = "module."  # prefix of DistributedDataParallel, DataParallel and AveragedModel
_PEFT = "base_model.model."  # PeftModel's prefix; the model may have no adapter any more
_AVERAGED = "n_averaged"  # AveragedModel's own tensor: the number of averaged models
_SHOWN = 4  # the most differences that notes name


def unwrapped(checkpoint: Checkpoint, base: Checkpoint | None = None) -> Checkpoint:
    """Return a checkpoint under the names that its model alone has; often it is unchanged.

    `module.` before all names is removed, and so are wrappers of single modules. Masks of pruned
    tensors are applied. The tensors of an expert that the base has under an equivalent name
    (`respelled`), or in other pieces (`conversions`), are shown as in the base. An adapter is
    returned unchanged.

    Example:
        >>> import torch
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> list(unwrapped(open_checkpoint({"module._orig_mod.w": torch.ones(1)})).headers)
        ['w']
    """
    if checkpoint.is_adapter:
        return checkpoint
    checkpoint = _pruned(checkpoint)
    stored = list(checkpoint.headers)
    notes, left_out = list[str](), list[str]()
    if _AVERAGED in stored and all(n == _AVERAGED or n.startswith(_PARALLEL) for n in stored):
        stored.remove(_AVERAGED)
        notes.append(f"'{_AVERAGED}' (AveragedModel) is not the model's, and was left out")
    names = {without_wrappers(name): name for name in stored}
    left_out += [
        f"'{part}' ({by})" for part, by in WRAPPERS.items() if any(part in name for name in stored)
    ]
    while names and all(name.startswith(_PARALLEL) for name in names):
        names = {name.removeprefix(_PARALLEL): old for name, old in names.items()}
        left_out.append(f"'{_PARALLEL}' (DistributedDataParallel)")
    if base is not None and names.keys().isdisjoint(base.headers):
        while names and all(name.startswith(_PEFT) for name in names):
            names = {name.removeprefix(_PEFT): old for name, old in names.items()}
            left_out.append(f"'{_PEFT}' (PEFT)")
    made, made_by = dict[str, Assembly](), ""
    renamed = dict[str, str]()
    if base is not None:
        shapes = {name: checkpoint.headers[old].shape for name, old in names.items()}
        known = _shapes(base.headers)
        made, made_by = converted(shapes, known, base.config)
        renamed = {one.name: name for name, one in made.items() if isinstance(one, StoredTensor)}
        made = {name: one for name, one in made.items() if not isinstance(one, StoredTensor)}
        taken = {*renamed, *(part for one in made.values() for part in one.stored())}
        others = [name for name in names if name not in taken]
        renamed |= respelled(others, known.keys() - made.keys() - {*renamed.values()})
    changes = differences(renamed)
    if len(changes) > _SHOWN:
        notes.append(f"{counted(len(renamed), 'tensor')} read under the base's names ({made_by})")
        changes = []
    for theirs, ours in changes:
        if not theirs:
            notes.append(f"its tensors have no '{ours}.' in their names, as the base's have")
        elif ours:
            notes.append(f"'{theirs}' in the names of its tensors is the base's '{ours}'")
        else:
            left_out.append(f"'{theirs}.' (which the base has not)")
    names = {renamed.get(name, name): old for name, old in names.items()}
    # Two tensors must not get the same name.
    if len(names) < len(stored) or "" in names:
        return checkpoint
    if left_out:
        said = " and ".join(dict.fromkeys(left_out))
        notes.append(f"{said} was left out of the names of its tensors")
    if list(names) != list(checkpoint.headers):
        said = (f"{checkpoint.source}: {note}" for note in notes)
        checkpoint = View(checkpoint, names, *said)
    if made:
        name = next(iter(made))
        checkpoint = Assembled(
            checkpoint,
            made,
            f"{checkpoint.source}: {counted(len(made), 'tensor')}, such as '{name}', are put together from "
            f"'{next(iter(made[name].stored()))}' and others as the base has them ({made_by})",
        )
    return checkpoint if base is None else as_part(checkpoint, base)


def _pruned(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the masks of torch.nn.utils.prune applied, under the plain names."""
    shapes = _shapes(checkpoint.headers)
    made = dict[str, Assembly]()
    for values, shape in shapes.items():
        name = values.removesuffix("_orig")
        mask = f"{name}_mask"
        if name != values and name not in shapes and shape and shapes.get(mask) == shape:
            made[name] = Masked(StoredTensor(values, shape), StoredTensor(mask, shape), shape)
    if not made:
        return checkpoint
    masks = counted(len(made), "mask")
    note = f"{checkpoint.source}: {masks} of pruning, such as '{next(iter(made))}_mask', applied"
    return Assembled(checkpoint, made, note)


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """Return a model with the tensors that transformers splits on loading, split; often it is unchanged.

    Example:
        >>> import torch
        >>> from covmerge.files.checkpoints.memory import MemoryCheckpoint
        >>> held = {"encoder.layers.0.attn.Wqkv.weight": torch.ones(6, 2)}
        >>> list(in_memory(MemoryCheckpoint(held, {"model_type": "nomic_bert"})).headers)[0]
        'layers.0.self_attn.q_proj.weight'
    """
    parts = divided(_shapes(checkpoint.headers), checkpoint.config)
    return Assembled(checkpoint, parts) if parts else checkpoint


def _shapes(headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    return {name: header.shape for name, header in headers.items()}
