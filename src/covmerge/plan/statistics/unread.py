"""Which weights of a model are read only when its blocks are run, and what stands for them until then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.skeleton import Skeleton

OUTSIDE = ""  # in place of a block: outside the backbone, which alone is run


def unread(skeleton: Skeleton, headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Return the block of each stored tensor that waits for it.

    These are parameters that are stored as the model has them: what is packed as it is loaded, buffers, and
    what is in no block are read at once.
    """
    found: dict[str, str] = {}
    blocks = set(skeleton.blocks)
    for name, place in skeleton.places.items():
        header = headers[name]
        block = OUTSIDE if place.parameter in skeleton.outside else _block(place.parameter, blocks)
        whole = place.expected == header.shape and place.kind.role is not Role.BUFFER
        large = header.dtype.is_floating_point and header.numel > 1
        if whole and large and block is not None:
            found[name] = block
    return found


def placeholder(shape: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """Return a float32 tensor of a shape that takes no memory: no number, should anything use it.

    Example:
        >>> placeholder((10**6, 10**6)).untyped_storage().nbytes()
        4
    """
    return torch.full((), torch.nan, device=device).expand(tuple(shape))


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor of more than one number is a placeholder."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _block(parameter: str, blocks: set[str]) -> str | None:
    parts = parameter.split(".")
    heads = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((head for head in heads if head in blocks), None)
