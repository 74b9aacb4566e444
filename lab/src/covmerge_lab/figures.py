"""Pictures of what a suite found; every title says what to read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import matplotlib

from covmerge_lab.bench import EXPERTS
from covmerge_lab.models import Section
from covmerge_lab.summary import Group, Row

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Its annotations are partial.
_plt: Any = plt
# All of a run's pictures are drawn before any is saved.
_plt.rcParams["figure.max_open_warning"] = 0

COLOURS = {
    Section.BOUNDS: "#767676",
    Section.DATA_FREE: "#1f5fa8",
    Section.OWN_INPUTS: "#2a8a9a",
    Section.TUNED: "#b3541e",
    Section.WITH_DATA: "#3d7f4d",
    Section.PER_TASK: "#7a4fa0",
}
_DPI = 130


def save(figures: Mapping[str, Any], out: Path) -> str:
    """Write figures as PNG, delete those that the folder's README.md showed before; return what shows them.

    Without a date: the same figure is the same file.

    Args:
        figures: by file name without its suffix.
        out: folder of the results.
    """
    page = out / "README.md"
    before = page.read_text(encoding="utf-8", errors="replace") if page.exists() else ""
    for name, figure in figures.items():
        path = out / f"{name}.png"
        figure.savefig(path, dpi=_DPI, bbox_inches="tight", metadata={"Software": None})
        _plt.close(figure)
    for path in out.glob("*.png"):
        if path.stem not in figures and _shown(path.stem) in before:
            path.unlink()
    return "\n".join(map(_shown, figures))


def accuracy(group: Group) -> Any:
    """Draw the mean accuracy of every model, with its interval and each seed."""
    rows = sorted(group.rows, key=lambda row: row.mean.mean)
    figure, axes = _plt.subplots(figsize=(7.5, 0.27 * len(rows) + 1.6), layout="constrained")
    for place, row in enumerate(rows):
        mean, colour = 100 * row.mean.mean, COLOURS[row.section]
        below, above = mean - 100 * row.mean.low, 100 * row.mean.high - mean
        axes.barh(place, mean, color=colour, alpha=0.75, height=0.75)
        axes.errorbar(mean, place, xerr=[[below], [above]], color="black", lw=1, capsize=2)
        axes.plot([100 * seed for seed in row.seeds], [place] * len(row.seeds), "k.", ms=3)
        axes.text(mean + above + 0.8, place, f"{mean:.1f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_xlabel("mean accuracy over the tasks, %; line: 95 % interval, dots: seeds")
    axes.set_title(f"Accuracy by method: {group.title}", fontsize=10)
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    used = [section for section in Section if any(row.section is section for row in rows)]
    handles = [_plt.Rectangle((0, 0), 1, 1, color=COLOURS[s], alpha=0.75) for s in used]
    names = [section.value for section in used]
    figure.legend(handles, names, fontsize=7, loc="outside lower center", ncols=3, frameon=False)
    return figure


def tasks(group: Group) -> Any:
    """Draw what every model keeps of each expert: one row a model, one column a task.

    Of an expert that gets nothing right there is no share, and its column is empty.
    """
    experts = group.row(EXPERTS)
    rows: Sequence[Row] = [row for row in group.rows if row is not experts]
    shares = [[row.accuracy[t] / (experts.accuracy[t] or nan) for t in group.tasks] for row in rows]
    figure, axes = _plt.subplots(
        figsize=(0.75 * len(group.tasks) + 3, 0.27 * len(rows) + 1.6), layout="constrained"
    )
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, line in enumerate(shares):
        for x, share in enumerate(line):
            if isnan(share):
                continue
            colour = "white" if share < 0.55 else "black"
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=colour, size=7)
    axes.set_xticks(range(len(group.tasks)), group.tasks, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.set_title(f"Share of the expert's accuracy kept, %: {group.title}", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.6)
    return figure


def _shown(name: str) -> str:
    return f"![{name}]({name}.png)"
