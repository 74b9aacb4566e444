"""Numbers of a few bits in int32 words, by groups of inputs: what GPTQ and AWQ have in common.

Weights lie transposed, `(d_in, d_out)`, and w = (q − z) · s, with z and s by group of inputs and by
output. Some rows of the plain matrix are columns of what is stored: to read them takes reading all
of it, in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.errors import CheckpointError
from covmerge.quantised.packed import Read, pieces
from covmerge.types import TensorHeader

WORD = 32


@dataclass(frozen=True)
class Grouped:
    """A packed matrix; `stored` names its words, its zero points, its scales, and what else is of it.

    Attributes:
        bits: of a weight.
        group: inputs that have one scale.
        source: the checkpoint, for errors.
    """

    header: TensorHeader
    stored: tuple[str, ...]
    bits: int
    group: int
    source: str

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        """See `Packed.fill`."""
        d_out, d_in = self.header.shape
        weights, _, scale_name = self.stored[:3]
        zeros = self.zeros(read, rows).float()
        scales = read(scale_name, None)[:, rows.start : rows.stop].float()
        groups = self.groups(read)
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise CheckpointError(
                f"{self.source}: '{self.header.name}' has inputs in group {int(groups.max())} or "
                f"{int(groups.min())} of {len(scales)}: fetch it again"
            )
        held = self.inputs_of_a_row
        for part in pieces(range(d_in // held), max(d_out, held * len(rows))):
            inputs = slice(part.start * held, part.stop * held)
            values = self.values(read(weights, part), rows).float()
            own = groups[inputs]
            out[:, inputs] = values.sub_(zeros[own]).mul_(scales[own]).mT

    @property
    def inputs_of_a_row(self) -> int:
        """How many inputs of the layer one row of words has."""
        raise NotImplementedError

    def values(self, words: Tensor, rows: range) -> Tensor:
        """Unpack weights, as `(inputs, rows)`."""
        raise NotImplementedError

    def zeros(self, read: Read, rows: range) -> Tensor:
        """Return the zero points, as `(groups, rows)`."""
        raise NotImplementedError

    def groups(self, read: Read) -> Tensor:
        """Return the group of each input."""
        del read
        return torch.arange(self.header.shape[1]) // self.group


def unpacked(words: Tensor, shifts: Tensor, bits: int) -> Tensor:
    """Return the numbers in words `(...)` as `(..., numbers)`, each at its shift.

    Example:
        >>> unpacked(torch.tensor([0x21]), torch.tensor([0, 4]), 4)
        tensor([[1, 2]])
    """
    return (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
