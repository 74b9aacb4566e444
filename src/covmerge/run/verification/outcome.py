"""The outcome of checks on an output, and what all outputs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covmerge.base.errors import CheckFailed, CheckpointError
from covmerge.base.table import Table, Tabular, paragraph, table_html
from covmerge.base.types import Json
from covmerge.files.checkpoints.folder import open_file
from covmerge.files.checkpoints.layout import HEADS_FOLDER
from covmerge.files.stores.store import Store, file_at

DIFFERS = "differs from base"  # the check that a merge changed anything


def all_there(count: int) -> str:
    """Say of so many tensors that none is missing, and none too many."""
    return f"{f'all {count} tensors are' if count > 1 else 'its one tensor is'} there, and no other"


@dataclass(frozen=True)
class Check:
    """One check and its outcome.

    Attributes:
        name: what was checked.
        ok: whether nothing wrong was found.
        detail: what was found, or why nothing could be.
        made: whether there was what it takes to make the check.
        noted: whether it passed with something that a reader should know.
    """

    name: str
    ok: bool
    detail: str
    made: bool = True
    noted: bool = False

    @property
    def result(self) -> str:
        """The outcome in a word."""
        return ("ok" if self.made else "not made") if self.ok else "FAILED"


@dataclass(frozen=True, repr=False)
class Verification(Tabular):
    """Outcome of all checks on one output.

    Attributes:
        folder: where it is, or another store.
        checks: in the order in which they were made.
    """

    folder: Path | Store
    checks: tuple[Check, ...]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.folder}: {self.verdict}>"

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.ok)

    @property
    def verdict(self) -> str:
        """The outcome in a line."""
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
        """The report as plain JSON."""
        return {
            "folder": str(self.folder),
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
        }

    def table(self) -> Table:
        """One row for each check."""
        columns = ("check", "result", "detail")
        return Table(columns, tuple((one.name, one.result, one.detail) for one in self.checks))

    def html(self) -> str:
        """What a notebook shows."""
        return paragraph(f"{self.folder}: {self.verdict}") + table_html(self.table())


def check_heads(store: Store, manifest: Mapping[str, Any]) -> Check:
    """Check that every task head of the manifest is there and can be read."""
    wrong: list[str] = []
    heads: Mapping[str, list[str]] = manifest["heads"]
    for expert, names in heads.items():
        try:
            file = file_at(store, f"{HEADS_FOLDER}/{expert}.safetensors")
            head = open_file(str(file), file)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if set(head.headers) != set(names):
            wrong.append(f"heads/{expert}.safetensors holds {sorted(head.headers)}, not {names}")
        head.close()
    good = f"{len(heads)} task heads kept" if heads else "no task heads"
    return Check("heads", not wrong, "; ".join(wrong) or good)
