"""Statistics of a finished run: items joined to tensors, tensors to totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, cast

from covmerge.engine.advice import outweighed
from covmerge.plan import Plan
from covmerge.types import Json


def tensor_stats(plan: Plan, done: Sequence[Mapping[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return one entry per output tensor, of the statistics of the plan's items.

    `update_norm` ‖Δ_t‖_F by expert, `merged_norm` ‖W̄ − W_0‖_F, `rounding_loss` the share of the
    merged update lost to the output dtype, `matrices` what the method noticed in each matrix,
    `adapter` what it became in an adapter; `left_out` where it has no place there.
    """
    items: dict[str, list[Mapping[str, Any]]] = {tensor.name: [] for tensor in plan.tensors}
    for item, stats in zip(plan.items, done, strict=True):
        if stats:
            items[item.tensor.key].append(cast("Mapping[str, Any]", stats))
    entries: dict[str, dict[str, Json]] = {}
    for tensor in plan.tensors:
        entry: dict[str, Json] = {
            "role": str(tensor.role),
            "why": tensor.why,
            "rule": tensor.rule,
            "dtype": str(tensor.output.dtype).removeprefix("torch."),
            "shape": list(tensor.output.shape),
        }
        parts = items[tensor.name]
        if parts:
            merged = _root(part["merged"] for part in parts)
            rounding = _root(part["rounding"] for part in parts)
            entry["update_norm"] = {
                expert: _root(part["updates"][expert] for part in parts)
                for expert in parts[0]["updates"]
            }
            entry["merged_norm"] = merged
            entry["rounding_loss"] = rounding / merged if merged else 0.0
            matrices = [matrix for part in parts for matrix in part.get("matrices", [])]
            if matrices:
                entry["matrices"] = matrices
            entry |= {key: parts[0][key] for key in ("adapter", "left_out") if key in parts[0]}
        entries[tensor.name] = entry
    return entries


def totals(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
    """Return what a reader wants first: counts by rule, gates fired, jitter, rounding."""
    by_rule: dict[tuple[str, str], int] = {}
    for entry in entries.values():
        key = (entry["role"], entry["rule"])
        by_rule[key] = by_rule.get(key, 0) + 1
    matrices = [matrix for entry in entries.values() for matrix in entry.get("matrices", [])]
    merged = [entry for entry in entries.values() if "merged_norm" in entry]
    change = _root(entry["merged_norm"] ** 2 for entry in merged)
    lost = _root((entry["merged_norm"] * entry["rounding_loss"]) ** 2 for entry in merged)
    return {
        "by_rule": [
            {"role": role, "rule": rule, "tensors": count}
            for (role, rule), count in by_rule.items()
        ],
        "matrices": len(matrices),
        "gate_fired": [
            name
            for name, entry in entries.items()
            if any(matrix.get("gate_fired") for matrix in entry.get("matrices", []))
        ],
        "ridge_dominates": [
            name
            for name, entry in entries.items()
            if any(map(outweighed, entry.get("matrices", [])))
        ],
        "largest_jitter": max((matrix.get("jitter", 0.0) for matrix in matrices), default=0.0),
        "unchanged_updates": sum(matrix.get("unchanged", 0) for matrix in matrices),
        "merged_norm": change,
        **_of_adapter(merged, change),
        "rounding_loss": lost / change if change else 0.0,
    }


def _of_adapter(merged: Sequence[Mapping[str, Any]], change: float) -> dict[str, Json]:
    """Return shares of the merged update's energy that an adapter does not have."""
    if not any("adapter" in entry for entry in merged):
        return {}
    outside = sum(entry["merged_norm"] ** 2 for entry in merged if "left_out" in entry)
    truncated = sum(
        entry["merged_norm"] ** 2 * entry["adapter"].get("discarded_energy", 0.0)
        for entry in merged
        if "adapter" in entry
    )
    energy = change**2 or 1.0
    return {"left_out_energy": outside / energy, "discarded_energy": truncated / energy}


def _root(squares: Iterable[float]) -> float:
    return sqrt(sum(squares))
