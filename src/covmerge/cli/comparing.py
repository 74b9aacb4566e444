"""What `covmerge compare` does: run the methods, print the table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from covmerge import api
from covmerge.cli.console import print_json, printable, stderr, stdout
from covmerge.cli.progress import progress_on
from covmerge.cli.show import NOTE, facts, table
from covmerge.cli.units import format_seconds
from covmerge.comparison import CompareJob, Comparison
from covmerge.recipe import Recipe, format_size


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
    """Print the table and what belongs to it."""
    experts = list(comparison.update_norms)
    columns = ["norm", *experts, "stable rank", "seconds", "memory"]
    rows = table("method", *columns, right=columns)
    for row in comparison.rows:
        rank = "" if row.stable_rank is None else f"{row.stable_rank:.1f}"
        rows.add_row(
            row.method,
            f"{row.norm:.4g}",
            *(f"{row.cosines[expert]:.3f}" for expert in experts),
            rank,
            f"{row.seconds:.2f}",
            format_size(row.workspace),
        )
    console.print(rows)
    norms = (f"{expert} {norm:.4g}" for expert, norm in comparison.update_norms.items())
    run: Mapping[str, Any] = comparison.run
    console.print(
        facts(
            [
                ("columns", "‖W̄ − W₀‖; its cosine to each expert's update; mean stable rank"),
                ("", "‖·‖²/σ₁² of its matrices; its own mathematics; its workspace"),
                ("experts", printable(", ".join(norms))),
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
