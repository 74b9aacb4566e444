"""Matrices of numbers of few bits, with a scale for the tensor, each row, or each block: w = (q − z) · s.

The formats that store them differ in names, dtypes and sizes of blocks; each states its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import as_list, shorten
from covmerge.files.quantised.integers import (
    BYTE,
    WORD,
    Mixed,
    in_a_row,
    numbers,
    run_of,
    scales_of,
)
from covmerge.files.quantised.packed import SMALLEST, ByRows, Read, Stored

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of scales that are powers of two; bytes hold their exponents. Older versions of torch lack the
# dtypes of exponents and of two E2M1 numbers.
EXPONENTS = (torch.uint8, *(getattr(torch, n) for n in ("float8_e8m0fnu",) if hasattr(torch, n)))
FLOAT4 = (torch.uint8, *(getattr(torch, n) for n in ("float4_e2m1fn_x2",) if hasattr(torch, n)))
# Rows and columns of a block with one scale; 0: all rows or columns.
Block = tuple[int, int]
TENSOR: Block = (0, 0)
ROW: Block = (1, 0)
# Factors of a layer's inputs and outputs, which a client uses beside the weights.
_OF_ACTIVATIONS = (
    *("activation_scale", "input_scale", "output_scale"),
    *("input_global_scale", "k_scale", "v_scale", "q_scale"),
)


@dataclass(frozen=True)
class Scaled(ByRows):
    """A matrix of numbers of few bits times the scale of their block.

    Attributes:
        block: rows and columns of a block with one scale.
        zeros: name of the tensor of zero points, which are subtracted first, of the scales' shape; None:
            there are none.
        symmetric: the checkpoint's source if its config says that there are no zero points, so that `zeros`
            must be 0; else None.
        bits: bits of a number.
        words: whether numbers are integers plus 2^(bits − 1) in int32 words; then zero points are so too,
            along the outputs.
        whole: name of the one scale of all scales; None: there is none.
        divides: whether the scales are divided by it; otherwise they are multiplied by it.
        mixed: the stored group of each input; None: blocks are in order.
    """

    block: Block
    zeros: str | None = None
    symmetric: str | None = None
    bits: int = BYTE
    words: bool = False
    whole: str | None = None
    divides: bool = False
    mixed: Mixed | None = None

    def unpacked(self, rows: range, read: Read) -> Tensor:
        stored = read(self.stored[0], rows)
        if self.words:
            values = self._integers(stored)[:, : self.header.shape[1]]
        else:
            values = numbers(stored, self.bits)
        if self.zeros is not None:
            of_blocks = self._zeros_in_words if self.words else self._of_blocks
            zeros = self._spread(of_blocks(self.zeros, rows, read), rows, read)
            if self.symmetric is not None and bool(zeros.any()):
                raise CheckpointError(
                    f"{self.symmetric}: config.json says that weights are symmetric, and '{self.zeros}' "
                    "is not 0: pass the model as it was before it was quantised"
                )
            values -= zeros
        scales = self._of_blocks(self.stored[1], rows, read)
        if self.whole is not None:
            other = read(self.whole, None).view(())
            scales = scales / other if self.divides else scales * other
        return values.mul_(self._spread(scales, rows, read))

    def _integers(self, words: Tensor) -> Tensor:
        return in_a_row(words, self.bits).float() - 2 ** (self.bits - 1)

    def _zeros_in_words(self, name: str, rows: range, read: Read) -> Tensor:
        held, high = run_of(self.bits)
        runs = range(rows.start // held, -(-rows.stop // held))
        count = -(-self.header.shape[0] * self.bits // WORD)
        words = read(name, range(runs.start * high, min(runs.stop * high, count)))
        first = rows.start - runs.start * held
        return self._integers(words.mT).mT[first : first + len(rows)]

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
        if value.shape[1] == 1:
            return value
        groups = None if self.mixed is None else self.mixed.groups(read, value.shape[1])
        if groups is not None:
            return value[:, groups]
        return value.repeat_interleave(wide, 1)[:, : self.header.shape[1]]


@dataclass(frozen=True)
class Numbers:
    """The ways in which a weight and its scales may be stored."""

    dtypes: tuple[torch.dtype, ...]
    blocks: Sequence[Block]  # sizes of blocks that may have one scale
    bits: int = BYTE
    scales: tuple[torch.dtype, ...] = (*WIDE, *EXPONENTS)


MXFP4 = Numbers(FLOAT4, [(1, 32)], 4, EXPONENTS)
MXFP6 = Numbers((torch.uint8,), [(1, 32)], 6, EXPONENTS)
MXFP8 = Numbers(FLOAT8, [(1, 32)], BYTE, EXPONENTS)
NVFP4 = Numbers(FLOAT4, [(1, 16)], 4, (torch.float8_e4m3fn,))


def as_block(stored: Stored, given: object) -> Block:
    """Return the size of a block that a config states.

    Raises:
        CheckpointError: it is not a possible size.
    """
    sizes = as_list(given)
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        stored.refuse(f"its block is {shorten(given)}, not rows and columns")
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
    whole: str | None = None,
    divides: bool = False,
) -> Scaled:
    """Return a packed weight, after checking the sizes of its parts, which are given by name.

    `plain` is the name of the plain weight, if the packed one has another. `symmetric` tells whether the
    config says that there are no zero points. For `whole` and `divides` see `Scaled`.

    Raises:
        CheckpointError: a part is missing, or its shape fits no block or several blocks.
    """
    rows, width = stored.matrix(name, numbers.dtypes)
    shape = (rows, width * BYTE // numbers.bits)
    if numbers.bits < BYTE and shape[1] % numbers.blocks[0][1]:
        stored.refuse(
            f"'{name}' has rows of {width} bytes, where whole blocks of "
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
        stored.part(whole, (torch.float32,), (1,), ())
        parts = (*parts, whole)
    header = TensorHeader(plain or name, shape, stored.dtype)
    source = stored.checkpoint.source if symmetric else None
    return Scaled(
        header, parts, meant[0], zeros, source, numbers.bits, whole=whole, divides=divides
    )


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
