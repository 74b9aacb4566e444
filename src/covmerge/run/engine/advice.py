"""Merged updates that were blown up: a message with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covmerge.base.diagnostics import MergeSummary, TensorDiagnostics
from covmerge.base.text import counted, some
from covmerge.maths.measures.length import times_as_long

_BLOWN_UP = 2.0  # times the sum of the experts' lengths from which it is more than worth knowing


def account_of_lengths(
    entries: Mapping[str, Mapping[str, Any]], diagnostics: Sequence[TensorDiagnostics] = ()
) -> MergeSummary:
    """How many times as long as all of its experts' together an update is at most, in words.

    Args:
        entries: of the tensors, as in covmerge.json.
        diagnostics: the methods', of them; one that goes by the lengths of outputs is taken at that.
    """
    outputs = {
        one.tensor: max(lengths)
        for one in diagnostics
        if (lengths := [m.length_in_outputs for m in one.matrices]) and None not in lengths
    }
    ratios = {
        name: times
        for name, entry in entries.items()
        if "merged_norm" in entry
        and (times := times_as_long(entry["merged_norm"], entry["update_norm"].values())) > 1.0
    }
    meant = {name: times for name, times in ratios.items() if outputs.get(name, 2.0) <= 1.0}
    long = {name: times for name, times in ratios.items() if name not in meant}
    account = MergeSummary()
    if long:
        text = f"{_longest(long)}: take a smaller scale where the method has one, or another method"
        blown_up = max(long.values()) > _BLOWN_UP
        account += MergeSummary(warnings=(text,)) if blown_up else MergeSummary(notes=(text,))
    if meant:
        most = max(outputs[name] for name in meant)
        text = (
            f"{_longest(meant)}, but not what it adds to the outputs: on the inputs that it looked at that "
            f"is at most {most:.2g} times as long as the experts' together there. It is longer where these "
            "inputs hardly ever go; on inputs very unlike them outputs may be too"
        )
        account += MergeSummary(notes=(text,))
    return account


def _longest(ratios: Mapping[str, float]) -> str:
    longest = max(ratios, key=lambda name: ratios[name])
    return (
        f"the merged update is longer than the experts' together in {counted(len(ratios), 'tensor')} "
        f"({some(list(ratios), 2)}), {ratios[longest]:.3g} times in '{longest}'"
    )
