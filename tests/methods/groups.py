"""Layers for tests: those that `covmerge.testing` checks other people's methods on."""

from covmerge.maths.testing.groups import (
    group_of,
    permuted,
    random_rotation,
    random_updates,
    relative,
)

__all__ = ["group_of", "permuted", "random_rotation", "random_updates", "relative"]
