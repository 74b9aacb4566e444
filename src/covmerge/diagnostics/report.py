"""The outcome of checks on an output, and what all outputs have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covmerge.checkpoints import open_checkpoint
from covmerge.errors import CheckFailed, CheckpointError, InputError
from covmerge.types import Json

DIFFERS = "differs from base"  # the check that a merge changed anything


@dataclass(frozen=True)
class Check:
    """One check and its outcome."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of all checks on one output."""

    folder: Path
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

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
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in self.checks],
        }


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read covmerge.json of an output.

    Raises:
        InputError: there is none, or it is of something else.
    """
    path = folder / "covmerge.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if "comparison" in manifest:
            models = [row["method"] for row in manifest["comparison"]["methods"]]
            raise InputError(
                f"{folder} holds a comparison: verify one of its models, such as {folder / models[0]}"
            )
        if not all(key in manifest for key in ("tensors", "heads", "totals", "recipe")):
            raise ValueError("keys are missing")
    except FileNotFoundError:
        raise InputError(
            f"{folder} has no covmerge.json: it is not a finished output of covmerge. Name the folder "
            "that `covmerge merge` wrote."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read as a covmerge manifest: {error}") from error
    return manifest


def check_heads(folder: Path, manifest: Mapping[str, Any]) -> Check:
    """Check that every task head of the manifest is there and can be read."""
    wrong: list[str] = []
    heads: Mapping[str, list[str]] = manifest["heads"]
    for expert, names in heads.items():
        try:
            head = open_checkpoint(folder / "heads" / f"{expert}.safetensors")
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if set(head.headers) != set(names):
            wrong.append(f"heads/{expert}.safetensors holds {sorted(head.headers)}, not {names}")
        head.close()
    good = f"{len(heads)} task heads kept" if heads else "no task heads"
    return Check("heads", not wrong, "; ".join(wrong) or good)
