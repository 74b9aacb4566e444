"""The entries of covmerge.json for a finished run: items joined to tensors, tensors to totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, cast

from covmerge.base.diagnostics import MergeSummary, TensorDiagnostics
from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.tensors.names import layer_name
from covmerge.maths.methods import registry
from covmerge.plan.planning.types import Plan

# The loss of the merged update to a quantised format, layer by layer.
#
# Two numbers describe the loss, because updates may be smaller or larger than a format's steps:
#
#     lost = ‖Q(W̄) − W̄‖ / ‖W̄ − W_0‖                      noise, as a share of the update
#     kept = ⟨Q(W̄) − W_0, W̄ − W_0⟩ / ‖W̄ − W_0‖²          the share of the update in the output
#
# Where the base lies on the same steps, small updates are rounded away: lost 1, kept 0. Where the base does
# not, the noise may be many times the update, and the update is still there: lost 10, kept 1.

_OUTSIDE = "outside the layers"
_EATEN = 1.0  # a layer with at least this `lost` has more noise than update
MOSTLY = 0.5  # a warning is given where a plain dtype loses at least this share of the update


def quantised_entry(
    form: str, rounded: Sequence[Mapping[str, float]], merged: float | None
) -> dict[str, Json]:
    """Return the entry of a packed tensor in covmerge.json, from the sums over each of its items.

    `rounded` is empty where the base's bytes were copied. `merged` is ‖W̄ − W_0‖; None: the recipe has no
    base, or the tensor was not merged.
    """
    weights = sum(part["weights"] for part in rounded)
    error = sum(part["error"] for part in rounded)
    entry: dict[str, Json] = {"format": form, "error": sqrt(error / weights) if weights else 0.0}
    if merged and all("along" in part for part in rounded):
        entry["kept"] = sum(part["along"] for part in rounded) / merged**2
    return entry


def losses_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
    """Return the loss of all packed tensors together and by layer; empty where no tensor is packed."""
    packed = {name: entry for name, entry in entries.items() if "quantised" in entry}
    if not packed:
        return {}
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for name, entry in packed.items():
        place = layer_name(name)
        layer = _OUTSIDE if place is None else f"{place.stack}{place.index}"
        layers.setdefault(layer, []).append(entry)
    rows: list[Json] = [{"layer": layer, **_loss(members)} for layer, members in layers.items()]
    return {"quantised": {**_loss(list(packed.values())), "layers": rows}}


def _loss(entries: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    merged = [entry for entry in entries if "kept" in entry["quantised"]]
    updates = sum(entry["merged_norm"] ** 2 for entry in merged)
    noise = sum((entry["merged_norm"] * entry["rounding_loss"]) ** 2 for entry in merged)
    left = sum(entry["quantised"]["kept"] * entry["merged_norm"] ** 2 for entry in merged)
    found: dict[str, Json] = {
        "tensors": len(entries),
        "error": max(entry["quantised"]["error"] for entry in entries),
    }
    if updates:
        found |= {"lost": sqrt(noise / updates), "kept": left / updates}
    return found


def account_of_losses(totals: Mapping[str, Any]) -> MergeSummary:
    """Return the summary of rounding, with a warning where most of the update is lost; see `losses_of`."""
    found: Mapping[str, Any] | None = totals.get("quantised")
    if found is None:
        lost: float = totals["rounding_loss"]
        warning = (
            f"storing loses {lost:.2%} of the merged update's norm: store it in float32 "
            f"({Hint('out_dtype', 'float32')})"
        )
        return MergeSummary(warnings=(warning,) if lost >= MOSTLY else ())
    if "lost" not in found:  # there is no base, or no update in these tensors
        text = f"{found['tensors']} tensors; of a tensor's weights rounding is {found['error']:.2%} at most"
        return MergeSummary(rows=(("quantised", text),))
    row = (
        "quantised",
        f"{found['tensors']} tensors; of the merged update {found['kept']:.1%} is left in them, beside "
        f"noise of {found['lost']:.1%} of its norm",
    )
    eaten = [layer["layer"] for layer in found["layers"] if layer.get("lost", 0.0) >= _EATEN]
    if not eaten:
        return MergeSummary(rows=(row,))
    warning = (
        f"rounding to the quantised format is more than the merged update in {some(eaten, 5)}: the "
        "update is mostly lost where little of it is kept; keep these layers plain "
        f"({Hint('keep', 'PATTERN')}), or write a higher format"
    )
    return MergeSummary(rows=(row,), warnings=(warning,))


def tensor_entries(plan: Plan, done: Sequence[Mapping[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return one entry per output tensor, from the measurements of the plan's items.

    An entry holds `update_norm`: ‖Δ_t‖_F by expert; `merged_norm`: ‖W̄ − W_0‖_F; `rounding_loss`: the
    share of the merged update lost to the output dtype; `arithmetic`: the half-precision dtype that the
    method computed in; where they were measured, `unrounded_norm`: ‖Ŵ − W_0‖_F of the same merge Ŵ in
    the recipe's dtype, and `arithmetic_loss`: ‖Ŵ − W̄‖_F / ‖Ŵ − W_0‖_F, both estimated from the first
    rows where a tensor is merged in parts; `matrices`: the method's
    diagnostics of each matrix; `adapter`: facts about the tensor in an output adapter, or `left_out`
    where the adapter has no place for the tensor; `quantised`: the packed format, ‖Q(W̄) − W̄‖/‖W̄‖,
    and the share of the update that is kept (see the top of this module).
    """
    items: dict[str, list[Mapping[str, Any]]] = {tensor.name: [] for tensor in plan.tensors}
    rounded: dict[str, list[Mapping[str, Any]]] = {tensor.name: [] for tensor in plan.tensors}
    for item, facts in zip(plan.items, done, strict=True):
        if "packed" in facts:
            rounded[item.tensor.key].append(cast("Mapping[str, Any]", facts["packed"]))
        if "merged" in facts:
            items[item.tensor.key].append(cast("Mapping[str, Any]", facts))
    entries: dict[str, dict[str, Json]] = {}
    for tensor in plan.tensors:
        entry: dict[str, Json] = {
            "role": str(tensor.info.role),
            "why": tensor.info.why,
            "rule": tensor.rule,
            "dtype": str(tensor.output.dtype).removeprefix("torch."),
            "shape": list(tensor.output.shape),
        }
        parts, change = items[tensor.name], None
        if parts:
            merged = change = _root(part["merged"] for part in parts)
            rounding = _root(part["rounding"] for part in parts)
            entry["update_norm"] = {
                expert: _root(part["updates"][expert] for part in parts)
                for expert in parts[0]["updates"]
            }
            entry["merged_norm"] = merged
            entry["rounding_loss"] = rounding / merged if merged else 0.0
            if tensor.merge is not None and tensor.merge.half:
                entry["arithmetic"] = tensor.merge.half
                if all("arithmetic" in part for part in parts):
                    lost = _root(part["arithmetic"]["lost"] for part in parts)
                    unrounded = _root(part["arithmetic"]["update"] for part in parts)
                    entry["unrounded_norm"] = unrounded
                    entry["arithmetic_loss"] = lost / unrounded if unrounded else 0.0
            matrices = [matrix for part in parts for matrix in part.get("matrices", [])]
            if matrices:
                entry["matrices"] = matrices
            entry |= {key: parts[0][key] for key in ("adapter", "left_out") if key in parts[0]}
        if tensor.form.format:
            update = None if plan.recipe.base is None else change
            entry["quantised"] = quantised_entry(tensor.form.format, rounded[tensor.name], update)
        entries[tensor.name] = entry
    return entries


def diagnostics_in(
    plan: Plan, entries: Mapping[str, Mapping[str, Any]]
) -> tuple[TensorDiagnostics, ...]:
    """Return the diagnostics of all merged tensors, each in the type that its method declares.

    Raises:
        InputError: an entry's `matrices` are not what its method writes.
    """
    found: list[TensorDiagnostics] = []
    for tensor in plan.tensors:
        merge, entry = tensor.merge, entries.get(tensor.name, {})
        if merge is not None and "matrices" in entry:
            kind = registry.get(merge.method).diagnostics
            try:
                matrices = tuple(map(kind.from_json, entry["matrices"]))
            except ValueError as error:
                raise InputError(
                    f"tensors.{tensor.name}.matrices of covmerge.json is not what method "
                    f"'{merge.method}' writes: {shorten(str(error))}; merge again"
                ) from error
            experts = tuple(entry["update_norm"])
            found.append(TensorDiagnostics(tensor.name, merge.parameters, experts, matrices))
    return tuple(found)


def totals(
    entries: Mapping[str, Mapping[str, Any]], diagnostics: Mapping[str, Json]
) -> dict[str, Json]:
    """Return the totals of a merge: counts by rule, the methods' diagnostics, the losses by rounding."""
    by_rule: dict[tuple[str, str], int] = {}
    for entry in entries.values():
        key = (entry["role"], entry["rule"])
        by_rule[key] = by_rule.get(key, 0) + 1
    merged = [entry for entry in entries.values() if "merged_norm" in entry]
    change = _root(entry["merged_norm"] ** 2 for entry in merged)
    lost = _root((entry["merged_norm"] * entry["rounding_loss"]) ** 2 for entry in merged)
    return {
        "by_rule": [
            {"role": role, "rule": rule, "tensors": count}
            for (role, rule), count in by_rule.items()
        ],
        "matrices": sum(len(entry.get("matrices", ())) for entry in entries.values()),
        **diagnostics,
        "merged_norm": change,
        **_of_adapter(merged, change),
        **losses_of(entries),
        "rounding_loss": lost / change if change else 0.0,
        **_arithmetic(merged),
    }


def rounding_said(totals: Mapping[str, Any], stored: str | None = None) -> str:
    """Return a sentence on what half-precision steps and storing lost of the update's norm.

    `stored` is the text of the share that storing lost; None: that of `totals`, in percent.

    Example:
        >>> said = {"rounding_loss": 0.0}
        >>> rounding_said(said)
        "storing loses 0.00% of the merged update's norm"
        >>> rounding_said(
        ...     said | {"arithmetic": ["float16"], "arithmetic_loss": 0.1, "arithmetic_tensors": [7, 8]}
        ... )[:91]
        "computing in float16 lost 10.00% of the merged update's norm (measured in 7 of 8 tensors), "
    """
    stored = f"{totals['rounding_loss']:.2%}" if stored is None else stored
    dtypes = totals.get("arithmetic", ())
    whole = "of the merged update's norm"
    if not dtypes:
        return f"storing loses {stored} {whole}"
    computed = f"computing in {' and '.join(dtypes)}"
    loss: float | None = totals.get("arithmetic_loss")
    if loss is None:
        said = f"storing loses {stored} {whole}; what {computed} lost before was not measured"
    else:
        measured, merged = totals["arithmetic_tensors"]
        where = f" (measured in {measured} of {merged} tensors)" if measured < merged else ""
        said = f"{computed} lost {loss:.2%} {whole}{where}, and storing it {stored}"
    if loss == 0.0:
        return said
    return (
        f"{said}. Each step rounded the weights. To lose less, merge with `dtype: float32` in the "
        f"mergekit recipe, and `out_dtype: {dtypes[0]}` to store as now"
    )


def _arithmetic(merged: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """Return the loss to half-precision steps, over the tensors where the loss was measured."""
    half = [entry for entry in merged if "arithmetic" in entry]
    if not half:
        return {}
    found: dict[str, Json] = {"arithmetic": sorted({entry["arithmetic"] for entry in half})}
    measured = [entry for entry in half if "arithmetic_loss" in entry]
    if measured:
        change = _root(entry["unrounded_norm"] ** 2 for entry in measured)
        lost = _root(
            (entry["unrounded_norm"] * entry["arithmetic_loss"]) ** 2 for entry in measured
        )
        found["arithmetic_loss"] = lost / change if change else 0.0
        found["arithmetic_tensors"] = [len(measured), len(half)]
    return found


def _of_adapter(merged: Sequence[Mapping[str, Any]], change: float) -> dict[str, Json]:
    """Return the shares of the merged update's energy that an output adapter leaves out or truncates."""
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
