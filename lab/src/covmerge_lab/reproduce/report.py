"""Paper value beside own value: for JSON, Markdown, and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from covmerge import __version__
from covmerge.base.types import Json
from covmerge.files.checkpoints.json_file import dumps
from covmerge.files.stores.disk import replace_file
from covmerge_lab.reproduce.published import MEAN, Row, Setting, Table
from covmerge_lab.reproduce.run import Line, Result

STAND_INS = "OWN VALUES ARE OF STAND-INS, tiny random models, and mean nothing beside the paper's"
FILES = ("results.json", "results.md")
LABEL_WIDTH = 14  # of a row's name on a terminal
KINDS = ("paper", "own", "diff")
PREDICTED = "predicted"  # in the place of the paper's, where covmerge foretold the value


def title(table: Table, setting: Setting, *, stand_ins: bool) -> str:
    """What stands over a setting's numbers."""
    unit = "percent of the expert's own" if setting.share else "percent"
    warning = f" - {STAND_INS}" if stand_ins else ""
    return f"{table.paper}, {table.label}: {setting.name}, {unit}{warning}"


def shown_columns(result: Result, width: int | None = None) -> list[str]:
    """The columns to print: all with the mean, or the mean alone where `width` characters are too few."""
    columns = [*(column.title for column in result.setting.columns), MEAN]
    printed = [columns, *(values(line, k, columns) for line in result.lines for k in KINDS)]
    needed = sum(1 + max(map(len, cells)) for cells in zip(*printed, strict=True))
    return columns if width is None or 2 + LABEL_WIDTH + needed <= width else [MEAN]


def values(line: Line, kind: str, columns: Sequence[str]) -> list[str]:
    """One of the three lines of a row, as text; empty where there is no number."""
    found: list[str] = []
    for column in columns:
        row = line.row
        paper, own = {**row.predicted, **row.published}.get(column), line.own.get(column)
        both = None if paper is None or own is None else own - paper
        number = {"paper": paper, "own": own}.get(kind, both)
        sign = "+" if kind == KINDS[2] else ""
        found.append("" if number is None else f"{number:{sign}.1f}")
    return found


def label(row: Row, kind: str) -> str:
    """What one of the three lines of a row is called."""
    return PREDICTED if row.predicted and kind == KINDS[0] else kind


def as_json(table: Table, results: Sequence[Result], *, stand_ins: bool) -> dict[str, Json]:
    """All of it as plain JSON."""
    return {
        "covmerge": __version__,
        "table": table.name,
        "paper": table.paper,
        "label": table.label,
        "stand_ins": stand_ins,
        "notes": [*([STAND_INS] if stand_ins else []), *table.notes],
        "settings": [
            {
                "setting": result.setting.name,
                "models": str(result.folder),
                "share_of_expert": result.setting.share,
                "rows": [
                    {
                        "title": line.row.title,
                        "row": line.row.key,
                        "method": line.row.method or None,
                        "parameters": dict(line.row.parameters),
                        "paper": dict(line.row.published),
                        PREDICTED: dict(line.row.predicted),
                        "own": dict(line.own),
                        "difference": {
                            column: line.own[column] - value
                            for column, value in {
                                **line.row.predicted,
                                **line.row.published,
                            }.items()
                            if column in line.own
                        },
                        "note": line.note or None,
                    }
                    for line in result.lines
                ],
            }
            for result in results
        ],
    }


def as_markdown(table: Table, results: Sequence[Result], *, stand_ins: bool) -> str:
    """The same for a reader."""
    parts: list[str] = []
    for result in results:
        columns = shown_columns(result)
        parts += [f"## {title(table, result.setting, stand_ins=stand_ins)}", ""]
        parts += [f"| row | | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
        for line in result.lines:
            for kind in KINDS:
                head = line.row.title if kind == KINDS[0] else ""
                parts.append(
                    f"| {head} | {label(line.row, kind)} | {' | '.join(values(line, kind, columns))} |"
                )
        parts += ["", *(f"- {note}" for note in notes(result)), ""]
    return "\n".join([*parts, *(f"- {note}" for note in table.notes), ""])


def notes(result: Result) -> list[str]:
    """What the rows' numbers need said, once for all rows of which it is true."""
    rows: dict[str, list[str]] = {}
    for line in result.lines:
        if line.note:
            rows.setdefault(line.note, []).append(line.row.title)
    skipped = [
        column.title
        for column in result.setting.columns
        if column.runs_code and all(column.title not in line.own for line in result.lines)
    ]
    code = (
        f"{', '.join(skipped)}: not scored, as that runs code that the model wrote; in a sandbox set "
        "HF_ALLOW_CODE_EVAL=1"
    )
    return [f"{', '.join(titles)}: {note}" for note, titles in rows.items()] + [code] * bool(
        skipped
    )


def discard(folder: Path) -> None:
    """Remove an earlier run's results, before its models are replaced."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def write(table: Table, results: Sequence[Result], folder: Path, *, stand_ins: bool) -> list[Path]:
    """Write the results beside the models, each file at once."""
    folder.mkdir(parents=True, exist_ok=True)
    content = as_json(table, results, stand_ins=stand_ins)
    texts = (
        dumps(content, what="results", indent=1) + "\n",
        as_markdown(table, results, stand_ins=stand_ins),
    )
    for name, text in zip(FILES, texts, strict=True):
        replace_file(folder / name, text)
    return [folder / name for name in FILES]
