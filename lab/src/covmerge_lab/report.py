"""What a suite found: tables for the terminal and for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from covmerge import __version__
from covmerge.run.scoring.values import Interval
from covmerge_lab.collecting import EXAMPLES, MADE
from covmerge_lab.merging import SCALES
from covmerge_lab.models import Section
from covmerge_lab.summary import Group, Row

LEGEND = f"""\
mean: accuracy in %, over tasks and seeds; ±: standard deviation over the seeds; [ ]: 95 % of 2000 paired \
bootstrap draws of the test examples
of experts: the model's accuracy over the expert's, mean over the tasks
beyond tuned: mean less that of tuned Task Arithmetic, on the same examples; *: the interval leaves 0 out
less: the mean of covmerge's own methods less that of each model, likewise
{Section.DATA_FREE.value}: parameters at their defaults; ace once more as its code was released; wudi by \
the closed form of its loss; Task Arithmetic at its published scale, 0.3
{Section.OWN_INPUTS.value}: {MADE} inputs of each expert, written by language models themselves; drawn \
at random for others, and weighed by how strongly the expert reacts to them, beside the other experts
{Section.TUNED.value}: the best of {len(SCALES)} scales on the validation examples
{Section.WITH_DATA.value}: {EXAMPLES["gram"]} training examples of each task; fisher \
{EXAMPLES["fisher"]} of them
{Section.PER_TASK.value}: not one model: whoever runs it must know which task an input belongs to"""


def save(results: Mapping[str, Any], groups: Sequence[Group], shown: str, out: Path) -> None:
    """Write `results.json` and `README.md`, the tables and what shows pictures (`figures.save`)."""
    content = {**results, "groups": [group.as_json() for group in groups]}
    (out / "results.json").write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    tables = "\n\n".join(
        "\n\n".join([f"## {group.title}", markdown(group), *_own_beside(group)]) for group in groups
    )
    legend = "\n".join(f"- {line}" for line in LEGEND.splitlines())
    (out / "README.md").write_text(
        f"# Suite `{results['suite']}`\n\nMade by `{results['command']}` with covmerge "
        f"{__version__}. Accuracy is {results['accuracy']}.\n\n{tables}\n\n{legend}\n\n"
        f"{shown}\n",
        encoding="utf-8",
    )


def table(group: Group) -> Table:
    """Lay out a group for the terminal."""
    result = Table(title=f"{group.title}; accuracy in %", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(_columns(group)):
        result.add_column(
            name, justify="right" if number else "left", no_wrap=not number, overflow="fold"
        )
    section = None
    for row in group.rows:
        if row.section is not section:
            section = row.section
            result.add_section()
            result.add_row(section.value, style="bold")
        result.add_row(f"  {row.title}", *_cells(row, group))
    return result


def markdown(group: Group) -> str:
    """Lay out a group as a table in Markdown."""
    columns = _columns(group)
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    section = None
    for row in group.rows:
        if row.section is not section:
            section = row.section
            lines.append(f"| *{section.value}* |{' |' * (len(columns) - 1)}")
        lines.append(f"| {' | '.join([row.title, *_cells(row, group)])} |")
    return "\n".join(lines)


def _own_beside(group: Group) -> list[str]:
    """How much covmerge's own methods are above each row, if they stand in the table."""
    own = list(dict.fromkeys(title for row in group.rows for title in row.below))
    if not own:
        return []
    lines = [f"| less | {' | '.join(own)} |", f"|---|{'---:|' * len(own)}"]
    for row in group.rows:
        cells = (_written(row.below[t]) if t in row.below else "" for t in own)
        lines.append(f"| {' | '.join([row.title, *cells])} |")
    return ["\n".join(lines)]


def _written(interval: Interval) -> str:
    low, high, mark = 100 * interval.low, 100 * interval.high, "*" if interval.clear else ""
    return f"{100 * interval.mean:+.1f} [{low:+.1f}, {high:+.1f}]{mark}"


def _measures(group: Group) -> list[str]:
    return sorted({name for row in group.rows for name in row.measures})


def _columns(group: Group) -> list[str]:
    return ["model", *group.tasks, "mean", "of experts", "beyond tuned", *_measures(group), "s"]


def _cells(row: Row, group: Group) -> list[str]:
    spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
    return [
        *(f"{100 * row.accuracy[task]:.1f}" for task in group.tasks),
        f"{100 * row.mean.mean:.1f}{spread} [{100 * row.mean.low:.1f}, {100 * row.mean.high:.1f}]",
        f"{100 * row.share:.1f}",
        "" if row.beyond_tuned is None else _written(row.beyond_tuned),
        *(f"{row.measures[m]:.2f}" if m in row.measures else "" for m in _measures(group)),
        "" if row.seconds is None else f"{row.seconds:.1f}",
    ]
