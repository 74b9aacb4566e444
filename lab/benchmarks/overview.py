"""All suites side by side: `python -m benchmarks.overview` writes the tables of docs/.

A table stands between `<!-- results -->`, or `<!-- results: TITLE; TITLE -->` for some of its rows, and
`<!-- end of results -->`.

It is of the committed results: mean accuracy of every model, by suite and kind of experts. The row of
`auto` is of the folders of `PRESENT` alone: others have it by an earlier rule. Any other row is of the
first of `FOLDERS` that has it; rows of all trainings go before those of one that was run on its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from covmerge_lab.models import Section

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "results.md", DOCS / "auto-measured.md"]
_TABLE = re.compile(r"(<!-- results(?:: (.*?))? -->\n).*?(<!-- end of results -->\n)", re.DOTALL)
PRESENT = "-auto"  # has `auto` by its present rule
FOLDERS = (
    "-newer",
    "-measured",
    "-first",
    "",
    PRESENT,
)  # the later first, but the few rows beside `auto`
EARLIER = ("auto", "auto, base's inputs")  # in all folders but that one
MARKS = ("", "¹", "²")  # of all trainings of a table, of the first of them, of another one
_EXPERTS = "experts, each on its task"
SUITES = ("text", "vision", "llm")
_KINDS = {"full": "full", "lora": "LoRA"}


@dataclass(frozen=True)
class Column:
    """One table of a suite.

    Attributes:
        title: suite, kind of the experts and how many.
        rows: by title, as `results.json` has them.
    """

    title: str
    rows: dict[str, dict[str, Any]]


def columns(results: Path = RESULTS) -> list[Column]:
    """Read the tables of all suites: full fine-tunes first, fewer experts first."""
    found: list[Column] = []
    for suite in SUITES:
        for kind, name in _KINDS.items():
            folder = results / suite
            groups = [g for end in FOLDERS for g in _groups(folder / (kind + end), end)]
            whole = _groups(folder / kind, "") or groups
            for count in dict.fromkeys(len(group["tasks"]) for group in whole):
                of = next(_trainings(group) for group in whole if len(group["tasks"]) == count)
                marked = [
                    (_mark(_trainings(group), of), group)
                    for group in groups
                    if len(group["tasks"]) == count
                ]
                rows: dict[str, dict[str, Any]] = {}
                for mark, group in sorted(marked, key=itemgetter(0)):
                    for row in group["rows"]:
                        rows.setdefault(row["title"], {**row, "mark": MARKS[mark]})
                found.append(Column(f"{suite}, {name}, {count}", rows))
    return found


def _mark(own: list[float], of: list[float]) -> int:
    """Return which of `MARKS` is theirs."""
    if own == of:
        return 0
    return 1 if own[0] == of[0] else 2


def _trainings(group: dict[str, Any]) -> list[float]:
    """How good the experts of each training are, by which it is known."""
    return next(row["seeds"] for row in group["rows"] if row["title"] == _EXPERTS)


def _groups(folder: Path, end: str) -> list[dict[str, Any]]:
    """Read the tables of a folder without rows of earlier rules."""
    path = folder / "results.json"
    groups: list[dict[str, Any]] = (
        json.loads(path.read_text("utf-8"))["groups"] if path.exists() else []
    )
    for group in groups:
        if end != PRESENT:
            group["rows"] = [row for row in group["rows"] if row["title"] not in EARLIER]
    return groups


def table(of: list[Column], titles: list[str] | None = None) -> str:
    """Lay out mean accuracies in percent; what beats tuned Task Arithmetic clearly has a star.

    Args:
        of: the columns.
        titles: of the rows; all without it.

    Raises:
        KeyError: no results have such a row.
    """
    lines = [
        f"| experts | {' | '.join(column.title for column in of)} |",
        f"|---|{'---:|' * len(of)}",
    ]
    section = None
    rows = _rows(of)
    for title in rows if titles is None else titles:
        row = rows[title]
        if row["section"] != section:
            section = row["section"]
            lines.append(f"| *{section}* |{' |' * len(of)}")
        lines.append(f"| {title} | {' | '.join(_cell(column.rows.get(title)) for column in of)} |")
    return "\n".join(lines)


def _rows(of: list[Column]) -> dict[str, dict[str, Any]]:
    """Return one row of each title: section by section, by the mean over all columns."""
    found = {title: row for column in of for title, row in column.rows.items()}
    sections = [section.value for section in Section]

    def mean(title: str) -> float:
        values = [c.rows[title]["mean"]["mean"] for c in of if title in c.rows]
        return sum(values) / len(values)

    order = sorted(found, key=lambda t: (sections.index(found[t]["section"]), -mean(t)))
    return {title: found[title] for title in order}


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    beyond = row["beyond_tuned"]
    star = "*" if beyond and beyond["low"] > 0 else ""
    return f"{100 * row['mean']['mean']:.1f}{star}{row.get('mark', '')}"


def written(text: str) -> str:
    """Return a text with its tables between their marks."""
    of = columns()

    def fill(found: re.Match[str]) -> str:
        begin, titles, end = found.groups()
        named = titles.split("; ") if titles else None
        return f"{begin}{table(of, named)}\n{end}"

    return _TABLE.sub(fill, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")
