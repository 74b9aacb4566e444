"""Who does what first: as many bytes for each, the largest items first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from covmerge.run.engine.order import largest_first


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide items among some, the largest first and each to whoever has least so far.

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
