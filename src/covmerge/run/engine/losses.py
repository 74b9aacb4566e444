"""What rounding to a quantised format does to the merged update, layer by layer.

Two numbers say it, as updates may be smaller than a format's steps or larger:

    lost = ‖Q(W̄) − W̄‖ / ‖W̄ − W_0‖                      noise, as a share of the update
    kept = ⟨Q(W̄) − W_0, W̄ − W_0⟩ / ‖W̄ − W_0‖²          the update in what was written

Of a base that lies on the same steps, small updates are rounded away: lost 1, kept 0. Of one that does
not, noise may be many times the update, which is there all the same: lost 10, kept 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from covmerge.base.diagnostics import MergeSummary
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.tensors.layers import layer_name

_OUTSIDE = "outside the layers"
_EATEN = 1.0  # from where on rounding is more than the update


def quantised_entry(
    form: str, rounded: Sequence[Mapping[str, float]], merged: float | None
) -> dict[str, Json]:
    """Return what covmerge.json says of a packed tensor.

    Args:
        form: what it is packed as.
        rounded: the sums of its items; empty where the base's bytes were taken.
        merged: ‖W̄ − W_0‖; None: it is the base's.
    """
    weights = sum(part["weights"] for part in rounded)
    error = sum(part["error"] for part in rounded)
    entry: dict[str, Json] = {"format": form, "error": sqrt(error / weights) if weights else 0.0}
    if merged and all("along" in part for part in rounded):
        entry["kept"] = sum(part["along"] for part in rounded) / merged**2
    return entry


def losses_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Json]:
    """Return the loss of all packed tensors that were merged, and by layer; nothing where there is none."""
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
    """Say what rounding did, with a warning where it is more than the update; see `losses_of`."""
    found: Mapping[str, Any] | None = totals.get("quantised")
    if found is None:
        return MergeSummary()
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
