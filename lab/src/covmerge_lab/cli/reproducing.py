"""What `covmerge reproduce` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from covmerge.errors import InputError
from covmerge.front.cli import flags
from covmerge.front.cli.console import NOTE, facts, print_json, say, stderr, stdout, table
from covmerge.front.cli.progress import BytesProgress
from covmerge.run.engine.thread_count import torch_threads
from covmerge_lab.reproduce import report, run, stand_ins
from covmerge_lab.reproduce.published import Setting, Table
from covmerge_lab.reproduce.sources import Given
from covmerge_lab.reproduce.tables import TABLES, choose_settings, find_table


@dataclass(frozen=True)
class Flags:
    """The flags as given: lists are still `a,b`, pairs still `NAME=VALUE`."""

    table: str | None
    cache: Path | None
    settings: str | None
    methods: str | None
    experts: Sequence[str]
    checkpoints: Path | None
    data: Path | None
    statistics: Sequence[str]
    limit: int | None
    stand_ins: bool
    device: str
    threads: int | None
    max_memory: str | None
    as_json: bool


def reproduce(given: Flags) -> None:
    """List the tables, or do one again.

    Raises:
        InputError: anything wrong with what was given, missing or out of reach.
    """
    if given.table is None:
        _list(as_json=given.as_json)
        return
    chosen = find_table(given.table)
    settings = choose_settings(chosen, given.settings)
    if given.cache is None:
        raise InputError(f"{chosen.name} needs a folder to work in: pass --cache DIR")
    rows = None if given.methods is None else [key.strip() for key in given.methods.split(",")]
    for setting in settings:
        run.chosen_rows(setting, rows)
    kind = "stand-ins" if given.stand_ins else "tables"
    folder = given.cache / kind / chosen.name.replace("/", "-")
    report.discard(folder)
    with torch_threads(given.threads):
        results = [_one(given, setting, rows, folder / setting.name) for setting in settings]
    written = report.write(chosen, results, folder, stand_ins=given.stand_ins)
    if given.as_json:
        print_json(report.as_json(chosen, results, stand_ins=given.stand_ins))
    else:
        _show(stdout(), chosen, results, written, stand_ins=given.stand_ins)


def _one(given: Flags, setting: Setting, rows: Sequence[str] | None, out: Path) -> run.Result:
    cache = (given.cache or Path()).expanduser().resolve()
    places = Given(
        cache=cache,
        experts=flags.pairs("--expert", given.experts, "cola=./cola"),
        checkpoints=given.checkpoints,
    )
    data = given.data
    if given.stand_ins:
        made = stand_ins.make(setting, cache)
        setting, places, data = made.setting, made.given, made.data
    return run.reproduce(
        setting,
        places,
        run.Options(
            methods=rows,
            data=data,
            statistics=_files(given.statistics),
            limit=given.limit,
            device=given.device,
            threads=given.threads,
            max_memory=given.max_memory,
            progress=BytesProgress(stderr()),
            stand_ins=given.stand_ins,
        ),
        out,
        lambda step: say(NOTE, step),
    )


def _files(statistics: Sequence[str]) -> Mapping[str, Path]:
    found = flags.pairs("--stats", statistics, "cola=cola.covstats.safetensors")
    return {name: Path(path) for name, path in found.items()}


def _list(*, as_json: bool) -> None:
    if as_json:
        print_json([_described(entry) for entry in TABLES.values()])
        return
    listed = table("table", "setting", "fetches", "what you give", right=["fetches"])
    for entry in TABLES.values():
        listed.add_row(entry.name, entry.what)
        for setting in entry.settings:
            size = f"{setting.gigabytes:g} GB" if setting.gigabytes else ""
            listed.add_row("", setting.name, size, _needs(setting))
        listed.add_section()
    console = stdout()
    console.print(listed)
    console.print("Next:\n  covmerge reproduce ace/table2 --cache DIR\n  ... --stand-ins: offline")


def _described(entry: Table) -> dict[str, object]:
    return {
        "table": entry.name,
        "paper": entry.paper,
        "label": entry.label,
        "what": entry.what,
        "settings": [
            {
                "setting": setting.name,
                "gigabytes": setting.gigabytes,
                "needs": _needs(setting) or None,
                "rows": [row.key for row in setting.rows],
            }
            for setting in entry.settings
        ],
    }


def _needs(setting: Setting) -> str:
    """What the hub does not have."""
    sources = [setting.base, *setting.experts.values()]
    unknown = [source for source in sources if source.hub is None]
    given: list[str] = []
    if unknown:
        given.append("--checkpoints" if unknown[0].file else "--expert")
    if setting.family in ("clip", "t5"):
        given.append("--data")
    return ", ".join(given)


def _show(
    console: Console,
    chosen: Table,
    results: Sequence[run.Result],
    written: Sequence[Path],
    *,
    stand_ins: bool,
) -> None:
    for result in results:
        console.print(report.title(chosen, result.setting, stand_ins=stand_ins), soft_wrap=True)
        columns = report.shown_columns(result, console.width)
        grid = table("row", *columns, right=columns)
        grid.padding = (0, 1, 0, 0)  # eight columns and their mean in 80 characters
        grid.columns[0].min_width = report.LABEL_WIDTH - 1
        for line in result.lines:
            for kind in report.KINDS:
                first = kind == report.KINDS[0]
                kept = f" ({report.PREDICTED})" if line.row.predicted else ""
                head = f"{line.row.title}{kept}" if first else f"  {kind}"
                grid.add_row(head, *report.values(line, kind, columns))
        console.print(grid)
        notes = report.notes(result)
        if len(columns) < len(result.setting.columns):
            notes.append("the columns are in results.md, this terminal is too narrow for them")
        console.print(facts((NOTE, note) for note in notes))
    files = ", ".join(map(str, written))
    console.print(facts([*((NOTE, note) for note in chosen.notes), ("written", files)]))
