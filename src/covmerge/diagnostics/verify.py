"""Re-read an output folder and check what its manifest claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from covmerge.checkpoints import Checkpoint, open_checkpoint
from covmerge.diagnostics.report import DIFFERS, Check, VerifyReport, check_heads, read_manifest
from covmerge.diagnostics.verify_adapter import verify_adapter
from covmerge.errors import CheckpointError, InputError
from covmerge.export import find_masks
from covmerge.linalg.finite import all_finite
from covmerge.types import TensorHeader

# Small, so that blocks stay in the cache, and little is read of the base where a tensor differs.
_BLOCK_ELEMENTS = 2**20


def verify(folder: str | Path, *, base: Checkpoint | None = None) -> VerifyReport:
    """Re-read an output of covmerge and check it.

    Coverage (each tensor of the manifest, no other, with its shape and dtype), finite values,
    copied tensors equal to the base's, "differs from base", rounding loss of the output dtype, the
    task heads, and masks. Of an adapter what `verify_adapter` checks.

    Args:
        folder: the output.
        base: the base checkpoint; None opens the source that the manifest names, and fetches it if
            it is on the Hub. Where that is not to be had, the comparison falls back on the recorded
            norms and says so.

    Raises:
        InputError: the folder is not an output of covmerge.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest["recipe"].get("output", {}).get("format") == "adapter":
        return verify_adapter(folder)
    entries: Mapping[str, Mapping[str, Any]] = manifest["tensors"]
    output = open_checkpoint(folder)
    opened: Checkpoint | None = None
    try:
        missing = ""
        if base is None:
            try:
                opened = open_checkpoint(_base_of(manifest))
                opened.materialize()
                base = opened
            except InputError as error:
                missing = str(error)
        checks = [_coverage(entries, output.headers)]
        if checks[0].ok:
            checks += _values(entries, output, base, missing)
        checks += [_rounding(manifest), check_heads(folder, manifest)]
        if "rescalers" in manifest:
            checks.append(_masks(folder, list(manifest["rescalers"])))
        return VerifyReport(folder, tuple(checks))
    finally:
        output.close()
        if opened is not None:
            opened.close()


def _base_of(manifest: Mapping[str, Any]) -> str:
    """The base's source; on the Hub, where a branch moves on, at the commit that was merged over."""
    source: str = manifest["recipe"]["base"]
    commit: str | None = (
        manifest.get("sources", {}).get("base", {}).get("content", {}).get("revision")
    )
    return source if commit is None else f"{source.partition('@')[0]}@{commit}"


def _masks(folder: Path, experts: list[str]) -> Check:
    wrong: list[str] = []
    for expert in experts:
        try:
            find_masks(folder, expert)
        except (InputError, CheckpointError) as error:
            wrong.append(str(error))
    good = f"those of {len(experts)} experts are as they were written"
    return Check("masks", not wrong, "; ".join(wrong) or good)


def _coverage(
    entries: Mapping[str, Mapping[str, Any]], headers: Mapping[str, TensorHeader]
) -> Check:
    wrong = [f"'{name}' is not in the manifest" for name in headers if name not in entries]
    for name, entry in entries.items():
        if name not in headers:
            wrong.append(f"'{name}' is missing")
            continue
        header = headers[name]
        found = (list(header.shape), str(header.dtype).removeprefix("torch."))
        if found != (entry["shape"], entry["dtype"]):
            wrong.append(
                f"'{name}' is {found[1]} {found[0]}, not {entry['dtype']} {entry['shape']}"
            )
    detail = "; ".join(wrong[:5]) or f"all {len(entries)} tensors are there, and no other"
    return Check("coverage", not wrong, detail)


def _values(
    entries: Mapping[str, Mapping[str, Any]],
    output: Checkpoint,
    base: Checkpoint | None,
    missing: str,
) -> list[Check]:
    """Read everything once: finite, copied where copied, changed where changed."""
    not_finite: list[str] = []
    not_copied: list[str] = []
    changed = 0
    for name, entry in entries.items():
        header = output.headers[name]
        finite, equal = True, True
        for rows in header.row_blocks(_BLOCK_ELEMENTS):
            block = output.read(name, rows)
            finite &= all_finite(block)
            if base is not None and equal:
                equal = torch.equal(block, base.read(name, rows).to(block.dtype))
        if not finite:
            not_finite.append(name)
        if base is None:
            equal = not entry.get("merged_norm")
        elif "merged_norm" not in entry and not equal:
            not_copied.append(name)
        changed += not equal
    against = "the base" if base is not None else "recorded norms (the base is not at hand)"
    checks = [
        Check("finite", not not_finite, _listed(not_finite) or "no NaN or Inf"),
        Check(
            DIFFERS,
            changed > 0,
            f"{changed} of {len(entries)} tensors differ, by {against}"
            if changed
            else f"every tensor equals the base's, by {against}: were the experts trained?",
        ),
    ]
    if base is not None:
        detail = _listed(not_copied) or "tensors copied from the base equal it"
        checks.append(Check("copied", not not_copied, detail))
    else:
        checks.append(Check("copied", True, f"not compared: {missing}"))
    return checks


def _rounding(manifest: Mapping[str, Any]) -> Check:
    loss = float(manifest["totals"]["rounding_loss"])
    return Check(
        "rounding",
        loss < 1.0,
        f"storing the result loses {loss:.2%} of the merged update's norm"
        + (": store it in float32 (--out-dtype float32)" if loss > 0.1 else ""),
    )


def _listed(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")
