"""What `covmerge search` prints: the best trials, and the facts about the search."""

from __future__ import annotations

from rich.console import Console

from covmerge.base.text import counted
from covmerge.front.cli.comparing import show_scores
from covmerge.front.cli.console import (
    NOTE,
    WARNING,
    facts,
    table,
)
from covmerge.plan.recipe.search import Value
from covmerge.run.scoring.table import ScoreTable, written
from covmerge.run.search.job import BEST_MODEL, BEST_RECIPE, CSV_NAME, FRONT
from covmerge.run.search.result import Search
from covmerge.run.search.trials import RECORD, Trial

_BEST = 10  # trials to show


def show(console: Console, found: Search) -> None:
    """Print the best trials, their values, and the facts about the search."""
    best = _best(found)
    shown = [*([found.untuned] if found.untuned else []), *best]
    order = {trial.label: place for place, trial in enumerate(shown)}
    for title, scores in (
        ("the examples that were searched", found.seen),
        ("the others", found.held_out),
    ):
        if scores is not None:
            console.print(f"Scores on {title}" if found.held_out else "Scores")
            rows = [row for row in scores.rows if row.label in order]
            rows.sort(key=lambda row: order[row.label])
            show_scores(console, ScoreTable(scores.scorer, tuple(rows), {}))
    names = list(dict.fromkeys(name for trial in best for name in trial.chosen))
    values = table("value", *(trial.label for trial in best), right=[trial.label for trial in best])
    for name in names:
        values.add_row(name, *(_shown(trial.chosen.get(name)) for trial in best))
    console.print(values)
    said = list(found.says())
    if failed := [trial for trial in found.trials if trial.failed]:
        why = f"{failed[0].label}: {failed[0].failed}"
        said.append((WARNING, f"{counted(len(failed), 'trial')} failed. {why}"))
    said += [(NOTE, note) for note in found.notes]
    out = found.path
    files = f"{out / BEST_RECIPE}, {out / BEST_MODEL}" if found.best else f"{out / FRONT}/*.yml"
    said.append(("files", f"{files}, {out / CSV_NAME}; for Optuna's dashboard {out / RECORD}"))
    console.print(facts(said))


def _best(found: Search) -> list[Trial]:
    """Return the trials to show: the Pareto front, or those with the highest scores."""
    if len(found.objectives) > 1:
        return list(found.front[:_BEST])
    known = [(v, trial) for trial in found.trials if (v := found.values(trial)) is not None]
    return [trial for _, trial in sorted(known, key=lambda pair: pair[0], reverse=True)[:3]]


def _shown(value: Value | None) -> str:
    if value is None:
        return ""
    return written(value) if isinstance(value, float) else str(value)
