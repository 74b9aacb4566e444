"""Pictures of docs/results.md and docs/choosing.md: `python -m benchmarks.pictures`.

They are of the committed results.

results    mean accuracy of a few well-known merges, a panel for each set of experts
adapters   what is kept of the experts' accuracy, by full fine-tunes and by adapters
tasks      the same by four and by eight tasks
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from benchmarks.overview import Column, columns

IMAGES = Path(__file__).parents[2] / "docs" / "images"
EXPERTS = "experts, each on its task"
# From above: what is the limit, what needs nothing, what needs data.
SHOWN = {
    EXPERTS: "#9a9a9a",
    "auto": "#1a5fb4",
    "tsv_m": "#62a0ea",
    "ace": "#62a0ea",
    "iso_c": "#62a0ea",
    "ties": "#62a0ea",
    "task_arithmetic": "#62a0ea",
    "average": "#62a0ea",
    "regmean": "#3d7f4d",
}
LINES = {
    "auto": "#1a5fb4",
    "tsv_m": "#9141ac",
    "ace": "#c64600",
    "iso_c": "#26a269",
    "ties": "#a5741d",
    "average": "#7f7f7f",
}


def main() -> None:
    """Draw all of them."""
    matplotlib.use("svg")
    plt.rcParams.update({"svg.hashsalt": "covmerge", "font.size": 9})
    found = {column.title: column for column in columns()}
    _save(results(list(found.values())), "results")
    pairs = [("text, full, 8", "text, LoRA, 8"), ("llm, full, 5", "llm, LoRA, 5")]
    _save(kept(found, pairs, ("full", "LoRA")), "adapters")
    _save(kept(found, [("vision, full, 4", "vision, full, 8")], ("4 tasks", "8 tasks")), "tasks")


def results(shown: list[Column]) -> Any:
    """Draw the mean accuracy of a few merges, a panel for each column of the table."""
    figure, grid = plt.subplots(4, 2, figsize=(5.4, 9.8), layout="constrained")
    for axes, column in zip(grid.flat, shown, strict=True):
        names = list(SHOWN)[::-1]
        values = [_percent(column, name) if name in column.rows else 0.0 for name in names]
        axes.barh(range(len(names)), values, color=[SHOWN[name] for name in names])
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            row = column.rows.get(name)
            told = f"{value:.1f}{row.get('mark', '')}" if row else "not run"
            axes.text(value + 1, place, told, va="center", fontsize=8)
        labels = [name.replace(", each on its task", "") for name in names]
        axes.set_yticks(range(len(names)), labels if column in shown[::2] else [""] * len(names))
        axes.set_xlim(0, 109)
        axes.set_title(column.title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Mean accuracy in %\ngrey: the experts, blue: without data, green: with data")
    return figure


def kept(found: dict[str, Column], pairs: list[tuple[str, str]], ends: tuple[str, str]) -> Any:
    """Draw which share of the experts' accuracy each merge keeps, from one kind of experts to another."""
    figure, row = plt.subplots(
        1, len(pairs), figsize=(3.6 * len(pairs) + 0.6, 3.6), layout="constrained", squeeze=False
    )
    for axes, pair in zip(row.flat, pairs, strict=True):
        first, second = (found[title] for title in pair)
        for name, colour in LINES.items():
            if name not in first.rows or name not in second.rows:
                continue
            shares = [
                100 * _percent(column, name) / _percent(column, EXPERTS)
                for column in (first, second)
            ]
            axes.plot(ends, shares, "o-", color=colour, label=name, lw=1.8)
        axes.set_ylim(0, 108)
        axes.set_title(pair[0].partition(",")[0], loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    row[0][0].set_ylabel("% of the experts' accuracy")
    return figure


def _percent(column: Column, name: str) -> float:
    return 100 * column.rows[name]["mean"]["mean"]


def _save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
