"""The order in which work is given out."""

from hypothesis import given
from hypothesis import strategies as st

from covmerge.run.engine.executor import largest_first

SIZES = st.lists(st.integers(0, 100))


@given(SIZES)
def test_all_the_largest_first_and_equals_in_their_order(sizes):
    places = range(len(sizes))
    expected = sorted(places, key=lambda place: -sizes[place])
    assert list(largest_first(places, lambda place: sizes[place])) == expected


@given(SIZES, st.integers(0, 200))
def test_no_further_ahead_than_is_said(sizes, within):
    """What is taken and not yet given is never more than that and the item that is given next."""
    taken, found = [], []

    def coming():
        for place in range(len(sizes)):
            taken.append(place)
            yield place

    for place in largest_first(coming(), lambda place: sizes[place], within):
        assert sum(sizes[one] for one in taken) - sum(sizes[one] for one in found) <= (
            within + max(sizes)
        )
        found.append(place)
    assert sorted(found) == list(range(len(sizes)))
