"""The outcome of checks on an output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from covmerge.base.errors import CheckFailed
from covmerge.base.table import Table, Tabular, paragraph, table_html
from covmerge.base.types import Json
from covmerge.files.stores.store import Store

DIFFERS = "differs from base"  # name of the check that the merge changed anything


@dataclass(frozen=True)
class Check:
    """One check and its outcome.

    Attributes:
        name: what was checked.
        ok: whether nothing wrong was found.
        detail: what was found, or why the check could not be made.
        made: whether the check could be made.
        noted: whether the detail has something that a reader should know, although the check passed.
    """

    name: str
    ok: bool
    detail: str
    made: bool = True
    noted: bool = False

    @property
    def result(self) -> str:
        """Return the outcome: ok, not made, or FAILED."""
        return ("ok" if self.made else "not made") if self.ok else "FAILED"


@dataclass(frozen=True, repr=False)
class Verification(Tabular):
    """The outcome of all checks on one output.

    Attributes:
        folder: the output's folder, or the store that holds the output.
        checks: the checks, in the order in which they were made.
    """

    folder: Path | Store
    checks: tuple[Check, ...]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.folder}: {self.verdict}>"

    @property
    def ok(self) -> bool:
        """Return whether no check failed; a check that could not be made is no failure."""
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.ok)

    @property
    def verdict(self) -> str:
        """Return the outcome in one line."""
        count, failed = len(self.checks), len(self.failed)
        if failed:
            return f"{failed} of {count} checks failed"
        missing = sum(not check.made for check in self.checks)
        said = f"{count - missing} checks passed, {missing} could not be made"
        noted = [check.name for check in self.checks if check.noted]
        but = f", but see what is said of {', '.join(noted)}" if noted else ""
        return (said if missing else "every check passed") + but

    def raise_if_failed(self) -> None:
        """Raise CheckFailed with the failed checks, if there are any."""
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]
        if failed:
            raise CheckFailed(f"{self.folder} fails its verification. " + "; ".join(failed))

    def summary(self) -> dict[str, Json]:
        """Return the outcome as plain JSON."""
        return {
            "folder": str(self.folder),
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
        }

    def table(self) -> Table:
        """Return a table with one row for each check."""
        columns = ("check", "result", "detail")
        return Table(columns, tuple((one.name, one.result, one.detail) for one in self.checks))

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        return paragraph(f"{self.folder}: {self.verdict}") + table_html(self.table())
