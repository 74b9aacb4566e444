"""What `covmerge compare` does: run the methods, print the table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from covmerge import api
from covmerge.cli.console import print_json, printable, stderr, stdout
from covmerge.cli.progress import progress_on
from covmerge.cli.show import NOTE, facts, table
from covmerge.cli.units import format_seconds
from covmerge.comparison import CompareJob, Comparison
from covmerge.recipe import Recipe, format_size

_WIDTH = 80


def compare(
    recipe: Recipe,
    *,
    methods: str,
    parameters: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    overwrite: bool,
    device: str,
    threads: int | None,
    max_memory: int | None,
    as_json: bool,
) -> None:
    """Compare, and print the table.

    Raises:
        InputError: anything wrong with the inputs; nothing is left behind.
        CheckFailed: a model failed its verification.
    """
    job = CompareJob(
        recipe=recipe,
        methods=methods,
        parameters=parameters,
        out=out,
        overwrite=overwrite,
        device=device,
        threads=threads,
        max_memory=max_memory,
        progress=progress_on(stderr()),
    )
    comparison = api.run_comparison(job)
    if as_json:
        print_json(comparison.as_json())
    else:
        show(stdout(), comparison)


def show(console: Console, comparison: Comparison) -> None:
    """Print a table of sizes and costs, one of cosines, and what belongs to them."""
    console.print(_sizes(comparison))
    console.print("Cosine between the merged update and each expert's")
    console.print(_cosines(comparison))
    run: Mapping[str, Any] = comparison.run
    console.print(
        facts(
            [
                ("norm", "‖W̄ − W₀‖ over all merged tensors"),
                ("stable rank", "mean of ‖·‖²/σ₁² over the merged update's matrices"),
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
                *((NOTE, note) for note in comparison.notes),
                *([("models", f"{comparison.path}/<method>")] if comparison.path else []),
            ]
        )
    )


def _sizes(comparison: Comparison) -> Table:
    columns = ("norm", "stable rank", "seconds", "memory")
    rows = table("method", *columns, right=columns)
    for row in comparison.rows:
        rank = "" if row.stable_rank is None else f"{row.stable_rank:.1f}"
        seconds, memory = f"{row.seconds:.2f}", format_size(row.workspace)
        rows.add_row(row.method, f"{row.norm:.4g}", rank, seconds, memory)
    return rows


def _cosines(comparison: Comparison) -> Table:
    """A column for each expert; for many, a line each, so that 80 columns hold them."""
    norms = {printable(name): norm for name, norm in comparison.update_norms.items()}
    longest = max(len(row.method) for row in comparison.rows)
    if longest + sum(max(len(name), 6) + 2 for name in norms) > _WIDTH - 2:
        rows = table("method", "expert", "cosine", right=["cosine"])
        for row in comparison.rows:
            for expert, cosine in row.cosines.items():
                rows.add_row(row.method, printable(expert), f"{cosine:.3f}")
        return rows
    rows = table("method", *norms, right=list(norms))
    for row in comparison.rows:
        rows.add_row(row.method, *(f"{cosine:.3f}" for cosine in row.cosines.values()))
    rows.add_section()
    rows.add_row("‖Δ_t‖", *(f"{norm:.4g}" for norm in norms.values()))
    return rows
