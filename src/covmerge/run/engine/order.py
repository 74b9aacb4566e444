"""The order of work: the largest first, and equal shares; nobody waits for a large item at the end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def largest_first(
    items: Iterable[T], size: Callable[[T], int], within: int | None = None
) -> Iterator[T]:
    """Yield the largest first, and of equal ones the one that came first.

    Args:
        items: read no further ahead than `within`.
        size: of an item.
        within: how far ahead items are read: the size of all that is passed over; None: to the end.

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


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items among some, the largest first and each to the one that has least so far.

    Returns:
        The places of each one's items, the largest first.

    Example:
        >>> shares([1, 5, 2, 4], 2)
        [[1, 0], [3, 2]]
    """
    divided: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for place in largest_first(range(len(sizes)), lambda place: sizes[place]):
        load, number = heapq.heappop(loads)
        divided[number].append(place)
        heapq.heappush(loads, (load + sizes[place], number))
    return divided


def own_first(sizes: Sequence[int], number: int, count: int) -> list[int]:
    """Return the places of all items: one's own share, then what the others would come to last.

    Example:
        >>> own_first([1, 5, 2, 4], 1, 2)
        [3, 2, 0, 1]
    """
    divided = shares(sizes, count)
    others = [divided[(number + step) % count] for step in range(1, count)]
    return divided[number] + [place for share in others for place in reversed(share)]
