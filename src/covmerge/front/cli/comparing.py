"""What `covmerge compare` does: run the methods, print the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from covmerge.front import api
from covmerge.front.cli.console import check_one_form, print_csv, print_json, printable, stdout
from covmerge.front.cli.show import NOTE, WARNING, facts, table
from covmerge.front.cli.units import format_seconds
from covmerge.plan.recipe import Recipe, format_size
from covmerge.run.comparison import SPENT, CompareJob, Comparison, Wanted
from covmerge.run.engine import RunOptions

_WIDTH = 80


def compare(
    recipe: Recipe,
    *,
    methods: str | Sequence[Wanted],
    parameters: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    run: RunOptions,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Compare, and print the table.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.
        CheckFailed: a model failed its verification.
    """
    check_one_form(as_json=as_json, as_csv=as_csv)
    job = CompareJob(recipe, methods, parameters, out, run)
    comparison = api.run_comparison(job)
    if as_json:
        print_json(comparison.as_json())
    elif as_csv:
        print_csv(comparison)
    else:
        show(stdout(), comparison)


def show(console: Console, comparison: Comparison) -> None:
    """Print a table of sizes and costs, one of cosines, and what belongs to them."""
    console.print(_sizes(comparison))
    _show_experts(console, comparison)
    run: Mapping[str, Any] = comparison.run
    console.print(
        facts(
            [
                ("norm", "‖W̄ − W₀‖ over all merged tensors"),
                ("stable rank", "mean of ‖·‖²/σ₁² over the merged update's matrices"),
                *_advice(comparison),
                ("seconds", "the method's own mathematics; reading and writing serve all"),
                ("memory", "the method's workspace, by its cost model"),
                (
                    "run",
                    f"{format_seconds(run['seconds'])}: surveys "
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
                *((f"no {name}", why) for name, why in comparison.left_out.items()),
                *((WARNING, warning) for warning in comparison.warnings),
                *((NOTE, note) for note in comparison.notes),
                *([("models", f"{comparison.path}/<method>")] if comparison.path else []),
            ]
        )
    )


def _advice(comparison: Comparison) -> list[tuple[str, str]]:
    if comparison.adapters and any(row.retention for row in comparison.rows):
        return [
            (
                "recommended",
                "nothing: of adapters, what is predicted does not agree with accuracy "
                "(docs/report.md)",
            )
        ]
    if comparison.recommended is None:
        return []
    spent = " and ".join(row.label for row in comparison.rows if row.method in SPENT)
    aside = f" ({spent} left aside: they minimise what is predicted)" if spent else ""
    return [
        (
            "recommended",
            f"{comparison.recommended}: its worst served expert keeps most{aside}. A prediction: how "
            "far it agrees with accuracy is measured in docs/report.md",
        )
    ]


def _sizes(comparison: Comparison) -> Table:
    columns = ("norm", "stable rank", "seconds", "memory")
    rows = table("method", *columns, right=columns)
    for row in comparison.rows:
        rank = "" if row.stable_rank is None else f"{row.stable_rank:.1f}"
        seconds, memory = f"{row.seconds:.2f}", format_size(row.workspace)
        rows.add_row(row.label, f"{row.norm:.4g}", rank, seconds, memory)
    return rows


def _show_experts(console: Console, comparison: Comparison) -> None:
    """Print tables with a column for each expert; for many one of a line each, to fit 80 columns."""
    rows, experts = comparison.rows, list(comparison.update_norms)
    predicted = [row for row in rows if row.retention]
    longest = max(len(row.label) for row in rows)
    if longest + sum(max(len(name), 6) + 2 for name in experts) > _WIDTH - 2:
        columns = ("cosine", "retention") if predicted else ("cosine",)
        found = table("method", "expert", *columns, right=columns)
        for row in rows:
            for expert in experts:
                kept = [_number(row.retention.get(expert))] if predicted else []
                found.add_row(row.label, printable(expert), _number(row.cosines[expert]), *kept)
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
    for method, own in values.items():
        rows.add_row(method, *(_number(own.get(expert)) for expert in experts))
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
