"""bitsandbytes, 8 bits (LLM.int8, arXiv:2208.07339) and 4 bits (QLoRA, arXiv:2305.14314).

8 bits: `X.weight` is int8 and w = q · s · (1/127), with s the scale of the row in `X.SCB`.

4 bits: `X.weight` has two numbers per byte, the high half first, in the order of the matrix's rows, and
w = v[q] · s. v are the 16 values of `X.weight.quant_map` (NF4 or FP4), s is the scale of the block in
`X.weight.absmax`. With double quantisation s is stored as uint8 too: s = u[q] · t + m, with u the 256
values of `nested_quant_map`, t the scale of 256 blocks in `nested_absmax`, and m one number. Shape, dtype,
block sizes and m are JSON in `X.weight.quant_state.bitsandbytes__nf4`, so the weights must be local before
a merge of them can be planned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import as_list, parse_object, shorten
from covmerge.files.quantised.packed import ByRows, Format, Found, Read, Stored

# 1/127 as bitsandbytes writes it; in its float32 arithmetic s / 127 gives another number.
_OF_127 = 7.874015718698502e-3
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_MAX_STATE = 2**16
_MAX_DIMENSIONS = 4
_LARGEST = torch.finfo(torch.float32).max
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STORAGE = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32)
# QLoRA, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_VALUES = {"nf4": NF4, "fp4": (*_FP4, *(-value for value in _FP4))}


@dataclass(frozen=True)
class EightBit(ByRows):
    """A matrix of int8 rows, with one scale per row."""

    def unpacked(self, rows: range, read: Read) -> Tensor:
        weight, scale = (read(name, rows) for name in self.stored[:2])
        return weight.float().mul_(scale.view(-1, 1)).mul_(_OF_127)


@dataclass(frozen=True)
class Nested:
    """How the scales of blocks are stored in 8 bits.

    Attributes:
        scales: name of the tensor with the scales of the stored scales.
        values: name of the tensor with the values of the 256 codes.
        block: number of stored scales with one scale.
        state: name of the tensor with m, the number that is added to them, as JSON.
    """

    scales: str
    values: str
    block: int
    state: str


@dataclass(frozen=True)
class FourBit(ByRows):
    """A matrix as one row of 4-bit numbers, in blocks with one scale each.

    Attributes:
        block: number of weights with one scale.
        unit: bytes of one element of the stored tensor.
        nested: how the scales are quantised; None: they are stored as they are.
    """

    block: int
    unit: int
    nested: Nested | None

    def unpacked(self, rows: range, read: Read) -> Tensor:
        weight, absmax, values = self.stored[:3]
        shape = self.header.shape
        width = prod(shape[1:])
        first, last = rows.start * width, rows.stop * width
        start = first // self.block * self.block
        stop = min(-(-last // self.block) * self.block, prod(shape))
        bits = 2 * self.unit  # 4-bit numbers in one stored element
        held = range(start // bits, -(-stop // bits))
        packed = read(weight, held).view(-1).view(torch.uint8)
        numbers = torch.stack([packed >> 4, packed & 0x0F], dim=-1).view(-1)
        numbers = numbers[start - held.start * bits :][: last - start]
        found = read(values, None)[numbers.long()]
        blocks = range(start // self.block, -(-stop // self.block))
        scales = self._scales(read, absmax, blocks).repeat_interleave(self.block)
        return found.mul_(scales[: len(found)])[first - start :].view(len(rows), *shape[1:])

    def _scales(self, read: Read, absmax: str, blocks: range) -> Tensor:
        scales, nested = read(absmax, blocks), self.nested
        if nested is None:
            return scales.float()
        place = torch.arange(blocks.start, blocks.stop) // nested.block
        outer = read(nested.scales, range(int(place[0]), int(place[-1]) + 1))[place - place[0]]
        # From the state that is read: a merged matrix has another offset than its base.
        offset = json.loads(read(nested.state, None).numpy().tobytes())["nested_offset"]
        return read(nested.values, None)[scales.long()].mul_(outer).add_(offset)


def find(stored: Stored) -> Found:
    """Return the layers with `SCB`, or with a `quant_state`; see `Found`."""
    eight = [_eight_bit(stored, module) for module in stored.modules(".SCB")]
    four = [_four_bit(stored, n, end) for end in _STATES for n in stored.modules(end)]
    kinds = {"8 bit": bool(eight), "4 bit": bool(four)}
    said = " and ".join(kind for kind, there in kinds.items() if there)
    return Found((*eight, *four), f"bitsandbytes, {said}")


def _eight_bit(stored: Stored, module: str) -> EightBit:
    name, scales, order = (f"{module}.{leaf}" for leaf in ("weight", "SCB", "weight_format"))
    shape = stored.matrix(name, (torch.int8,))
    stored.part(scales, (torch.float32,), shape[:1])
    parts = (name, scales)
    if order in stored.checkpoint.headers:
        stored.part(order, (torch.uint8,), (), (1,))
        if int(stored.checkpoint.read(order).item()):
            stored.refuse(f"'{order}' is not 0: its rows are in the order of some GPU")
        parts = (*parts, order)
    return EightBit(TensorHeader(name, shape, stored.dtype), parts)


def _four_bit(stored: Stored, name: str, end: str) -> FourBit:
    state = _state(stored, f"{name}{end}")
    shape, block, dtype = state.get("shape"), state.get("blocksize"), state.get("dtype")
    sizes = as_list(shape)
    known = type(block) is int and block in _BLOCKS and isinstance(dtype, str) and dtype in _DTYPES
    sized = 0 < len(sizes) <= _MAX_DIMENSIONS
    if not known or not sized or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        said = [shorten(state.get(key)) for key in ("shape", "blocksize", "dtype")]
        stored.refuse("'{}' says shape {}, blocks of {}, dtype {}".format(f"{name}{end}", *said))
    header = TensorHeader(name, tuple(sizes), _DTYPES[str(dtype)])
    assert isinstance(block, int)
    blocks = -(-header.numel // block)
    weight = stored.part(name, _STORAGE)
    unit = weight.dtype.itemsize
    length = -(-header.numel // (2 * unit))
    stored.part(name, _STORAGE, (length, 1), (length,))
    scales, values = f"{name}.absmax", f"{name}.quant_map"
    stored.part(values, (torch.float32,), (16,))
    # Some of the client's kernels take the values from here, others go by the type that is stated.
    kind = end.rpartition("__")[2]
    if state.get("quant_type") != kind:
        stored.refuse(f"'{name}{end}' says quant_type {shorten(state.get('quant_type'))}")
    if not torch.allclose(stored.checkpoint.read(values), torch.tensor(_VALUES[kind]), atol=1e-6):
        stored.refuse(f"'{values}' has other values than those of {kind}")
    nested = _nested(stored, name, f"{name}{end}", state, blocks)
    stored.part(scales, (torch.float32,) if nested is None else (torch.uint8,), (blocks,))
    beside = () if nested is None else (nested.scales, nested.values)
    return FourBit(header, (name, scales, values, *beside, f"{name}{end}"), block, unit, nested)


def _nested(
    stored: Stored, name: str, state_name: str, state: dict[str, Any], blocks: int
) -> Nested | None:
    scales, values = f"{name}.nested_absmax", f"{name}.nested_quant_map"
    if scales not in stored.checkpoint.headers:
        return None
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    known = type(offset) in (int, float) and abs(cast("float", offset)) <= _LARGEST
    if type(block) is not int or not 0 < block < 2**31 or not known:
        stored.refuse(f"'{name}' has scales in blocks of {shorten(block)} beside {shorten(offset)}")
    stored.part(scales, (torch.float32,), (-(-blocks // block),))
    stored.part(values, (torch.float32,), (256,))
    return Nested(scales, values, block, state_name)


def _state(stored: Stored, name: str) -> dict[str, Any]:
    header = stored.part(name, (torch.uint8,))
    stored.check_local()
    if len(header.shape) != 1 or header.numel > _MAX_STATE:
        stored.refuse(f"'{name}' is {list(header.shape)}, and at most {_MAX_STATE} bytes are read")
    text = stored.checkpoint.read(name).numpy().tobytes()
    try:
        return parse_object(text, f"'{name}'", values=_MAX_STATE)
    except CheckpointError as error:
        stored.refuse(str(error))


BITSANDBYTES = Format(
    ("bitsandbytes",),
    find,
    parts=(".SCB", ".absmax", ".quant_map"),
    plain_modules="llm_int8_skip_modules",
    dequantise="model.dequantize(), then save_pretrained(NEW)",
)
