"""What `covmerge compare` and `covmerge search` print: scores, sizes, trials, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from covmerge.base.errors import CheckFailed
from covmerge.base.sizes import format_size
from covmerge.base.text import counted
from covmerge.front.cli.console import NOTE, WARNING, facts, format_seconds, printable, say, table
from covmerge.plan.recipe.search import Value
from covmerge.run.comparison import Comparison
from covmerge.run.scoring.table import (
    CSV_NAME,
    LATEX_NAME,
    SCORES_NAME,
    Scored,
    ScoreTable,
    written,
)
from covmerge.run.search.job import BEST_MODEL, BEST_RECIPE, FRONT
from covmerge.run.search.job import CSV_NAME as SEARCH_CSV
from covmerge.run.search.result import Search
from covmerge.run.search.trials import RECORD, Trial

_WIDTH = 80


def check_scored(scores: ScoreTable) -> None:
    """Raise CheckFailed if a model could not be scored."""
    for label, why in scores.failed.items():
        say("error", f"{label} was not scored: {why}")
    if scores.failed:
        count = len(scores.failed)
        raise CheckFailed(
            f"{counted(count, 'model')} of {count + len(scores.rows)} could not be scored: see above. "
            "Mend what scores them, and run again with --resume"
        )


def show(console: Console, comparison: Comparison, *, verbose: bool = False) -> None:
    """Print the scores, or the sizes if there are no scores; `verbose`: both."""
    scores = comparison.scores
    if scores is not None:
        show_scores(console, scores)
    if scores is None or verbose:
        console.print(_sizes(comparison))
        _show_experts(console, comparison)
    console.print(
        facts(
            [
                *_next(comparison),
                *(_legend(comparison) if scores is None or verbose else ()),
                *((f"no {name}", why) for name, why in comparison.left_out.items()),
                *((WARNING, warning) for warning in comparison.warnings),
                *((NOTE, note) for note in comparison.notes),
                *([("models", f"{comparison.path}/<method>")] if comparison.path else []),
            ]
        )
    )


def _next(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the best method by the scores, or how to get scores."""
    scores, best = comparison.scores, comparison.recommended
    if scores is None:
        more = "--resume" if comparison.path else "--out DIR"
        flags = f"{more} --score 'python your_eval.py {{model}}'"
        return [("best", f"not known without scores. To have them, add {flags} to this command")]
    if not scores.rows:
        return []
    text = "not known: no method has a finite score of every task"
    if best is not None:
        text = _lead(scores, best, comparison)
    above = [] if best is None else _above(scores, best)
    folder = comparison.path or Path()
    files = f"{folder / CSV_NAME}, {folder / LATEX_NAME}; scores are kept in {folder / SCORES_NAME}"
    return [("best", text), *above, ("files", files)]


def _above(scores: ScoreTable, best: str) -> list[tuple[str, str]]:
    """Return a note on the base and the experts that score higher than the best merge."""
    column = scores.columns[-1]
    values = {row.label: scores.value(row, column) for row in scores.rows}
    least = values[best] or 0.0
    above = [
        f"{row.label} has {written(value)}"
        for row in scores.rows
        if row.bound and (value := values[row.label]) is not None and value > least
    ]
    return [(NOTE, f"no merge is as good: {', '.join(above)}")] if above else []


def _lead(scores: ScoreTable, best: str, comparison: Comparison) -> str:
    """Return how far the best method is above the next one, and whether this may be chance."""
    column = scores.columns[-1]
    others = {row.label for row in comparison.rows} - {best}
    rest, second = {row.label: row for row in scores.rows}, scores.best(column, among=others)
    value = scores.value(rest[best], column)
    text = f"{best}, {written(value or 0.0)}"
    if second is None:
        return text
    lead = scores.lead(best, second, column)
    next_ = f"{text}; next is {second}, {written(scores.value(rest[second], column) or 0.0)}"
    if scores.value(rest[second], column) == value:
        return f"{next_}. They score the same"
    if lead is None:
        return (
            f"{next_}. Have the scorer give a number for each example, the same ones for every model, to "
            "see whether that is chance"
        )
    if lead.low == lead.high == 0:
        return f"{next_}. They score the same"
    between = f"{written(lead.mean)} [{written(lead.low)}, {written(lead.high)}]"
    return f"{next_}. The lead is {between}{'' if lead.clear else ': it may be chance'}"


def _legend(comparison: Comparison) -> list[tuple[str, str]]:
    run: Mapping[str, Any] = comparison.run
    return [
        ("norm", "‖W̄ − W₀‖ over all merged tensors"),
        ("stable rank", "mean of ‖·‖²/σ₁² over the merged update's matrices"),
        ("seconds", "the method's own mathematics; reading and writing serve all"),
        ("memory", "the method's workspace, by its cost model"),
        (
            "run",
            f"{format_seconds(run['seconds'])}: global passes "
            f"{format_seconds(run['survey_seconds'])}, read "
            f"{format_seconds(run['read_seconds'])}, all methods "
            f"{format_seconds(run['compute_seconds'])}, write "
            f"{format_seconds(run['write_seconds'])}, overlapping",
        ),
        (
            "peak memory",
            f"{format_size(run['peak_memory'])} measured, "
            f"{format_size(run['expected_peak_memory'])} expected",
        ),
    ]


def show_scores(console: Console, scores: ScoreTable) -> None:
    """Print a column for each task; if too wide, without intervals or split into several tables."""
    if not scores.rows:
        return
    wide = max(_WIDTH, console.width if console.is_terminal else 0)
    columns = scores.columns
    with_intervals = {column: _scores(scores, column, interval=True) for column in columns}
    if _width(scores, with_intervals.values()) > wide:
        with_intervals |= {c: _scores(scores, c, interval=False) for c in columns[:-1]}
    parts: list[dict[str, list[str]]] = [{}]
    for column, cells in with_intervals.items():
        if parts[-1] and _width(scores, [*parts[-1].values(), cells]) > wide:
            parts.append({})
        parts[-1][column] = cells
    for part in parts:
        names = [printable(name) for name in part]
        shown = table("model", *names, right=names)
        for place, row in enumerate(scores.rows, start=1):
            shown.add_row(printable(row.label), *(cells[place] for cells in part.values()))
        console.print(shown)
    if any("[" in cell for cells in with_intervals.values() for cell in cells[1:]):
        console.print("[ ]: 95 % of 2000 paired bootstrap draws of the examples")


def _width(scores: ScoreTable, columns: Iterable[Sequence[str]]) -> int:
    """Return the width of a table of these columns, with the column of models before them."""
    labels = [row.label for row in scores.rows]
    return sum(max(map(len, column)) + 3 for column in [labels, *columns])


def _scores(scores: ScoreTable, column: str, *, interval: bool) -> list[str]:
    """Return the heading of a column, followed by its cells."""
    return [column, *(_score(scores, row, column, interval=interval) for row in scores.rows)]


def _score(scores: ScoreTable, row: Scored, column: str, *, interval: bool) -> str:
    value = scores.value(row, column)
    if value is None:
        return ""
    found = scores.interval(row, column) if interval else None
    between = "" if found is None else f" [{written(found.low)}, {written(found.high)}]"
    return written(value) + between


def _sizes(comparison: Comparison) -> Table:
    columns = ("norm", "stable rank", "seconds", "memory")
    rows = table("method", *columns, right=columns)
    for row in comparison.rows:
        rank = "" if row.stable_rank is None else f"{row.stable_rank:.1f}"
        seconds, memory = f"{row.seconds:.2f}", format_size(row.workspace)
        rows.add_row(row.label, f"{row.norm:.4g}", rank, seconds, memory)
    return rows


def _show_experts(console: Console, comparison: Comparison) -> None:
    """Print tables with a column for each expert, or a row for each if wider than 80 columns."""
    rows, experts = comparison.rows, list(comparison.update_norms)
    # The prediction does not agree with accuracy for adapters (docs/report.md).
    predicted = [row for row in rows if row.retention and not comparison.adapters]
    longest = max(len(row.label) for row in rows)
    if longest + sum(max(len(name), 6) + 2 for name in experts) > _WIDTH - 2:
        columns = ("cosine", "retention") if predicted else ("cosine",)
        found = table("method", "expert", *columns, right=columns)
        for row in rows:
            for expert in experts:
                more = [_number(row.retention.get(expert))] if predicted else []
                found.add_row(row.label, printable(expert), _number(row.cosines[expert]), *more)
        console.print("Cosine between the merged update and each expert's; predicted retention")
        console.print(found)
        return
    cosines = _columns(experts, {row.label: row.cosines for row in rows})
    cosines.add_section()
    cosines.add_row("‖Δ_t‖", *(f"{norm:.4g}" for norm in comparison.update_norms.values()))
    console.print("Cosine between the merged update and each expert's")
    console.print(cosines)
    if predicted:
        console.print("Predicted retention: what each expert keeps on its own inputs, without data")
        console.print(_columns(experts, {row.label: row.retention for row in predicted}))


def _columns(experts: Sequence[str], values: Mapping[str, Mapping[str, float]]) -> Table:
    names = [printable(name) for name in experts]
    rows = table("method", *names, right=names)
    for method, row in values.items():
        rows.add_row(method, *(_number(row.get(expert)) for expert in experts))
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# `covmerge search`: the best trials, and the facts about the search.

_BEST = 10  # trials to show


def show_search(console: Console, found: Search) -> None:
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
    said.append(("files", f"{files}, {out / SEARCH_CSV}; for Optuna's dashboard {out / RECORD}"))
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
