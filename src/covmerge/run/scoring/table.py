"""The table of scores: models by tasks, with intervals if scores of examples are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import fmean

from covmerge.base.table import Cell, Table, Tabular, result_html
from covmerge.base.text import some, spread
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.run.scoring.values import Interval, Resamples, Scores

SCORES_NAME, CSV_NAME, LATEX_NAME = "scores.json", "scores.csv", "scores.tex"
MEAN = "mean"
_SPECIAL = str.maketrans(
    {**{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"\\": r"\textbackslash{}", "<": r"\textless{}", ">": r"\textgreater{}"}
)


@dataclass(frozen=True)
class Scored:
    """One row: a model, its scores by task, and the seconds that scoring took."""

    label: str
    scores: Scores
    seconds: float
    kept: bool = False  # whether the scores are from an earlier run
    bound: bool = False  # whether the model is the base or an expert, and no merge


@dataclass(frozen=True, repr=False)
class ScoreTable(Tabular):
    """The scores of several models by one scorer."""

    scorer: str
    rows: tuple[Scored, ...]
    failed: Mapping[str, str]

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, in the order of their first appearance."""
        return tuple(dict.fromkeys(task for row in self.rows for task in row.scores))

    @property
    def columns(self) -> tuple[str, ...]:
        """The tasks, and the column of their mean if there are several tasks."""
        return (*self.tasks, self._free_name(MEAN)) if len(self.tasks) > 1 else self.tasks

    def value(self, row: Scored, column: str) -> float | None:
        """Return a score, or the mean over the tasks; None if the model lacks a score for it."""
        wanted = self._of(column)
        if any(task not in row.scores for task in wanted):
            return None
        return fmean(row.scores[task].value for task in wanted)

    def interval(self, row: Scored, column: str) -> Interval | None:
        """Return the 95 % interval over the examples; None if scores of examples are not known."""
        found = self._examples(row, column)
        return None if found is None else self._drawn.mean(found)

    def best(self, column: str, among: Collection[str]) -> str | None:
        """Return the label of `among` with the highest score; None if no score is finite."""
        rows = [row for row in self.rows if row.label in among]
        known = {row.label: v for row in rows if (v := self.value(row, column)) is not None}
        finite = {label: value for label, value in known.items() if isfinite(value)}
        return max(finite, key=finite.__getitem__) if finite else None

    def lead(self, label: str, other: str, column: str) -> Interval | None:
        """Return one model's lead over another on the same examples; None if examples are not known."""
        rows = {row.label: row for row in self.rows}
        one, two = (self._examples(rows[name], column) for name in (label, other))
        return None if one is None or two is None else self._drawn.difference(one, two)

    def notes(self) -> list[str]:
        """Return notes on missing scores and intervals, and on scores of an earlier run."""
        lacking = [
            f"{row.label} has no score of {', '.join(lacks)}, and no mean"
            for row in self.rows
            if (lacks := [task for task in self.tasks if task not in row.scores])
        ]
        infinite = [
            f"{row.label} has no finite score of {', '.join(lacks)}"
            for row in self.rows
            if (lacks := [task for task, score in row.scores.items() if not isfinite(score.value)])
        ]
        uneven = [
            f"{task} has no intervals: the models have different numbers of examples ({spread(counts)})"
            for task, counts in self._counts.items()
            if len(counts) > 1
        ]
        kept = [row.label for row in self.rows if row.kept]
        again = [
            f"scores of {some(kept)} are of an earlier run, as the scorer and the files that it names are "
            f"the same; if what they read changed, delete {SCORES_NAME} and score again"
        ]
        return [*lacking, *infinite, *uneven, *(again if kept else [])]

    def table(self) -> Table:
        """Return one row per model: scores, intervals if scores of examples are known, and seconds."""
        columns = [self._free_name("model")]
        for column in self.columns:
            columns += [column, *(f"{column} {end}" for end in self._ends(column))]
        rows: list[tuple[Cell, ...]] = []
        for row in self.rows:
            cells: list[Cell] = [row.label]
            for column in self.columns:
                cells.append(self.value(row, column))
                if self._ends(column):
                    found = self.interval(row, column)
                    cells += [None, None] if found is None else [found.low, found.high]
            rows.append((*cells, row.seconds))
        return Table((*columns, self._free_name("seconds")), tuple(rows))

    def latex(self) -> str:
        """Return a LaTeX table with booktabs; the best merge of each column is bold."""
        best = {column: self._highest(column) for column in self.columns}
        head = " & ".join(["Method", *map(_escaped, self.columns)])
        sizes = (f", {size} of {' '.join(task.split())}" for task, size in self._sizes.items())
        drawn = f"95 % of 2000 paired bootstrap draws of the examples{''.join(sizes)}"
        lines = [
            f"% covmerge {__version__}, scored by: {' '.join(self.scorer.split())}",
            *([f"% In brackets: {drawn}."] if any(map(self._ends, self.columns)) else []),
            "% Bold: the best merge of each column; base and experts are not compared.",
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
            r"\toprule",
            rf"{head} \\",
        ]
        bounds = [row for row in self.rows if row.bound]
        for part in (bounds, [row for row in self.rows if not row.bound]):
            lines += [r"\midrule"] if part else []
            for row in part:
                cells = [self._latex(row, column, best=best[column]) for column in best]
                lines.append(rf"{' & '.join([_escaped(row.label), *cells])} \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        return result_html(self, (f"{label}: {why}" for label, why in self.failed.items()))

    def as_json(self) -> dict[str, Json]:
        """Return the table as plain JSON."""
        return {
            "scorer": self.scorer,
            "failed": dict(self.failed),
            "scores": {
                row.label: {c: self._cell(row, c) for c in self.columns} for row in self.rows
            },
        }

    def __repr__(self) -> str:
        return f"<ScoreTable: {len(self.rows)} models by {self.scorer}>"

    def _of(self, column: str) -> tuple[str, ...]:
        return self.tasks if column == self._free_name(MEAN) and len(self.tasks) > 1 else (column,)

    def _free_name(self, name: str) -> str:
        while name in self.tasks:
            name = f"covmerge's {name}"
        return name

    def _examples(self, row: Scored, column: str) -> dict[str, list[tuple[float, ...]]] | None:
        found: dict[str, list[tuple[float, ...]]] = {}
        for task in self._of(column):
            examples = row.scores[task].examples if task in row.scores else None
            if examples is None or len(examples) != self._sizes.get(task):
                return None
            found[task] = [examples]
        return found

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Number of examples by task, for tasks with the same number for every model."""
        counts = self._counts.items()
        return {t: next(iter(sizes)) for t, sizes in counts if len(sizes) == 1 and sizes != {0}}

    @cached_property
    def _counts(self) -> dict[str, set[int]]:
        """All numbers of examples that models have, by task; 0 stands for a score without examples."""
        return {
            task: {
                len(row.scores[task].examples or ())
                for row in self.rows
                if task in row.scores and isfinite(row.scores[task].value)
            }
            for task in self.tasks
        }

    @cached_property
    def _drawn(self) -> Resamples:
        return Resamples(self._sizes)

    def _ends(self, column: str) -> tuple[str, ...]:
        return ("low", "high") if all(t in self._sizes for t in self._of(column)) else ()

    def _cell(self, row: Scored, column: str) -> dict[str, Json]:
        value, found = self.value(row, column), self.interval(row, column)
        known = value is not None and isfinite(value)
        return {
            "value": value if known else None,
            **({} if found is None else {"low": _finite(found.low), "high": _finite(found.high)}),
        }

    def _highest(self, column: str) -> str:
        """Return a column's highest score as text; scores that round to the same text are equally good."""
        values = [
            v for row in self.rows if not row.bound and (v := self.value(row, column)) is not None
        ]
        return written(max(filter(isfinite, values), default=float("nan")))

    def _latex(self, row: Scored, column: str, *, best: str) -> str:
        value, found = self.value(row, column), self.interval(row, column)
        if value is None:
            return "--"
        text = written(value)
        text = rf"\textbf{{{text}}}" if text == best and isfinite(value) and not row.bound else text
        if found is not None:
            text += rf" {{\scriptsize [{written(found.low)}, {written(found.high)}]}}"
        return text


def written(value: float) -> str:
    """Return a score as text; larger numbers have fewer decimals.

    Example:
        >>> written(0.71234), written(1.0), written(81.26), written(-1234.5), written(float("nan"))
        ('0.712', '1.000', '81.3', '-1234', 'not finite')
    """
    if not isfinite(value):
        return "not finite"
    size = abs(value)
    return f"{value:.{3 if size < 10 else 1 if size < 1000 else 0}f}"


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)
