"""Re-read a merged adapter and check what its manifest claims."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from covmerge.checkpoints import AdapterCheckpoint, open_checkpoint
from covmerge.diagnostics.report import DIFFERS, Check, VerifyReport, check_heads, read_manifest
from covmerge.errors import InputError


def verify_adapter(folder: str | Path) -> VerifyReport:
    """Re-read an adapter that covmerge merged and check it.

    Coverage (each update of the manifest with its rank, no other), finite values, that it changes
    anything, and the task heads.

    Raises:
        InputError: the folder is not an adapter that covmerge wrote.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
    wanted = {
        matrix["adapter_tensor"]: matrix["adapter_rank"]
        for entry in entries.values()
        for matrix in entry["matrices"]
    }
    written = open_checkpoint(folder)
    try:
        if not isinstance(written, AdapterCheckpoint):
            raise InputError(f"{folder} holds no adapter, though its manifest says so: merge again")
        ranks = {name: header.rank for name, header in written.low_rank.items()}
        squares = {name: written.read_factors(name).square_norm() for name in ranks}
    finally:
        written.close()
    wrong = sorted(name for name in {*ranks, *wanted} if ranks.get(name) != wanted.get(name))
    bad = [name for name, square in squares.items() if not isfinite(square)]
    checks = (
        Check(
            "coverage",
            not wrong,
            f"missing, unknown or of another rank: {', '.join(wrong[:5])}"
            if wrong
            else f"all {len(wanted)} updates are there, and no other",
        ),
        Check("finite", not bad, ", ".join(bad[:5]) or "no NaN or Inf"),
        Check(DIFFERS, any(squares.values()), "the updates are not all zero"),
        check_heads(folder, manifest),
    )
    return VerifyReport(folder, checks)
