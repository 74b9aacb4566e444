"""Whole tensors that come in blocks: they are gathered, so that they can be reduced at once.

Torch sums a tensor in an order that depends on its size. Sums of parts therefore have other last digits
than the sum of the whole, which mergekit takes. The memory is that of one tensor, for any number of
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from covmerge.maths.methods.arithmetic import inputs_of
from covmerge.maths.methods.registry import Groups

_HELD = 2**25  # entries held at once; small tensors are gathered together up to this number


@dataclass(frozen=True)
class Made:
    """A tensor of the whole's size, computed block by block."""

    experts: tuple[int, ...]  # the places of the experts that it is computed from
    # the function `(entries, base, models)` -> a block; `entries` is a slice of the flattened whole
    of: Callable[[slice, Tensor, Sequence[Tensor]], Tensor]


class TensorInBlocks:
    """A tensor of the base and of all experts, read in blocks.

    Args:
        groups: the groups that a tensor pass gets.
        numel: number of entries of the whole tensor.
        arithmetic: the dtype that inputs are cast to; see `inputs_of`.
    """

    def __init__(self, groups: Groups, numel: int, arithmetic: str | None) -> None:
        self._groups = groups
        self._arithmetic = arithmetic
        self.numel = numel

    def blocks(
        self, experts: Sequence[int] | None = None
    ) -> Iterator[tuple[slice, Tensor, Sequence[Tensor]]]:
        """Yield the base and the models of some experts, or of all, block by block."""
        done = 0
        for group in self._groups(experts):
            base, models = inputs_of(group, self._arithmetic)
            yield slice(done, done + base.numel()), base, models
            done += base.numel()

    def gathered(self, wanted: Sequence[Made]) -> Iterator[Tensor]:
        """Yield tensors `(numel,)`; as many are held at once as `_HELD` allows, but at least one."""
        step = max(1, _HELD // max(1, self.numel))
        for first in range(0, len(wanted), step):
            yield from self._some(wanted[first : first + step])

    def _some(self, wanted: Sequence[Made]) -> list[Tensor]:
        experts = sorted({place for made in wanted for place in made.experts})
        found: list[Tensor] = []
        for part, base, models in self.blocks(experts):
            known = dict(zip(experts, models, strict=True))
            for number, made in enumerate(wanted):
                block = made.of(part, base, [known[place] for place in made.experts]).reshape(-1)
                if len(found) <= number:
                    found.append(block.new_empty(self.numel))
                found[number][part] = block
        return found


def one_buffer(arithmetic: object) -> float:
    """Return the bytes per entry of one gathered tensor, which is reduced with no more beside it."""
    return 4.0 if arithmetic in ("float32", "float16", "bfloat16") else 8.0
