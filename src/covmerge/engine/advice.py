"""Merged updates that were blown up, in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covmerge.measures.length import times_as_long
from covmerge.noticed import Account
from covmerge.text import some

_BLOWN_UP = 2.0  # times the sum of the experts' lengths from which it is more than worth knowing


def account_of_lengths(entries: Mapping[str, Mapping[str, Any]]) -> Account:
    """How many times as long as all of its experts' together an update is at most, in words."""
    ratios = {
        name: times
        for name, entry in entries.items()
        if "merged_norm" in entry
        and (times := times_as_long(entry["merged_norm"], entry["update_norm"].values())) > 1.0
    }
    if not ratios:
        return Account()
    longest = max(ratios, key=lambda name: ratios[name])
    text = (
        f"the merged update is longer than the experts' together in {len(ratios)} tensors "
        f"({some(list(ratios), 2)}), {ratios[longest]:.3g} times in '{longest}': take a smaller "
        "scale where the method has one, or another method"
    )
    return Account(warnings=(text,)) if ratios[longest] > _BLOWN_UP else Account(notes=(text,))
