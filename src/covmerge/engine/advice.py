"""What a method noticed, in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor, log10
from typing import Any

from covmerge.covariance.gate import DEFAULT_TAU
from covmerge.measures.length import times_as_long
from covmerge.plan import Merge, Plan
from covmerge.text import some

_SHARE = 0.1  # of a ridge in the covariance that it may have beside an expert
_BLOWN_UP = 2.0  # times the sum of the experts' lengths from which it is more than worth knowing
_LEAST_EPS = 1e-10  # a smaller ε leaves systems that float32 cannot solve
# What a method counts in a matrix and a reader should know of, with what it means.
_COUNTED = {
    "averaged": "ACE can tell nothing of the inputs of {count} updates (rows that are nearly alike, or an "
    "ε above all that the expert did) in {tensors} tensors ({names}): they are averaged there",
    "dependent": "rounding may decide {count} directions that experts have nearly in common in {tensors} "
    "tensors ({names})",
    "arbitrary": "{count} directions with equal singular values have no order in {tensors} tensors "
    "({names}): what TIES makes of entries along them is arbitrary",
}


def method_warnings(plan: Plan, entries: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What may make the result worse.

    Args:
        plan: of the merge.
        entries: its statistics by tensor.
    """
    return (*_ridges(plan, entries), *(text for times, text in _long(entries) if times > _BLOWN_UP))


def method_notes(entries: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What is worth knowing."""
    long = (text for times, text in _long(entries) if times <= _BLOWN_UP)
    return (*_poles(entries), *_counts(entries), *long)


def outweighed(matrix: Mapping[str, Any]) -> bool:
    """Whether ACE's ε has more of an expert's covariance than the expert."""
    return bool(matrix.get("gate_fired")) and matrix["ridge_share"] >= 1.0


def _ridges(plan: Plan, entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    actions = {tensor.name: tensor.operation for tensor in plan.tensors}
    wanted: dict[str, float] = {}
    for name, entry in entries.items():
        action = actions[name]
        shares = [m["ridge_share"] for m in entry.get("matrices", ()) if outweighed(m)]
        if shares and isinstance(action, Merge):
            wanted[name] = _SHARE * action.parameters["eps"] / max(shares)
    if wanted:
        least = _rounded_down(min(wanted.values()))
        smaller = f"a smaller one (--set eps={least:g}), " if least >= _LEAST_EPS else ""
        yield (
            f"ACE's ε outweighs an expert in {len(wanted)} tensors ({some(list(wanted), 2)}): the merge "
            f"follows ε there, not the expert, and may be lost. Take {smaller}no refinement (--set "
            "refine=false), or another method (--method tsv_m)"
        )


def _long(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    """How many times as long as all of its experts' together an update is at most, in words."""
    ratios = {
        name: times
        for name, entry in entries.items()
        if "merged_norm" in entry
        and (times := times_as_long(entry["merged_norm"], entry["update_norm"].values())) > 1.0
    }
    if ratios:
        longest = max(ratios, key=lambda name: ratios[name])
        yield (
            ratios[longest],
            f"the merged update is longer than the experts' together in {len(ratios)} tensors "
            f"({some(list(ratios), 2)}), {ratios[longest]:.3g} times in '{longest}': take a smaller "
            "scale where the method has one, or another method",
        )


def _counts(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for key, text in _COUNTED.items():
        found = {
            name: count
            for name, entry in entries.items()
            if (count := sum(matrix.get(key, 0) for matrix in entry.get("matrices", ())))
        }
        if found:
            names, total = some(list(found), 2), sum(found.values())
            yield text.format(count=total, tensors=len(found), names=names)


def _poles(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    names = [
        name for name, entry in entries.items() if any(map(_at_pole, entry.get("matrices", ())))
    ]
    if names:
        yield (
            f"ACE's gate fired in {len(names)} tensors ({some(names, 2)}) whose experts are alike in "
            "size: their norms are near 1, where the paper's γ has a pole. --set gate=scale_free has "
            "none"
        )


def _at_pole(matrix: Mapping[str, Any]) -> bool:
    """Whether the paper's γ is large for its denominator alone: the scale-free one is not."""
    gamma, spread = matrix.get("gamma"), matrix.get("spread")
    if not matrix.get("gate_fired") or spread is None or spread > DEFAULT_TAU["scale_free"]:
        return False
    # None: at the pole itself. One that is no larger than the default fired by a τ that was given.
    return gamma is None or gamma > DEFAULT_TAU["paper"]


def _rounded_down(value: float) -> float:
    """To one digit."""
    if value <= 0.0:
        return 0.0
    unit = 10.0 ** floor(log10(value))
    return floor(value / unit) * unit
