"""What runs by day: few rows of a product in which all values of its axes meet, and few examples."""

import os
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from math import gcd

EVERYTHING = "COVMERGE_TESTS_RUN_EVERYTHING"  # set by conftest.py before tests are imported
Row = Mapping[str, Hashable]  # by axis, a value


def covering(rows: Sequence[Row], strength: int) -> list[int]:
    """Choose rows so that any `strength` values of different axes that meet in a row meet in a chosen one.

    The longest axes go through their product, and the values of the others go round meanwhile.

    Args:
        rows: all of them, of the same axes.
        strength: 1 for every value, 2 for every pair.

    Returns:
        The places of the chosen rows, ascending.
    """
    places: dict[str, dict[Hashable, int]] = {}
    for row in rows:
        for axis, value in row.items():
            own = places.setdefault(axis, {})
            own.setdefault(value, len(own))
    axes = sorted(places, key=lambda axis: -len(places[axis]))

    def out_of_turn(place: int) -> int:
        own = {axis: places[axis][value] for axis, value in rows[place].items()}
        turn, period, off = sum(own[axis] for axis in axes[:strength]), 1, 0
        for axis in reversed(axes[strength:]):
            size = len(places[axis])
            # An axis that would only meet every other value of those before skips one each time round.
            skipped = turn // period if gcd(period, size) > 1 else 0
            off += own[axis] != (turn + skipped) % size
            period *= size
        return off

    covered: set[tuple[tuple[str, Hashable], ...]] = set()
    chosen: list[int] = []
    for place in sorted(range(len(rows)), key=out_of_turn):
        met = set(combinations([(axis, rows[place][axis]) for axis in axes], strength))
        if not met <= covered:
            covered |= met
            chosen.append(place)
    return sorted(chosen)


def by_day(some: int, everything: int) -> int:
    """How many examples of Hypothesis a test has: the first `some` of them, at night everything."""
    return everything if EVERYTHING in os.environ else some
