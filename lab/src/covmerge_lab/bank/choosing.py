"""How well ways of choosing a method without data rank the methods of a set, and what their choice loses.

Whatever is fitted is fitted on the other bases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import fmean
from typing import Any

import numpy as np

from covmerge_lab.bank import candidates, rules, table
from covmerge_lab.bank.criteria import CRITERIA, FEATURES
from covmerge_lab.bank.table import Scored

_np: Any = np
Values = Mapping[str, float]  # a number for each method of a set: a larger one is better
Way = Callable[[Scored, Sequence[Scored]], Values]  # of a set, by the sets of other bases
_RIDGE = 1.0  # in units of the number of rows, where each column has variance 1
_NEIGHBOURS = 5


def markdown(sets: Sequence[Scored]) -> str:
    """Return a row for each way of choosing: rank correlations, and the regret of its choice.

    A set whose merges differ in no matrix has no criteria, and is left out. The choice is among published
    methods, in one row among candidates for `auto`. `auto` itself is the row to compare with.
    """
    kept = [scored for scored in table.usable(sets) if scored.get("criteria")]
    lines = [_line(name, way, kept) for name, way in WAYS.items()]
    lines.sort(key=lambda line: line[0])
    lines.insert(
        0, (0.0, f"| half of the test examples | {_correlated(_halves(kept), kept)} | | | |")
    )
    head = [
        "way",
        "rank correlation",
        "95 %",
        "full",
        "adapters",
        "mixed",
        "regret",
        "95 %",
        "worst",
    ]
    rule = f"|{'---|' * len(head)}"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(line for _, line in lines)])


def published(scored: Scored) -> list[str]:
    """Return the methods of a set that are ranked: those whose merges are kept, without `auto`."""
    known = set(scored["methods"]) - {"auto", rules.SECOND}
    return [name for name in scored["criteria"] if name in known]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank. 0 where all are equal."""
    first, second = _ranks(one), _ranks(other)
    if not first.std() or not second.std():
        return 0.0
    return float(_np.corrcoef(first, second)[0, 1])


def _line(name: str, way: Way | None, sets: Sequence[Scored]) -> tuple[float, str]:
    bases = [scored["card"]["base"] for scored in sets]
    correlations: list[float] = []
    regrets: list[float] = []
    for scored in sets:
        chosen = "auto"
        if way is not None:
            others = [s for s in sets if s["card"]["base"] != scored["card"]["base"]]
            values = way(scored, others)
            names = list(values)
            found = [table.accuracy(scored, scored["methods"][n]) for n in names]
            correlations.append(rank_correlation([values[n] for n in names], found))
            chosen = max(names, key=values.__getitem__)
        regrets.append(table.regret(scored, chosen))
    low, high = table.over_bases(regrets, bases)
    lost = f"{fmean(regrets):.1f} | {low:.1f} to {high:.1f} | {max(regrets):.1f}"
    if way is None:
        return fmean(regrets), f"| {name} | | | | | | {lost} |"
    return fmean(regrets), f"| {name} | {_correlated(correlations, sets)} | {lost} |"


def _correlated(values: Sequence[float], sets: Sequence[Scored]) -> str:
    """Return the mean, its interval, and the means of full fine-tunes, adapters and mixed sets."""
    low, high = table.over_bases(values, [scored["card"]["base"] for scored in sets])
    by_form = {
        form: [v for v, s in zip(values, sets, strict=True) if s["card"]["form"] == form]
        for form in ("full", "adapters", "mixed")
    }
    own = [f"{fmean(found):.2f}" if found else "" for found in by_form.values()]
    return f"{fmean(values):.2f} | {low:.2f} to {high:.2f} | {' | '.join(own)}"


def _halves(sets: Sequence[Scored]) -> list[float]:
    """Return the rank correlation of accuracies on the even and on the odd examples: what labels tell."""
    found: list[float] = []
    for scored in sets:
        halves = [scored["halves"][name] for name in published(scored)]
        one, other = (
            [fmean(model[e][half] for e in table.counted(scored)) for model in halves]
            for half in (0, 1)
        )
        found.append(rank_correlation(one, other))
    return found


# --- Ways of choosing.
def _criterion(name: str) -> Way:
    def way(scored: Scored, others: Sequence[Scored]) -> Values:
        return {method: scored["criteria"][method][name] for method in published(scored)}

    return way


def _centred(scored: Scored) -> dict[str, float]:
    """Return each method's accuracy beside the mean of the set's methods."""
    values = {n: table.accuracy(scored, scored["methods"][n]) for n in published(scored)}
    mean = fmean(values.values())
    return {name: value - mean for name, value in values.items()}


def _elsewhere(scored: Scored, others: Sequence[Scored]) -> Values:
    """Return how each method did on other bases."""
    centred = [_centred(other) for other in others]
    return {
        name: fmean(values[name] for values in centred if name in values)
        for name in published(scored)
    }


def _all_criteria(scored: Scored, others: Sequence[Scored]) -> Values:
    """Return a ridge regression of accuracy on all criteria, each of mean 0 and variance 1 in a set."""
    rows = _np.concatenate([_standardised(other) for other in others])
    wanted = _np.concatenate([list(_centred(other).values()) for other in others])
    fitted = _ridge(rows, wanted)
    return dict(zip(published(scored), (_standardised(scored) @ fitted).tolist(), strict=True))


def _selector(scored: Scored, others: Sequence[Scored]) -> Values:
    """Return, for each method, a ridge regression of its accuracy on the features of the updates."""
    seen = _np.array([_features(other) for other in others])
    mean, spread = seen.mean(axis=0), seen.std(axis=0) + 1e-12
    own = (_np.array(_features(scored)) - mean) / spread
    centred = [_centred(other) for other in others]
    found: dict[str, float] = {}
    for name in published(scored):
        having = [place for place, values in enumerate(centred) if name in values]
        wanted = _np.array([centred[place][name] for place in having])
        rows = (seen[having] - mean) / spread
        found[name] = float(wanted.mean() + own @ _ridge(rows, wanted - wanted.mean()))
    return found


def _neighbours(scored: Scored, others: Sequence[Scored]) -> Values:
    """Return how each method did on the nearest sets of other bases that it merges."""
    seen = _np.array([_features(other) for other in others])
    apart = (seen - _np.array(_features(scored))) / (seen.std(axis=0) + 1e-12)
    order = _np.argsort(_np.square(apart).sum(axis=1), kind="stable")
    centred = [_centred(others[int(place)]) for place in order]
    return {
        name: fmean([values[name] for values in centred if name in values][:_NEIGHBOURS])
        for name in published(scored)
    }


def _candidates(scored: Scored, others: Sequence[Scored]) -> Values:
    """Return how much better than `auto`'s second rule each latest candidate is on other bases."""
    every = [set(each["methods"]) for each in (scored, *others)]
    names = [n for n in (*rules.OF_AUTO, *candidates.TITLES) if all(n in e for e in every)]
    return {
        name: fmean(
            table.regret(other, rules.SECOND) - table.regret(other, name) for other in others
        )
        for name in names
    }


def _features(scored: Scored) -> list[float]:
    experts, lengths = scored["card"]["experts"], list(scored["lengths"].values())
    adapters = fmean(expert["kind"] != "full" for expert in experts)
    longest = max(lengths) / fmean(lengths)
    own = [scored["features"][name] for name in FEATURES]
    return [adapters, log(len(experts)), log(longest), *own]


def _standardised(scored: Scored) -> Any:
    """Return the criteria of a set's methods `(methods, criteria)`, each of mean 0 and variance 1."""
    criteria = scored["criteria"]
    found = _np.array([[criteria[m][c] for c in CRITERIA] for m in published(scored)])
    return (found - found.mean(axis=0)) / (found.std(axis=0) + 1e-12)


def _ridge(rows: Any, wanted: Any) -> Any:
    gram = rows.T @ rows + _RIDGE * len(rows) * _np.eye(rows.shape[1])
    return _np.linalg.solve(gram, rows.T @ wanted)


def _ranks(values: Sequence[float]) -> Any:
    found = _np.round(_np.asarray(values), 9)
    return (found[:, None] > found).sum(axis=1) + ((found[:, None] == found).sum(axis=1) - 1) / 2


WAYS: Mapping[str, Way | None] = {
    **{name: _criterion(name) for name in CRITERIA},
    "other bases": _elsewhere,
    "all criteria": _all_criteria,
    "selector": _selector,
    "neighbours": _neighbours,
    "candidates for `auto`": _candidates,
    "`auto`": None,
}
