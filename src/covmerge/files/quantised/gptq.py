"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

`X.qweight` `(d_in · bits / 32, d_out)` has the inputs of an output one after another in 32-bit words, the
lowest bits first. `X.qzeros` `(groups, d_out · bits / 32)` has the zero points along the outputs: less
one in the format `gptq` (one is subtracted from every number of a word, as in GPTQModel), as they are in
`gptq_v2`. `X.scales` is `(groups, d_out)`; `X.g_idx` `(d_in)` is the group of each input, which "act
order" mixes. 32 numbers of 3 bits take three words, and two of the numbers cross the ends of words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.integers import WORD, Grouped, Mixed, in_a_row, run_of
from covmerge.files.quantised.packed import SMALLEST, Format, Found, Read, Stored

_BITS = (2, 3, 4, 8)
# Settings that a single layer may not change.
_LAYOUTS = frozenset(("format", "checkpoint_format", "pack_dtype", "is_marlin_format"))
_INT32 = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Weight(Grouped):
    """The packed weight of a layer.

    Attributes:
        less_one: whether zero points are stored less one.
        mixed: the stored group of each input; None: groups are in order.
    """

    less_one: bool
    mixed: Mixed | None

    @property
    def run(self) -> tuple[int, int]:
        return run_of(self.bits)

    def values(self, words: Tensor, rows: range) -> Tensor:
        return in_a_row(words[:, rows.start : rows.stop].mT, self.bits).mT

    def zeros(self, read: Read, rows: range) -> Tensor:
        words = read(self.stored[1], None)
        across = run_of(self.bits)[1] > 1  # words per run: then one is added to each number
        if self.less_one and not across:
            words = words + sum(1 << shift for shift in range(0, WORD, self.bits))
        zeros = in_a_row(words, self.bits)[:, rows.start : rows.stop]
        return (zeros + 1) & (2**self.bits - 1) if self.less_one and across else zeros

    def groups(self, read: Read, count: int) -> Tensor:
        mixed = None if self.mixed is None else self.mixed.groups(read, count)
        return super().groups(read, count) if mixed is None else mixed


def find(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    bits = stored.setting("bits", *_BITS)
    version = stored.version("gptq", "gptq_v2")
    stored.setting("is_marlin_format", False, None)
    stored.setting("pack_dtype", "int32", None)
    group = stored.group(-1)
    varied = _varied(stored)
    names = [name for name in stored.checkpoint.headers if name.endswith(".qweight")]
    tensors = tuple(
        _weight(stored, module, *sizes, version == "gptq")
        for module in (name.removesuffix(".qweight") for name in names)
        for sizes in (_sizes(stored, module) if varied else (bits, group),)
    )
    beside = ", other sizes by layer (dynamic)" if varied else ""
    return Found(tensors, f"GPTQ, {bits} bit, {said_of_groups(group)}{beside}")


def _varied(stored: Stored) -> bool:
    """Return whether some layers have their own bits or groups, which GPTQModel sets by name patterns."""
    given: object = stored.settings.get("dynamic") or {}
    if not isinstance(given, dict):
        stored.refuse(f"its dynamic is {shorten(given)}, where patterns of names can be read")
    found = False
    for pattern, settings in cast("dict[str, object]", given).items():
        if pattern.startswith("-:"):  # the layers of this pattern are plain
            continue
        changed = cast("dict[str, object]", settings) if isinstance(settings, dict) else {}
        strange = sorted(changed.keys() & _LAYOUTS)
        if strange:
            stored.refuse(f"its dynamic has layers of another {strange[0]} ({shorten(pattern)})")
        found = found or bool(changed.keys() & {"bits", "group_size"})
    return found


def _sizes(stored: Stored, module: str) -> tuple[int, int]:
    """Return bits and group size of a layer, from the sizes of its stored tensors.

    A stranger's pattern of names is therefore never matched.
    """
    shape = stored.part(f"{module}.qweight", _INT32).shape
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
            f"'{module}.qweight' is {list(shape)} beside zero points of {list(zeros)}, no layer's "
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


def _weight(stored: Stored, module: str, bits: int, group: int, less_one: bool) -> Weight:
    words, zeros, scales, mixed = (
        f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx")
    )
    shape = stored.part(words, _INT32).shape
    if len(shape) != 2 or 0 in shape:
        stored.refuse(f"'{words}' is {list(shape)}, where a matrix can be read")
    if not _are_whole(bits, *shape):
        stored.refuse(
            f"'{words}' is {list(shape)}, where layers of {bits} bits have sizes that {WORD} divides"
        )
    d_in, d_out = shape[0] * WORD // bits, shape[1]
    group = d_in if group == -1 else group
    count = -(-d_in // group)
    stored.part(scales, _SCALES, (count, d_out))
    stored.part(zeros, _INT32, (count, -(-d_out * bits // WORD)))
    parts = (words, zeros, scales)
    if mixed in stored.checkpoint.headers:
        stored.part(mixed, _INT32, (d_in,))
        parts = (*parts, mixed)
    header = TensorHeader(f"{module}.weight", (d_out, d_in), stored.dtype)
    groups = Mixed(mixed, stored.checkpoint.source) if len(parts) > 3 else None
    return Weight(header, parts, bits, group, less_one, groups)


FORMAT = Format(
    ("gptq",),
    find,
    parts=(".qweight", ".qzeros", ".scales", ".g_idx"),
)
