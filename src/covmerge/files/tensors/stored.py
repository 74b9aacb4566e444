"""What a stored tensor is, when the loader makes a parameter of the model out of it.

Mostly the two are the same. But transformers may store each expert by itself and pack all of them
on loading (Mixtral), split what is stored in one, or transpose: a list of operations by which the
stored tensor's role and orientation follow from the parameter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.fused import equal_parts
from covmerge.files.tensors.modules import Kind
from covmerge.files.tensors.views import FusedParts

MATRICES = (Role.LINEAR, Role.CONV1D, Role.EXPERT_STACK)
# Operations of transformers' loader that leave rows rows and columns columns.
_KEEP_ORIENTATION = frozenset(
    {
        "Chunk",
        "Concatenate",
        "Conv3dToLinear",
        "ErnieFuseAndSplitTextVisionExperts",
        "Interleave",
        "LinearToConv3d",
        "MergeModulelist",
        "PermuteForRope",
        "Split",
        "SplitModulelist",
    }
)


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of the model."""

    kind: Kind
    parts: FusedParts | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """What a stored tensor is in the model.

    Attributes:
        parameter: dotted name of the parameter or buffer in the model. Several stored tensors have
            the same one where the model packs them.
        kind: role and orientation of the stored tensor.
        parts: the split of a fused projection, if known.
        expected: shape that the config gives it; None where it is stored in other pieces.
    """

    parameter: str
    kind: Kind
    parts: FusedParts | None
    expected: tuple[int, ...] | None


def place_of(target: str, slot: Slot, header: TensorHeader, converter: Any | None) -> Place:
    """Return what a stored tensor is, given the slot it goes to and the loader's converter."""
    if converter is None:
        parts = slot.parts if header.shape == slot.shape else None
        return Place(target, _stored_kind(slot, header, ()), parts, slot.shape)
    operations: list[Any] = converter.operations
    kind = _stored_kind(slot, header, operations)
    parts = None
    if [type(o).__name__ for o in operations] == ["Chunk"] and kind.role is Role.LINEAR:
        chunk = operations[0]
        if chunk.dim == 0 and chunk.num_shards_attribute is None and not kind.transposed:
            names = [
                p.removesuffix(".weight").rpartition(".")[2] for p in converter.target_patterns
            ]
            parts = equal_parts(names, header.shape[0])
    return Place(target, kind, parts, None)


def _stored_kind(slot: Slot, header: TensorHeader, operations: Sequence[Any]) -> Kind:
    """Kind of a stored tensor that the loader turns into (a piece of) the slot by operations."""
    kind, axes = slot.kind, len(header.shape)
    if not operations:
        if axes == len(slot.shape) or kind.role is Role.BUFFER:
            return kind
        why = f"{kind.why}, but stored {list(header.shape)} instead of {list(slot.shape)}"
        return Kind(Role.OTHER, why, unsure=True)
    transposed = kind.transposed
    for operation in operations:
        name = type(operation).__name__
        if name == "Transpose" and _swaps_matrix_axes(operation, len(slot.shape)):
            if not (operation.check_dims and header.shape == slot.shape):
                transposed = not transposed
        elif name not in _KEEP_ORIENTATION:
            why = f"{kind.why}, but stored for {operation}, which covmerge does not know"
            return Kind(Role.OTHER, why, unsure=True)
    piece_of = f"{kind.why}, converted on loading"
    if kind.role in MATRICES and axes >= 2:
        role = {2: Role.LINEAR, 3: Role.EXPERT_STACK}.get(axes, Role.CONV)
        return Kind(role, piece_of, transposed, stays_full=kind.stays_full)
    as_a_whole = kind.role in (Role.CONV, Role.EMBEDDING, Role.OUTPUT)
    if as_a_whole and (axes != len(slot.shape) or transposed != kind.transposed):
        return Kind(Role.OTHER, f"{piece_of} from {list(header.shape)}", unsure=True)
    return Kind(kind.role, piece_of, kind.transposed)


def _swaps_matrix_axes(operation: Any, axes: int) -> bool:
    return {operation.dim0 % axes, operation.dim1 % axes} == {axes - 2, axes - 1}
