"""Numbers of a whole tensor that comes in blocks: it is gathered, and they are taken of it as it lies.

Torch adds up a tensor in an order that hangs on its size; so sums of parts have other last digits than that
of the whole, which mergekit takes. What is held is as large as the tensor, of however many experts it is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from covmerge.maths.methods.arithmetic import inputs_of
from covmerge.maths.methods.registry import Groups

_HELD = 2**25  # entries that are held, of several tensors where so many have no more


@dataclass(frozen=True)
class Made:
    """A tensor as large as the whole, made of it block by block.

    Attributes:
        experts: the places of those that it is made of.
        of: `(entries, base, models)` -> a block of it; `entries` are those of the whole, laid out flat.
    """

    experts: tuple[int, ...]
    of: Callable[[slice, Tensor, Sequence[Tensor]], Tensor]


class TensorInBlocks:
    """A tensor of all experts, in blocks.

    Args:
        groups: what a tensor pass is given.
        numel: entries of the whole.
        arithmetic: dtype that inputs are cast to; see `inputs_of`.
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
        """Yield tensors `(numel,)`, of which no more are held at once than `_HELD` allows, or one."""
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
    """Bytes of an entry of one gathered tensor, and of what is reduced beside it."""
    return 4.0 if arithmetic in ("float32", "float16", "bfloat16") else 8.0
