"""Finds the thresholds of global passes: one magnitude for each expert of each pass."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from covmerge.maths.linalg.select import MagnitudeSelect, threshold_rank
from covmerge.plan.planning.operations import Count
from covmerge.plan.planning.types import Plan, PlannedPass

# Number of bits in which a guess is assumed to be right. A guess from a sixteenth of a language model of
# 135M parameters was up to 1.2 % off, from a sixteenth of an encoder of 22M up to 3.5 %.
_GUESSED = 5
_COUNTERS = 8 * 2 ** (24 - _GUESSED)  # bytes of an expert's counters around its guess

Thresholds = Mapping[str, Mapping[str, float]]  # Merge.key -> expert -> threshold


def counters_of(plans: Sequence[Plan]) -> int:
    """Return the bytes of all experts' counters, and of their sums, in global passes with a sample."""
    global_passes = (
        global_pass for plan in plans for global_pass in plan.global_passes if global_pass.sample
    )
    return sum((len(global_pass.experts) + 1) * _COUNTERS for global_pass in global_passes)


class Selections:
    """The counters of all experts of all global passes. Any thread may add to them."""

    def __init__(
        self,
        global_passes: Sequence[Sequence[PlannedPass]],
        dtype: torch.dtype,
        guesses: Sequence[Thresholds],
    ) -> None:
        """Prepare to find the thresholds of each plan's global passes, near the guesses."""
        self._selects = [
            {
                global_pass.merge.key: {
                    expert: MagnitudeSelect(
                        partial(threshold_rank, global_pass.density),
                        dtype,
                        near=guessed.get(global_pass.merge.key, {}).get(expert),
                        bits=_GUESSED,
                    )
                    for expert in global_pass.experts
                }
                for global_pass in passes
            }
            for passes, guessed in zip(global_passes, guesses, strict=True)
        ]

    @property
    def settled(self) -> bool:
        """Whether all thresholds are found."""
        return all(select.settled for select in self._all())

    def add(self, count: Count, expert: str, vector: Tensor) -> None:
        """Count values of an expert in this pass."""
        select = self._selects[count.plan][count.merge.key][expert]
        if not select.settled:
            select.add(vector)

    def emptied(self) -> Selections:
        """Return a copy for the same pass that has counted nothing."""
        other = copy.deepcopy(self)
        for select in other._all():
            select.forget()
        return other

    def counted(self) -> bytes:
        """Return this pass's counters for `absorb_counted`, compressed: most counters are 0."""
        counts = (select.counted() for select in self._all() if not select.settled)
        return zlib.compress(b"".join(counts), level=1)

    def absorb_counted(self, counts: memoryview) -> None:
        """Add the counters of another process in the same pass.

        Raises:
            ValueError: the bytes are not counters of this pass.
        """
        selects = [select for select in self._all() if not select.settled]
        size = sum(select.counted_bytes for select in selects)
        try:  # decompress at most the expected size, whatever the bytes claim
            whole = memoryview(zlib.decompressobj().decompress(counts, size + 1))
        except zlib.error:
            whole = memoryview(b"")
        if len(whole) != size:
            raise ValueError(f"{len(counts)} bytes of counts are not of this pass")
        for select in selects:
            select.absorb_counted(whole[: select.counted_bytes])
            whole = whole[select.counted_bytes :]

    def end_pass(self) -> None:
        """Use the counts of all rows: settle thresholds, or narrow their ranges for the next pass."""
        for select in self._all():
            if not select.settled:
                select.end_pass()

    def thresholds(self) -> list[Thresholds]:
        """Return the thresholds found, by plan."""
        return [
            {
                key: {expert: select.value for expert, select in experts.items()}
                for key, experts in selects.items()
            }
            for selects in self._selects
        ]

    def _all(self) -> Iterator[MagnitudeSelect]:
        for selects in self._selects:
            for experts in selects.values():
                yield from experts.values()
