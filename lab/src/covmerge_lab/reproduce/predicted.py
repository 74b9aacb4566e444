"""What covmerge's default is predicted to score in the published tables, before it was run on them.

On the suites of this repository `auto` closes a share f of what the best of the papers' data-free methods
leaves between itself and the experts, or falls behind by it. The same share is predicted here:

    best + f (experts − best)

The papers' methods stand there as they were published, tuned on labels for the most part; ours at defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from covmerge_lab.reproduce.published import MEAN, Row, Setting, Table

SAID = "2026-11-23"
# f of one training of each suite (lab/docs/reproduce.md).
CLOSED: Mapping[tuple[bool, bool], float] = {  # by whether it is vision, and whether adapters
    (False, False): 0.57,  # text: 68.2 where cart has 63.9 and the experts 71.5
    (False, True): 0.56,  # text 54.5, 47.4, 62.3; language model 76.4, 61.0, 84.8
    (True, False): -0.16,  # vision: 57.4, 61.3, 79.4 with four tasks; 45.8, 49.1, 79.6 with eight
    (True, True): 0.31,  # as for text, by the weights alone: 51.2; 69.8
}
WITH_DATA = ("regmean", "fisher")


def with_default(table: Table) -> Table:
    """Return the table with a row for `auto` in each setting."""
    settings = [
        replace(each, rows=[*each.rows, _row(each, adapters=table.name.endswith("/lora"))])
        for each in table.settings
    ]
    return replace(table, settings=settings)


def _row(setting: Setting, *, adapters: bool) -> Row:
    vision = setting.family == "clip"
    share = CLOSED[vision, adapters]
    (experts,) = (_mean(row) for row in setting.rows if row.kind == "experts")
    merges = [row for row in setting.rows if row.kind == "merge" and row.method not in WITH_DATA]
    best = max(merges, key=_mean)
    value = round(_mean(best) + share * (experts - _mean(best)), 1)
    return Row(
        "covmerge auto",
        {},
        method="auto",
        note=(
            f"predicted on {SAID}, before it could be run: {best.title} and {share:+.0%} of what it leaves "
            "to the experts"
        ),
        predicted={MEAN: value},
    )


def _mean(row: Row) -> float:
    return row.published.get(MEAN, fmean(row.published.values()))
