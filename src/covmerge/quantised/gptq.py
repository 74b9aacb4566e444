"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

`X.qweight` `(d_in · bits / 32, d_out)` has the inputs of an output one after another in words of 32
bits, the lowest bits first; `X.qzeros` `(groups, d_out · bits / 32)` its zero points along the
outputs, less one in the format `gptq` (the word less one in each number, as GPTQModel has it) and
as they are in `gptq_v2`; `X.scales` `(groups, d_out)`; `X.g_idx` `(d_in)` the group of each input,
which "act order" mixes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.quantised.integers import WORD, Grouped, unpacked
from covmerge.quantised.packed import Found, Read, Stored
from covmerge.types import TensorHeader

_INT32 = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Weight(Grouped):
    """A layer's weight.

    Attributes:
        less_one: whether zero points are stored less one.
        mixed: name of the groups of inputs, where they are stored.
    """

    less_one: bool
    mixed: str | None

    @property
    def inputs_of_a_row(self) -> int:
        """See `Grouped.inputs_of_a_row`."""
        return WORD // self.bits

    def values(self, words: Tensor, rows: range) -> Tensor:
        """See `Grouped.values`."""
        own = words[:, rows.start : rows.stop]
        return unpacked(own, self._shifts, self.bits).transpose(1, 2).flatten(0, 1)

    def zeros(self, read: Read, rows: range) -> Tensor:
        """See `Grouped.zeros`."""
        words = read(self.stored[1], None)
        if self.less_one:
            words = words + sum(1 << int(shift) for shift in self._shifts)
        return unpacked(words, self._shifts, self.bits).flatten(1)[:, rows.start : rows.stop]

    def groups(self, read: Read) -> Tensor:
        """See `Grouped.groups`."""
        return super().groups(read) if self.mixed is None else read(self.mixed, None).long()

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(0, WORD, self.bits, dtype=torch.int32)


def find(stored: Stored) -> Found:
    """Find layers with `qweight`; see `Found`.

    Raises:
        CheckpointError: a format of GPTQ that is not read, or sizes that contradict each other.
    """
    bits = stored.setting("bits", 2, 4, 8)
    version = stored.version("gptq", "gptq_v2")
    stored.setting("is_marlin_format", False, None)
    stored.setting("pack_dtype", "int32", None)
    group = stored.group(-1)
    names = [name for name in stored.checkpoint.headers if name.endswith(".qweight")]
    tensors = tuple(
        _weight(stored, name.removesuffix(".qweight"), bits, group, version == "gptq")
        for name in names
    )
    return Found(tensors, f"GPTQ, {bits} bit, {said_of_groups(group)}")


def said_of_groups(group: int) -> str:
    """What has one scale, in words."""
    return "a scale for each row" if group == -1 else f"a scale for {group} weights"


def _weight(stored: Stored, module: str, bits: int, group: int, less_one: bool) -> Weight:
    words, zeros, scales, mixed = (
        f"{module}.{leaf}" for leaf in ("qweight", "qzeros", "scales", "g_idx")
    )
    shape = stored.part(words, _INT32).shape
    if len(shape) != 2 or 0 in shape:
        stored.refuse(f"'{words}' is {list(shape)}, where a matrix can be read")
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
    groups = mixed if len(parts) > 3 else None
    return Weight(header, parts, bits, group, stored.checkpoint.source, less_one, groups)
