"""Whether what an expert stores reaches the output, whatever the recipe lets pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from covmerge.checkpoints import AdapterCheckpoint, Checkpoint
from covmerge.errors import TensorError
from covmerge.findings import LOST
from covmerge.tensors import ModelDescription
from covmerge.text import counted, some
from covmerge.types import Role, TensorHeader

_LAYERS = (Role.LINEAR, Role.CONV1D, Role.CONV, Role.EXPERT_STACK)
_LEAST = 0.5  # share of an expert's parameters that must have a place in the output
_SHOWN = 3


def check_reached(
    base: Checkpoint,
    described: ModelDescription,
    expert_name: str,
    expert: Checkpoint,
    *,
    sizes: Mapping[str, int],
    placed: Mapping[str, str],
    lost: Collection[str],
    missing: Collection[str],
) -> None:
    """Refuse an expert of whose updates the output would have next to nothing.

    Args:
        base: the base.
        described: what the base's tensors are.
        expert_name: of the expert.
        expert: its checkpoint.
        sizes: how many numbers the expert stores of each tensor, of those that count.
        placed: the expert's name by that of the base's tensor that it is merged with, or kept beside.
        lost: names in the expert of what no tensor of the base takes up.
        missing: the base's names that the expert lacks.

    Raises:
        TensorError: less than half of its parameters, or none of its layers, have a place in the base, or
            what it lacks has the shapes of what is left out. No setting allows that.
    """
    if not lost:
        return
    every = sum(sizes[name] for name in (*placed.values(), *lost))
    share = 1 - sum(sizes[name] for name in lost) / max(1, every)
    layers = any(described.tensors[name].role in _LAYERS for name in placed)
    has_layers = any(len(_shape(expert, name)) > 1 for name in lost)
    alike = _alike(
        [_shape(base, name) for name in missing], [_shape(expert, name) for name in lost]
    )
    if share >= _LEAST and (layers or not has_layers) and not alike:
        return
    whole = layers and not missing and not isinstance(expert, AdapterCheckpoint)
    lacking = f" What it lacks of the base has the same shapes: {_some(missing)}." if alike else ""
    raise TensorError(
        f"{LOST}: expert '{expert_name}' ({expert.source}) would lose {counted(len(lost), 'tensor')}: "
        f"{_some(lost)} are no names of the base ({base.source}), which has {_some(base.headers)}. "
        f"{100 * share:.0f} % of its parameters would be merged.{lacking} {_way_out(lost, whole)}"
    )


def _way_out(lost: Collection[str], whole: bool) -> str:
    """Say what to do, where all of the base would be merged with the expert, and where it would not."""
    rename = (
        "Rename the expert's tensors to the base's names, or pass the base that it was trained from"
    )
    if not whole:
        return f"Such a merge is nearly the base, and no setting allows it. {rename}"
    return (
        "All that the base has would be merged, and no setting allows it except a rule that names what is "
        f"left out, such as {{match: '{next(iter(lost))}', use: base}}; `*` stands for any part of a name. "
        f"If it is no part that the base lacks: {rename[0].lower()}{rename[1:]}"
    )


def _alike(missing: list[tuple[int, ...]], lost: list[tuple[int, ...]]) -> bool:
    """Whether at least half of what is missing was probably left out under another name."""
    matching = Counter(missing) & Counter(lost)
    return bool(missing) and 2 * matching.total() >= len(missing)


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    header: TensorHeader | None = checkpoint.headers.get(name)
    return () if header is None else header.shape


def _some(names: Collection[str]) -> str:
    return some(names, _SHOWN, quoted=True)
