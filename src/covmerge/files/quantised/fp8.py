"""FP8 with a scale for each block, each row or each tensor, as DeepSeek and transformers store it.

`X.weight` is float8, and w = q · s, with s in `X.weight_scale_inv`: for each block of
`weight_block_size` weights, the last row and column of blocks cut off where the sizes do not
divide; or one number for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.packed import SMALLEST, ByRows, Found, Read, Stored

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0 = getattr(torch, "float8_e8m0fnu", None)
_SCALES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(() if _E8M0 is None else (_E8M0,)),
)
# Blocks that have one scale, by rows and columns; 0: all of them.
Block = tuple[int, int]
TENSOR: Block = (0, 0)
ROW: Block = (1, 0)
# What a client multiplies its inputs and outputs by, beside the weights of a layer.
_OF_ACTIVATIONS = (
    *("activation_scale", "input_scale", "output_scale"),
    *("input_global_scale", "k_scale", "v_scale", "q_scale"),
)


@dataclass(frozen=True)
class Scaled(ByRows):
    """Numbers of 8 bits times the scale of their block.

    Attributes:
        block: rows and columns that have one scale.
        zeros: the name of what is subtracted before, with the scales' shape; None: nothing is.
        symmetric: the checkpoint, if its config says that nothing is subtracted: then `zeros` must be 0.
    """

    block: Block
    zeros: str | None = None
    symmetric: str | None = None

    def unpacked(self, rows: range, read: Read) -> Tensor:
        values = read(self.stored[0], rows).float()
        if self.zeros is not None:
            zeros = self._spread(self.zeros, rows, read)
            if self.symmetric is not None and bool(zeros.any()):
                raise CheckpointError(
                    f"{self.symmetric}: config.json says that weights are symmetric, and '{self.zeros}' "
                    "is not 0: pass the model as it was before it was quantised"
                )
            values -= zeros
        return values.mul_(self._spread(self.stored[1], rows, read))

    def _spread(self, name: str, rows: range, read: Read) -> Tensor:
        """A number for each weight of some rows, as far as it does not hold for a whole row."""
        high, wide = self.block
        blocks = range(rows.start // high, -(-rows.stop // high))
        held = None if high >= self.header.shape[0] else blocks
        own = read(name, held).float().reshape(len(blocks), -1)
        first = rows.start % high
        own = own.repeat_interleave(high, 0)[first : first + len(rows)] if high > 1 else own
        if own.shape[1] == 1:
            return own
        return own.repeat_interleave(wide, 1)[:, : self.header.shape[1]]


def find(stored: Stored) -> Found:
    """Find layers with `weight_scale_inv`; see `Found`.

    Raises:
        CheckpointError: sizes that contradict each other.
    """
    stored.setting("fmt", "e4m3", "float8_e4m3fn", None)
    given = stored.settings.get("weight_block_size")
    blocks = [] if given is None else [as_block(stored, given)]
    names = [name for name in stored.checkpoint.headers if name.endswith(".weight_scale_inv")]
    tensors = [
        scaled(stored, name.removesuffix("_scale_inv"), name, FLOAT8, [TENSOR, ROW, *blocks])
        for name in names
    ]
    return Found(tuple(tensors), _said("FP8", tensors), of_activations(stored))


def as_block(stored: Stored, given: object) -> Block:
    """Return the size of a block, as a config states it.

    Raises:
        CheckpointError: it is none.
    """
    sizes = cast("list[Any]", given) if isinstance(given, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        stored.refuse(f"its block is {shorten(cast('object', given))}, not rows and columns")
    if sizes[0] * sizes[1] < SMALLEST:
        stored.refuse(f"its block is {sizes}, where {SMALLEST} weights or more can be read")
    return sizes[0], sizes[1]


def scaled(
    stored: Stored,
    name: str,
    scale: str,
    dtypes: tuple[torch.dtype, ...],
    blocks: Sequence[Block],
    zeros: str | None = None,
    *,
    symmetric: bool = False,
) -> Scaled:
    """Return a packed weight, after its sizes were checked.

    Args:
        stored: the checkpoint.
        name: of the packed weight, which is its plain name too.
        scale: name of its scales.
        dtypes: what it may be stored as.
        blocks: that may have one scale.
        zeros: name of its zero points, if there are any.
        symmetric: whether the config says that there are no zero points.

    Raises:
        CheckpointError: a part is missing, or of a shape that fits nothing, or several blocks.
    """
    weight = stored.part(name, dtypes)
    if len(weight.shape) != 2 or not weight.numel:
        stored.refuse(f"'{name}' is {list(weight.shape)}, where a matrix can be read")
    forms = _forms(weight.shape, blocks)
    shape = stored.part(scale, _SCALES, *forms).shape
    if len(meant := forms[shape]) > 1:
        stored.refuse(
            f"'{scale}' is {list(shape)}, which fits blocks of {' and of '.join(map(str, meant))}"
        )
    parts = (name, scale)
    if zeros is not None:
        stored.part(zeros, (torch.int8, *FLOAT8), shape)
        parts = (*parts, zeros)
    header = TensorHeader(name, weight.shape, stored.dtype)
    return Scaled(header, parts, meant[0], zeros, stored.checkpoint.source if symmetric else None)


def _forms(shape: Sequence[int], blocks: Sequence[Block]) -> dict[tuple[int, ...], list[Block]]:
    """By the shape of its scales, the blocks of a matrix that could be meant.

    Example:
        >>> _forms((96, 32), [(64, 16), (48, 16)])
        {(2, 2): [(64, 16), (48, 16)]}
    """
    rows, columns = shape
    found: dict[tuple[int, ...], list[Block]] = {}
    for high, wide in ((high or rows, wide or columns) for high, wide in blocks):
        grid = (-(-rows // high), -(-columns // wide))
        shapes = [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]
        for own in shapes:
            known = found.setdefault(own, [])
            # What is beyond the matrix makes no difference.
            clipped = {(min(h, rows), min(w, columns)) for h, w in known}
            if (min(high, rows), min(wide, columns)) not in clipped:
                known.append((high, wide))
    return found


def of_activations(stored: Stored) -> frozenset[str]:
    """Scales that a plain weight has no use for."""
    return frozenset(
        name for name in stored.checkpoint.headers if name.rpartition(".")[2] in _OF_ACTIVATIONS
    )


def _said(what: str, tensors: Sequence[Scaled]) -> str:
    return f"{what}, {how_scaled(tensors)}"


def how_scaled(tensors: Sequence[Scaled]) -> str:
    """What the weights have scales for, in words."""
    blocks = dict.fromkeys(_whose(tensor) for tensor in tensors)
    return f"a scale for {', or '.join(blocks)}"


def _whose(tensor: Scaled) -> str:
    high, wide = tensor.block
    if high == tensor.header.shape[0] and wide == tensor.header.shape[1]:
        return "each tensor"
    return (
        "each row" if (high, wide) == (1, tensor.header.shape[1]) else f"each {high} x {wide} block"
    )
