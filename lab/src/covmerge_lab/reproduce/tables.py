"""All published tables, by name."""

from __future__ import annotations

from covmerge.errors import InputError, did_you_mean
from covmerge_lab.reproduce import ace, actmat
from covmerge_lab.reproduce.predicted import with_default
from covmerge_lab.reproduce.published import Setting, Table

TABLES = {table.name: with_default(table) for table in (*ace.TABLES, *actmat.TABLES)}


def find_table(name: str) -> Table:
    """Return a table.

    Raises:
        InputError: there is none of that name.

    Example:
        >>> find_table("ace/table2").settings[0].experts["cola"].hub
        'tanganke/gpt2_cola'
    """
    if name not in TABLES:
        raise InputError(f"there is no table '{name}'." + did_you_mean(name, TABLES))
    return TABLES[name]


def choose_settings(table: Table, wanted: str | None) -> list[Setting]:
    """Return the settings named in `a,b`, or all of them.

    Raises:
        InputError: the table has no such setting.
    """
    by_name = {setting.name: setting for setting in table.settings}
    names = list(by_name) if wanted is None else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in by_name:
            raise InputError(f"{table.name} has no setting '{name}'." + did_you_mean(name, by_name))
    return [by_name[name] for name in names]
