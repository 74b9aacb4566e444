"""In which order work is given out: the largest first, so that nobody waits for a large item at the end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def largest_first(
    items: Iterable[T], size: Callable[[T], int], within: int | None = None
) -> Iterator[T]:
    """Yield the largest first, and of equal ones the one that came first.

    Args:
        items: taken no further than is looked ahead.
        size: of an item.
        within: how far is looked ahead: the size of all that is passed over; None: to the end.

    Example:
        >>> list(largest_first([1, 5, 2, 4], lambda size: size))
        [5, 4, 2, 1]
        >>> list(largest_first([1, 2, 5, 4], lambda size: size, within=2))
        [2, 5, 4, 1]
    """
    held: list[tuple[int, int, T]] = []
    ahead = 0
    for number, item in enumerate(items):
        heapq.heappush(held, (-size(item), number, item))
        ahead += size(item)
        while within is not None and ahead > within:
            negative, _, largest = heapq.heappop(held)
            ahead += negative
            yield largest
    while held:
        yield heapq.heappop(held)[2]
