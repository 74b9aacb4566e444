"""FP8 with one scale per block, row or tensor, as DeepSeek and transformers store it.

`X.weight` is float8, and w = q · s, with s in `X.weight_scale_inv` (`X.scale` in DeepSeek-V4's files,
`X.qscale_weight` in Mistral's). s is one number for each block of `weight_block_size` weights (the last
row and column of blocks are cut off if the sizes do not divide), or one number for all. DeepSeek-V4 stores
experts as two E2M1 numbers per byte, with a power of two for every 32 numbers of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.integers import BYTE, Mixed, numbers, of_inputs, scales_of
from covmerge.files.quantised.packed import SMALLEST, ByRows, Format, Found, Read, Stored

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of scales that are powers of two; bytes hold their exponents. Older versions of torch lack the
# dtypes of exponents and of two E2M1 numbers.
EXPONENTS = (torch.uint8, *(getattr(torch, n) for n in ("float8_e8m0fnu",) if hasattr(torch, n)))
FLOAT4 = (torch.uint8, *(getattr(torch, n) for n in ("float4_e2m1fn_x2",) if hasattr(torch, n)))
_SCALES = (*_WIDE, *EXPONENTS)
# Rows and columns of a block with one scale; 0: all rows or columns.
Block = tuple[int, int]
TENSOR: Block = (0, 0)
ROW: Block = (1, 0)
_LEAVES = ("weight_scale_inv", "qscale_weight")
_SHORT = "scale"  # this name belongs to other tensors too
_TWO_A_BYTE = (torch.int8, *FLOAT4[1:])  # DeepSeek-V4's dtypes of experts
# Factors of a layer's inputs and outputs, which a client uses beside the weights.
_OF_ACTIVATIONS = (
    *("activation_scale", "input_scale", "output_scale"),
    *("input_global_scale", "k_scale", "v_scale", "q_scale"),
)


@dataclass(frozen=True)
class GlobalScale:
    """One scale for all scales of a tensor.

    Attributes:
        name: name of the stored number.
        divides: whether the scales are divided by it; otherwise they are multiplied by it.
    """

    name: str
    divides: bool


@dataclass(frozen=True)
class Scaled(ByRows):
    """A matrix of 4-, 6- or 8-bit numbers times the scale of their block.

    Attributes:
        block: rows and columns of a block with one scale.
        zeros: name of the tensor of zero points, which are subtracted first, of the scales' shape; None:
            there are none.
        symmetric: the checkpoint's source if its config says that there are no zero points, so that `zeros`
            must be 0; else None.
        bits: bits of a number.
        whole: the scale of the scales; None: there is none.
        mixed: the stored group of each input; None: blocks are in order.
    """

    block: Block
    zeros: str | None = None
    symmetric: str | None = None
    bits: int = BYTE
    whole: GlobalScale | None = None
    mixed: Mixed | None = None

    def unpacked(self, rows: range, read: Read) -> Tensor:
        values = numbers(read(self.stored[0], rows), self.bits)
        if self.zeros is not None:
            zeros = self._spread(self._of_blocks(self.zeros, rows, read), rows, read)
            if self.symmetric is not None and bool(zeros.any()):
                raise CheckpointError(
                    f"{self.symmetric}: config.json says that weights are symmetric, and '{self.zeros}' "
                    "is not 0: pass the model as it was before it was quantised"
                )
            values -= zeros
        scales = self._of_blocks(self.stored[1], rows, read)
        if self.whole is not None:
            other = read(self.whole.name, None).view(())
            scales = scales / other if self.whole.divides else scales * other
        return values.mul_(self._spread(scales, rows, read))

    def _of_blocks(self, name: str, rows: range, read: Read) -> Tensor:
        """Return a number for each block in which some rows lie."""
        high = self.block[0]
        blocks = range(rows.start // high, -(-rows.stop // high))
        held = None if high >= self.header.shape[0] else blocks
        return scales_of(read(name, held)).reshape(len(blocks), -1)

    def _spread(self, value: Tensor, rows: range, read: Read) -> Tensor:
        """Return a number for each weight of some rows, or one per row if it holds for whole rows."""
        high, wide = self.block
        first = rows.start % high
        value = value.repeat_interleave(high, 0)[first : first + len(rows)] if high > 1 else value
        return of_inputs(value, self.header.shape[1], wide, self.mixed, read)


@dataclass(frozen=True)
class Numbers:
    """The ways in which a weight and its scales may be stored."""

    dtypes: tuple[torch.dtype, ...]
    blocks: Sequence[Block]  # sizes of blocks that may have one scale
    bits: int = BYTE
    scales: tuple[torch.dtype, ...] = _SCALES


MXFP4 = Numbers(FLOAT4, [(1, 32)], 4, EXPONENTS)
MXFP6 = Numbers((torch.uint8,), [(1, 32)], 6, EXPONENTS)
MXFP8 = Numbers(FLOAT8, [(1, 32)], BYTE, EXPONENTS)
NVFP4 = Numbers(FLOAT4, [(1, 16)], 4, (torch.float8_e4m3fn,))


def find(stored: Stored) -> Found:
    """Return the layers with `weight_scale_inv`; see `Found`."""
    stored.setting("fmt", "e4m3", "float8_e4m3fn", None)
    given = stored.settings.get("weight_block_size")
    blocks = [] if given is None else [as_block(stored, given)]
    tensors = [_weight(stored, *pair, blocks) for pair in _pairs(stored)]
    return Found(tuple(tensors), _said("FP8", tensors), of_activations(stored))


def _pairs(stored: Stored) -> Iterator[tuple[str, str]]:
    """Yield names of weights, each with the name of its scales."""
    headers = stored.checkpoint.headers
    for name in headers:
        module, _, leaf = name.rpartition(".")
        weight = headers.get(f"{module}.weight")
        if leaf in _LEAVES or (
            leaf == _SHORT and weight is not None and weight.dtype in (*FLOAT8, *_TWO_A_BYTE)
        ):
            yield f"{module}.weight", name


def _weight(stored: Stored, name: str, scale: str, blocks: Sequence[Block]) -> Scaled:
    header = stored.checkpoint.headers.get(name)
    if header is not None and header.dtype in _TWO_A_BYTE:
        return scaled(stored, name, scale, replace(MXFP4, dtypes=_TWO_A_BYTE))
    return scaled(stored, name, scale, Numbers(FLOAT8, [TENSOR, ROW, *blocks]))


def as_block(stored: Stored, given: object) -> Block:
    """Return the size of a block that a config states.

    Raises:
        CheckpointError: it is not a possible size.
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
    numbers: Numbers,
    *,
    plain: str | None = None,
    zeros: str | None = None,
    symmetric: bool = False,
    whole: GlobalScale | None = None,
) -> Scaled:
    """Return a packed weight, after checking the sizes of its parts.

    Args:
        stored: the checkpoint.
        name: name of the packed weight.
        scale: name of its scales.
        numbers: the ways in which both may be stored.
        plain: name of the plain weight; None: that of the packed one.
        zeros: name of its zero points, if there are any.
        symmetric: whether the config says that there are no zero points.
        whole: the scale of its scales, if there is one.

    Raises:
        CheckpointError: a part is missing, or its shape fits no block or several blocks.
    """
    weight = stored.part(name, numbers.dtypes)
    if len(weight.shape) != 2 or not weight.numel:
        stored.refuse(f"'{name}' is {list(weight.shape)}, where a matrix can be read")
    shape = (weight.shape[0], weight.shape[1] * BYTE // numbers.bits)
    if numbers.bits < BYTE and shape[1] % numbers.blocks[0][1]:
        stored.refuse(
            f"'{name}' has rows of {weight.shape[1]} bytes, where whole blocks of "
            f"{numbers.blocks[0][1]} numbers of {numbers.bits} bits can be read"
        )
    forms = _forms(shape, numbers.blocks)
    grid = stored.part(scale, numbers.scales, *forms).shape
    if len(meant := forms[grid]) > 1:
        stored.refuse(
            f"'{scale}' is {list(grid)}, which fits blocks of {' and of '.join(map(str, meant))}"
        )
    parts = (name, scale)
    if zeros is not None:
        stored.part(zeros, (torch.int8, *FLOAT8), grid)
        parts = (*parts, zeros)
    if whole is not None:
        stored.part(whole.name, (torch.float32,), (1,), ())
        parts = (*parts, whole.name)
    header = TensorHeader(plain or name, shape, stored.dtype)
    source = stored.checkpoint.source if symmetric else None
    return Scaled(header, parts, meant[0], zeros, source, numbers.bits, whole)


def _forms(shape: Sequence[int], blocks: Sequence[Block]) -> dict[tuple[int, ...], list[Block]]:
    """Return the possible blocks of a matrix, by the shape that its scales would have.

    Example:
        >>> _forms((96, 32), [(64, 16), (48, 16)])
        {(2, 2): [(64, 16), (48, 16)]}
    """
    rows, columns = shape
    found: dict[tuple[int, ...], list[Block]] = {}
    for high, wide in ((high or rows, wide or columns) for high, wide in blocks):
        grid = (-(-rows // high), -(-columns // wide))
        shapes = [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]
        for form in shapes:
            known = found.setdefault(form, [])
            # Blocks that differ only beyond the matrix are the same.
            clipped = {(min(h, rows), min(w, columns)) for h, w in known}
            if (min(high, rows), min(wide, columns)) not in clipped:
                known.append((high, wide))
    return found


def of_activations(stored: Stored) -> frozenset[str]:
    """Return the names of scales of activations, which a plain weight does not use."""
    return frozenset(
        name for name in stored.checkpoint.headers if name.rpartition(".")[2] in _OF_ACTIVATIONS
    )


def _said(what: str, tensors: Sequence[Scaled]) -> str:
    return f"{what}, {how_scaled(tensors)}"


def how_scaled(tensors: Sequence[Scaled]) -> str:
    """Describe the parts of weights that have one scale."""
    blocks = dict.fromkeys(_whose(tensor) for tensor in tensors)
    return f"a scale for {', or '.join(blocks)}"


def _whose(tensor: Scaled) -> str:
    high, wide = tensor.block
    if high == tensor.header.shape[0] and wide == tensor.header.shape[1]:
        return "each tensor"
    return (
        "each row" if (high, wide) == (1, tensor.header.shape[1]) else f"each {high} x {wide} block"
    )


FORMAT = Format(
    ("fp8", "mxfp8"),
    find,
    parts=("weight_scale", "weight_scale_inv"),
    plain_modules="modules_to_not_convert",
    dequantise="from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config(dequantize=True)), then "
    "save_pretrained(NEW, save_original_format=False)",
)
