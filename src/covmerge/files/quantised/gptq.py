"""GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978): integers in words of the transposed matrix.

w = (q − z) · s, with z and s per group of inputs and per output; `X.scales` is `(groups, d_out)`.

GPTQ, as AutoGPTQ and GPTQModel store it: `X.qweight` `(d_in · bits / 32, d_out)` has the inputs of an
output one after another, the lowest bits first. `X.qzeros` `(groups, d_out · bits / 32)` has the zero
points along the outputs: less one in the format `gptq` (one is subtracted from every number of a word, as
in GPTQModel), as they are in `gptq_v2`. `X.g_idx` `(d_in)` is the group of each input, which "act order"
mixes. 32 numbers of 3 bits take three words, and two of the numbers cross the ends of words.

AWQ, version "gemm" as AutoAWQ stores it: `X.qweight` `(d_in, d_out / 8)` and `X.qzeros`
`(groups, d_out / 8)` hold eight outputs per word; the 4-bit places of a word, from the lowest on, hold
outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import as_object, shorten
from covmerge.files.quantised.integers import WORD, Mixed, in_a_row, run_of
from covmerge.files.quantised.packed import SMALLEST, Format, Found, Read, Stored, pieces

_BITS = (2, 3, 4, 8)
_OF_AWQ = 4  # its bits
AWQ_SHIFTS = tuple(_OF_AWQ * place for place in (0, 4, 1, 5, 2, 6, 3, 7))
# Settings that a single layer may not change.
_LAYOUTS = frozenset(("format", "checkpoint_format", "pack_dtype", "is_marlin_format"))
_INT32 = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_WEIGHT = ".qweight"


@dataclass(frozen=True)
class Grouped:
    """A packed matrix; `stored` names its words, zero points and scales, followed by any other parts.

    Rows of the plain matrix are columns of the stored one, so reading some rows means reading all of it, in
    pieces.

    Attributes:
        bits: bits of a number.
        group: inputs with one scale.
        shifts: the places of numbers in a word, which are several outputs (AWQ); None: they are in order,
            and are inputs of one output (GPTQ).
        less: the number that was subtracted from zero points.
        mixed: the stored group of each input; None: groups are in order.
    """

    header: TensorHeader
    stored: tuple[str, ...]
    bits: int
    group: int
    shifts: tuple[int, ...] | None = None
    less: int = 0
    mixed: Mixed | None = None

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        d_out, d_in = self.header.shape
        weights, zero_name, scale_name = self.stored[:3]
        zeros = self._zeros(read(zero_name, None), rows).float()
        scales = read(scale_name, None)[:, rows.start : rows.stop].float()
        groups = None if self.mixed is None else self.mixed.groups(read, len(scales))
        groups = torch.arange(d_in) // self.group if groups is None else groups
        # The fewest inputs that fill whole rows of words, and the number of these rows.
        held, high = run_of(self.bits) if self.shifts is None else (1, 1)
        for part in pieces(range(d_in // held), max(high * d_out, held * len(rows))):
            inputs = slice(part.start * held, part.stop * held)
            words = read(weights, range(part.start * high, part.stop * high))
            indices = groups[inputs]
            values = self._values(words, rows).float()
            out[:, inputs] = values.sub_(zeros[indices]).mul_(scales[indices]).mT

    def _values(self, words: Tensor, rows: range) -> Tensor:
        """Return unpacked weights, as `(inputs, rows)`."""
        if self.shifts is None:
            return in_a_row(words[:, rows.start : rows.stop].mT, self.bits).mT
        return self._outputs(words, rows, self.shifts)

    def _zeros(self, words: Tensor, rows: range) -> Tensor:
        """Return the zero points, as `(groups, rows)`."""
        if self.shifts is not None:
            return self._outputs(words, rows, self.shifts)
        across = run_of(self.bits)[1] > 1  # words per run: then it is added to each number
        if not across:
            words = words + sum(self.less << shift for shift in range(0, WORD, self.bits))
        zeros = in_a_row(words, self.bits)[:, rows.start : rows.stop]
        return (zeros + self.less) & (2**self.bits - 1) if across else zeros

    def _outputs(self, words: Tensor, rows: range, shifts: tuple[int, ...]) -> Tensor:
        count = len(shifts)
        first = rows.start // count
        part = words[:, first : -(-rows.stop // count)]
        numbers = (part.unsqueeze(-1) >> torch.tensor(shifts, dtype=torch.int32)) & (
            2**self.bits - 1
        )
        start = rows.start - first * count
        return numbers.flatten(1)[:, start : start + len(rows)]


def find_gptq(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    bits = stored.setting("bits", *_BITS)
    version = stored.version("gptq", "gptq_v2")
    stored.setting("is_marlin_format", False, None)
    stored.setting("pack_dtype", "int32", None)
    group = stored.group(-1)
    varied = _varied(stored)
    tensors = tuple(
        _weight(stored, module, *sizes, less=int(version == "gptq"))
        for module in stored.modules(_WEIGHT)
        for sizes in (_sizes(stored, module) if varied else (bits, group),)
    )
    beside = ", other sizes by layer (dynamic)" if varied else ""
    return Found(tensors, f"GPTQ, {bits} bit, {said_of_groups(group)}{beside}")


def find_awq(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    stored.setting("bits", _OF_AWQ)
    stored.setting("version", "gemm", "GEMM", None)
    stored.version("gemm", "GEMM")
    group = stored.group(128)
    modules = stored.modules(_WEIGHT)
    tensors = tuple(_weight(stored, module, _OF_AWQ, group, AWQ_SHIFTS) for module in modules)
    return Found(tensors, f"AWQ, {_OF_AWQ} bit, {said_of_groups(group)}")


def _varied(stored: Stored) -> bool:
    """Return whether some layers have their own bits or groups, which GPTQModel sets by name patterns."""
    given: object = stored.settings.get("dynamic") or {}
    if not isinstance(given, dict):
        stored.refuse(f"its dynamic is {shorten(given)}, where patterns of names can be read")
    found = False
    for pattern, settings in cast("dict[str, object]", given).items():
        if pattern.startswith("-:"):  # the layers of this pattern are plain
            continue
        changed = as_object(settings)
        strange = sorted(changed.keys() & _LAYOUTS)
        if strange:
            stored.refuse(f"its dynamic has layers of another {strange[0]} ({shorten(pattern)})")
        found = found or bool(changed.keys() & {"bits", "group_size"})
    return found


def _sizes(stored: Stored, module: str) -> tuple[int, int]:
    """Return bits and group size of a layer, from the sizes of its stored tensors.

    A stranger's pattern of names is therefore never matched.
    """
    shape = stored.part(f"{module}{_WEIGHT}", _INT32).shape
    zeros = stored.part(f"{module}.qzeros", _INT32).shape
    found = [
        bits
        for bits in _BITS
        if len(shape) == 2
        and zeros == (*zeros[:1], -(-shape[1] * bits // WORD))
        and _are_whole(bits, *shape)
    ]
    inputs = shape[0] * WORD // found[0] if found else 0
    groups = zeros[0] if zeros else 0
    if len(found) != 1 or not groups or inputs % groups or inputs < SMALLEST * groups:
        stored.refuse(
            f"'{module}{_WEIGHT}' is {list(shape)} beside zero points of {list(zeros)}, no layer's "
            f"of {', '.join(map(str, _BITS))} bits in groups of one size"
        )
    return found[0], inputs // groups


def _are_whole(bits: int, rows: int, d_out: int) -> bool:
    """Return whether words and zero points are whole runs; for 3 bits no client reads a partial run."""
    count, high = run_of(bits)
    return high == 1 or (rows % high == 0 and d_out % count == 0)


def said_of_groups(group: int) -> str:
    """Describe the weights with one scale."""
    return "a scale for each row" if group == -1 else f"a scale for {group} weights"


def _weight(
    stored: Stored,
    module: str,
    bits: int,
    group: int,
    shifts: tuple[int, ...] | None = None,
    less: int = 0,
) -> Grouped:
    words, zeros, scales, mixed = (
        f"{module}{end}" for end in (_WEIGHT, ".qzeros", ".scales", ".g_idx")
    )
    rows, columns = stored.matrix(words, _INT32)
    if not _are_whole(bits, rows, columns):
        stored.refuse(
            f"'{words}' is {[rows, columns]}, where layers of {bits} bits have sizes that {WORD} divides"
        )
    if shifts is None:
        d_in, d_out = rows * WORD // bits, columns
    else:
        d_in, d_out = rows, columns * WORD // bits
    group = d_in if group == -1 else group
    count = -(-d_in // group)
    stored.part(scales, _SCALES, (count, d_out))
    stored.part(zeros, _INT32, (count, -(-d_out * bits // WORD)))
    header = TensorHeader(f"{module}.weight", (d_out, d_in), stored.dtype)
    if shifts is not None or mixed not in stored.checkpoint.headers:
        return Grouped(header, (words, zeros, scales), bits, group, shifts, less)
    stored.part(mixed, _INT32, (d_in,))
    groups = Mixed(mixed, stored.checkpoint.source)
    return Grouped(header, (words, zeros, scales, mixed), bits, group, less=less, mixed=groups)


GPTQ = Format(("gptq",), find_gptq, parts=(_WEIGHT, ".qzeros", ".scales", ".g_idx"))
AWQ = Format(
    ("awq",),
    find_awq,
    parts=(_WEIGHT, ".qzeros", ".scales"),
    plain_modules="modules_to_not_convert",
)
