"""The result of a search: scores of trials by task, the best trial, and how far it overfits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from random import Random

from covmerge.base.table import Cell, Table, Tabular, result_html
from covmerge.base.types import Json
from covmerge.run.scoring.table import Scored, ScoreTable, written
from covmerge.run.scoring.values import Interval, Score, Scores
from covmerge.run.search.trials import Trial


@dataclass(frozen=True, repr=False)
class Search(Tabular):
    """The result of a search.

    Attributes:
        path: folder of the search.
        scorer: name of the scorer.
        asked: names of the objectives; empty for the mean over the tasks.
        trials: all trials, in order.
        untuned: the merge without a search, by the default method; None if it cannot be made.
        halving: whether the search sees one half of each task's examples and the other half is held out;
            this needs a score for each example.
        notes: facts that a reader should know.
    """

    path: Path
    scorer: str
    asked: tuple[str, ...]
    trials: tuple[Trial, ...]
    untuned: Trial | None
    halving: bool
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Scores:
        """The first scores, which fix the tasks and their numbers of examples for all trials."""
        scored = (t.scores for t in (self.untuned, *self.trials) if t is not None and t.scores)
        return next(scored, dict[str, Score]())

    @property
    def halved(self) -> bool:
        """Whether half of each task's examples are held out."""
        return self.halving and all(len(s.examples or ()) > 1 for s in self.first.values())

    @cached_property
    def seen(self) -> ScoreTable:
        """Scores on the examples that the search saw."""
        return self._scored(held_out=False)

    @cached_property
    def held_out(self) -> ScoreTable | None:
        """Scores on the held-out examples; None if no examples are held out."""
        return self._scored(held_out=True) if self.halved else None

    @property
    def objectives(self) -> tuple[str, ...]:
        """The columns of the scores that the search maximises."""
        return self.asked or self.seen.columns[-1:]

    def values(self, trial: Trial) -> tuple[float, ...] | None:
        """Return a trial's objectives; None if it failed, or one of them is not finite."""
        found = tuple(_value(self.seen, trial, column) for column in self.objectives)
        return found if found and all(map(isfinite, found)) else None

    @cached_property
    def front(self) -> tuple[Trial, ...]:
        """The Pareto front: no trial beats these in one objective and is at least as good in all others."""
        known = [(t, v) for t in self.trials if (v := self.values(t)) is not None]
        return tuple(t for t, values in known if not any(_better(v, values) for _, v in known))

    @property
    def best(self) -> Trial | None:
        """The trial with the highest score; None with several objectives, or if no trial has a score."""
        return self.front[0] if self.front and len(self.objectives) == 1 else None

    @property
    def gain(self) -> Mapping[str, Interval | float] | None:
        """The best trial's lead over the untuned merge, on the seen and on the held-out examples.

        None if the best trial or the untuned merge has no score.
        """
        best, column = self.best, self.objectives[0] if self.seen.rows else ""
        if best is None or self.untuned is None or self.values(self.untuned) is None:
            return None
        tables = {"seen": self.seen, **({"held out": self.held_out} if self.held_out else {})}
        return {
            name: table.lead(best.label, self.untuned.label, column)
            or _value(table, best, column) - _value(table, self.untuned, column)
            for name, table in tables.items()
        }

    def says(self) -> list[tuple[str, str]]:
        """Return texts with labels: the best trial, its lead over the untuned merge, and its overfit."""
        if not self.front:
            return [("best", "not known: no trial has a finite score")]
        if self.best is None:
            labels = ", ".join(trial.label for trial in self.front)
            text = f"{labels}: no other trial is better in all of {', '.join(self.objectives)}"
            return [("front", text)]
        column, best = self.objectives[0], self.best
        text = f"{best.label}, {written(_value(self.seen, best, column))}"
        gain = self.gain
        if self.untuned is not None and gain is not None:
            value = written(_value(self.seen, self.untuned, column))
            text += f"; without a search {value}: {_lead(gain['seen'])}"
        return [("best", text), ("other half", self._fit(best, column, gain))]

    def _fit(self, best: Trial, column: str, gain: Mapping[str, Interval | float] | None) -> str:
        if self.held_out is None:
            known = any(score.examples for score in self.first.values())
            why = "it saw every example" if known else "the scorer gives no number for each example"
            return f"not known how far the search fits its questions: {why}"
        value = written(_value(self.held_out, best, column))
        text = f"{best.label}, {value} on the examples it did not see"
        if self.untuned is None or gain is None:
            return text
        untuned = written(_value(self.held_out, self.untuned, column))
        return f"{text}; without a search {untuned}: {_lead(gain['held out'])}"

    def table(self) -> Table:
        """Return one row per trial: its values, scores on both halves, seconds, and why it failed."""
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.chosen))
        tables = [("", self.seen), *([(" held out", self.held_out)] if self.held_out else [])]
        columns = [f"{c}{end}" for end, table in tables for c in table.columns]
        rows: list[tuple[Cell, ...]] = []
        for trial in [*([] if self.untuned is None else [self.untuned]), *self.trials]:
            cells = [_cell(table, trial, c) for _, table in tables for c in table.columns]
            rows.append(
                (
                    trial.label,
                    *(trial.chosen.get(name) for name in names),
                    *cells,
                    trial in self.front,
                    trial.seconds,
                    trial.failed,
                )
            )
        return Table(("trial", *names, *columns, "front", "seconds", "failed"), tuple(rows))

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        said = [*self.says(), *(("note", note) for note in self.notes)]
        return result_html(self, (f"{label}: {text}" for label, text in said))

    def as_json(self) -> dict[str, Json]:
        """Return the result as plain JSON."""
        table = self.table()
        return {
            "path": str(self.path),
            "scorer": self.scorer,
            "objectives": list(self.objectives) if self.seen.rows else list(self.asked),
            "best": None if self.best is None else self.best.number,
            "front": [trial.number for trial in self.front],
            "says": dict(self.says()),
            "trials": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<Search: {len(self.trials)} trials by {self.scorer}, in {self.path}>"

    def _scored(self, *, held_out: bool) -> ScoreTable:
        trials = [*([] if self.untuned is None else [self.untuned]), *self.trials]
        rows = tuple(
            Scored(t.label, _half(t.scores, held_out) if self.halved else t.scores, t.seconds)
            for t in trials
            if t.scores
        )
        return ScoreTable(self.scorer, rows, {t.label: t.failed for t in trials if t.failed})


def unlike(scores: Scores, first: Scores) -> str | None:
    """Return why scores cannot be compared with the first scores; None if they can."""
    for task in {**first, **scores}:
        if task not in scores or task not in first:
            return f"its scores have the tasks {', '.join(scores)}, and those before {', '.join(first)}"
        if not isfinite(scores[task].value):
            return f"its score of {task} is not finite"
        counts = [len(half[task].examples or ()) for half in (scores, first)]
        if counts[0] != counts[1]:
            return f"{task} was scored on {counts[0]} examples, and before on {counts[1]}"
    return None


def _half(scores: Scores, held_out: bool) -> Scores:
    """Return scores on one half of each task's examples, the same half for every model."""
    found: dict[str, Score] = {}
    for task, score in scores.items():
        examples = score.examples or ()
        order = list(range(len(examples)))
        Random(f"{task} {len(examples)}").shuffle(order)
        middle = (len(order) + 1) // 2
        chosen = tuple(examples[i] for i in sorted(order[middle:] if held_out else order[:middle]))
        found[task] = Score(sum(chosen) / len(chosen) if chosen else score.value, chosen or None)
    return found


def _better(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _cell(table: ScoreTable, trial: Trial, column: str) -> float | None:
    row = next((row for row in table.rows if row.label == trial.label), None)
    return None if row is None else table.value(row, column)


def _value(table: ScoreTable, trial: Trial, column: str) -> float:
    value = _cell(table, trial, column)
    return float("nan") if value is None else value


def _lead(gain: Interval | float) -> str:
    if not isinstance(gain, Interval):
        return f"{gain:+.3f}"
    text = f"{gain.mean:+.3f} [{gain.low:.3f}, {gain.high:.3f}]"
    return text if gain.clear else f"{text}, which may be chance"
