"""What the bank says of methods: regret to the best method of each set, over all sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from covmerge_lab.bank import informed, rules

# An expert that is not so much better than the base, and than one answer to all, is not counted.
LEARNT = 0.05
_ROUNDED = 1e-6  # what writing scores with six digits may move them by
DRAWS = 2000

Scored = Mapping[str, Any]  # a set as `scoring.score` writes it


@dataclass(frozen=True)
class Row:
    """A method over many sets; all but `wins` in points of accuracy or of share.

    Attributes:
        share: mean accuracy in % of the experts'.
        regret: mean accuracy lost against the best method of each set, with its 95 % interval over bases.
        worst: largest regret of a set, and that set.
        worst_expert: mean of the smallest share that an expert of a set keeps.
        wins: sets where no method is better.
        rank: mean place among the methods that regret is measured with.
    """

    method: str
    sets: int
    share: float
    regret: float
    low: float
    high: float
    worst: float
    worst_set: str
    worst_expert: float
    wins: int
    rank: float


def is_candidate(name: str) -> bool:
    """Whether a row is no data-free method: a mean of merges, a rule that was tried, or one with inputs.

    Earlier rules of `auto`, and `auto` with other constants or a change, are rules that were tried.
    """
    tried = name.startswith((rules.PREFIX, "auto, "))
    return " + " in name or tried or name in informed.TITLES


def counted(scored: Scored) -> list[str]:
    """Return the experts of a set that learnt something."""
    own, least = scored["experts"], (scored["base"], scored["always"])
    return [name for name in own if own[name] >= max(s[name] for s in least) + LEARNT - _ROUNDED]


def accuracy(scored: Scored, model: Mapping[str, float]) -> float:
    """Return a model's mean accuracy over the experts that count."""
    return fmean(model[name] for name in counted(scored))


def regret(scored: Scored, method: str) -> float:
    """Return what a method loses against the best data-free method of a set, in points."""
    names = [name for name in scored["methods"] if not is_candidate(name)]
    best = max(accuracy(scored, scored["methods"][name]) for name in names)
    return 100 * (best - accuracy(scored, scored["methods"][method]))


def usable(sets: Sequence[Scored]) -> list[Scored]:
    """Return the sets in which at least three experts count."""
    return [scored for scored in sets if len(counted(scored)) >= 3]


def rows(
    sets: Sequence[Scored],
    methods: Sequence[str] | None = None,
    rivals: Sequence[str] | None = None,
) -> list[Row]:
    """Return a row for each method, smallest regret first.

    Args:
        sets: scored sets.
        methods: which; by default all that a set has. A set without one does not count for it.
        rivals: whose best is the measure of regret; by default all methods, and no candidate.
    """
    kept = usable(sets)
    names = methods or list(dict.fromkeys(m for s in kept for m in s["methods"]))
    rivals = rivals or [name for name in names if not is_candidate(name)]
    regrets: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for scored in kept:
        every = scored["methods"]
        values = {n: accuracy(scored, every[n]) for n in {*names, *rivals} if n in every}
        best = max(values[name] for name in rivals if name in values)
        whole = accuracy(scored, scored["experts"])
        others = [values[name] for name in rivals if name in values]
        for name in (name for name in names if name in values):
            regrets[name].append(100 * (best - values[name]))
            least = min(every[name][e] / scored["experts"][e] for e in counted(scored))
            found[name].append(
                (100 * values[name] / whole, 100 * least, 1 + sum(o > values[name] for o in others))
            )
    having = {name: [s for s in kept if name in s["methods"]] for name in names}
    return sorted(
        (_row(name, regrets[name], found[name], having[name]) for name in names),
        key=lambda row: row.regret,
    )


def _row(name: str, regrets: Sequence[float], found: Any, sets: Sequence[Scored]) -> Row:
    worst = int(np.argmax(regrets))
    low, high = over_bases(regrets, [scored["card"]["base"] for scored in sets])
    shares, leasts, ranks = zip(*found, strict=True)
    return Row(
        name, len(regrets), fmean(shares), fmean(regrets), low, high, regrets[worst],
        sets[worst]["card"]["name"], fmean(leasts), sum(r < 1e-9 for r in regrets), fmean(ranks),
    )  # fmt: skip


def over_bases(values: Sequence[float], groups: Sequence[str]) -> tuple[float, float]:
    """Return the 95 % interval of a mean: bases are drawn with replacement, each with all its sets."""
    draw: Any = np.random.default_rng(0)
    by_group = {g: [v for v, h in zip(values, groups, strict=True) if h == g] for g in set(groups)}
    names = sorted(by_group)
    means: list[float] = []
    for _ in range(DRAWS):
        drawn = draw.choice(len(names), len(names))
        means.append(fmean(v for i in drawn for v in by_group[names[i]]))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def by_halves(sets: Sequence[Scored]) -> str:
    """Return regrets to the method that is best on the other half of the test examples.

    The best of many methods on 200 examples is partly the luckiest, so `rows` overstates what is lost to
    it. Here luck does not count, as each half judges what the other chose. The method that is chosen is
    not always the best one, so what is lost is understated.
    """
    kept = [scored for scored in usable(sets) if scored.get("halves")]
    regrets: dict[str, list[tuple[str, float]]] = {}
    for scored in kept:
        found = {
            # Equal ones are equal also where scores were stored with six digits.
            name: [round(fmean(model[e][half] for e in counted(scored)), 5) for half in (0, 1)]
            for name, model in scored["halves"].items()
        }
        rivals = [name for name in found if not is_candidate(name)]
        best = [max(rivals, key=lambda name: found[name][half]) for half in (0, 1)]
        for name, (first, second) in found.items():
            lost = (found[best[1]][0] - first + found[best[0]][1] - second) / 2
            regrets.setdefault(name, []).append((scored["card"]["base"], 100 * lost))
    lines: list[tuple[float, str]] = []
    for name, values in regrets.items():
        low, high = over_bases([value for _, value in values], [base for base, _ in values])
        mean = fmean(value for _, value in values)
        lines.append((mean, f"| {name} | {len(values)} | {mean:.1f} | {low:.1f} to {high:.1f} |"))
    head = ["| method | sets | regret by halves | 95 % |", "|---|---|---|---|"]
    return "\n".join([*head, *(line for _, line in sorted(lines))])


def markdown(found: Sequence[Row]) -> str:
    """Return rows as a table."""
    names = (
        "method",
        "sets",
        "share",
        "regret",
        "95 %",
        "worst set",
        "worst expert",
        "wins",
        "rank",
    )
    head = f"| {' | '.join(names)} |"
    rule = f"|{'---|' * len(names)}"
    lines = [
        f"| {r.method} | {r.sets} | {r.share:.1f} | {r.regret:.1f} | {r.low:.1f} to {r.high:.1f} | "
        f"{r.worst:.1f} ({r.worst_set}) | {r.worst_expert:.0f} | {r.wins} | {r.rank:.1f} |"
        for r in found
    ]
    return "\n".join([head, rule, *lines])


def differences(sets: Sequence[Scored], against: str) -> str:
    """Return how much better each method is than one, in points, on the sets that both merge."""
    lines: list[tuple[float, str]] = []
    for name in dict.fromkeys(m for scored in sets for m in scored["methods"]):
        both = [s for s in sets if {name, against} <= set(s["methods"])]
        if name == against or not both:
            continue
        found = [
            100 * (accuracy(s, s["methods"][name]) - accuracy(s, s["methods"][against]))
            for s in both
        ]
        low, high = over_bases(found, [s["card"]["base"] for s in both])
        mean = fmean(found)
        lines.append((-mean, f"| {name} | {len(both)} | {mean:.1f} | {low:.1f} to {high:.1f} |"))
    head = [f"| method | sets | better than {against} | 95 % |", "|---|---|---|---|"]
    return "\n".join([*head, *(line for _, line in sorted(lines))])
