"""The expert of a set that a merge keeps least of: in all sets, and in sets with unequal experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from covmerge_lab.bank import table
from covmerge_lab.bank.table import Scored

_LONG = 2.0  # times as long as the other experts in the mean
_NEAR = 5.0  # points


def _has_a_long_one(scored: Scored) -> bool:
    """Whether one expert is far longer than the others; nothing is known where no matrix is merged."""
    lengths = sorted(scored.get("lengths", {}).values())
    return len(lengths) > 1 and lengths[-1] >= _LONG * fmean(lengths[:-1])


def _has_twins(scored: Scored) -> bool:
    """Whether two experts learnt one task."""
    learnt = Counter(e["task"] for e in scored["card"]["experts"] if not e["shuffled"])
    return max(learnt.values()) > 1


def _has_a_useless_one(scored: Scored) -> bool:
    """Whether one expert learnt shuffled labels."""
    return any(expert["shuffled"] for expert in scored["card"]["experts"])


KINDS: Mapping[str, Callable[[Scored], bool]] = {
    "all sets": lambda scored: True,
    "one long expert": _has_a_long_one,
    "two of one task": _has_twins,
    "one useless expert": _has_a_useless_one,
}


def share(scored: Scored, method: str) -> float:
    """Return the smallest share of its accuracy that an expert keeps, in %."""
    found, own = scored["methods"][method], scored["experts"]
    return 100 * min(found[name] / own[name] for name in table.counted(scored))


def markdown(sets: Sequence[Scored]) -> str:
    """Return a row for each data-free method that merges all sets of a kind, best first.

    A cell has the worst expert's share in the mean, how far that is behind the method that keeps most of
    its worst expert, and in how many sets that is at most five points.
    """
    groups = {kind: list(filter(has, table.usable(sets))) for kind, has in KINDS.items()}
    rows: dict[str, dict[str, tuple[float, str]]] = {}
    for kind, own in groups.items():
        shares = [
            {name: share(s, name) for name in s["methods"] if not table.is_candidate(name)}
            for s in own
        ]
        for name in dict.fromkeys(name for found in shares for name in found):
            if all(name in found for found in shares):
                lost = [max(found.values()) - found[name] for found in shares]
                near = sum(value <= _NEAR + 1e-9 for value in lost)
                mean = fmean(found[name] for found in shares)
                said = f"{mean:.0f}, {fmean(lost):.0f} behind, {near} near"
                rows.setdefault(name, {})[kind] = fmean(lost), said
    head = ["method", *(f"{kind} ({len(own)})" for kind, own in groups.items())]
    order = sorted(rows, key=lambda name: rows[name].get("all sets", (1e9, ""))[0])
    lines = [
        f"| {name} | {' | '.join(rows[name].get(kind, (0, ''))[1] for kind in KINDS)} |"
        for name in order
    ]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])
