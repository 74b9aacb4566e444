"""From numbers to findings: what the experts' updates give away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median

from covmerge.inspection.findings import Finding, Severity
from covmerge.inspection.names import block_of, ranges
from covmerge.inspection.result import LayerView

# Cosine between W_t and W_0. Fine-tunes of one base stay above 0.9 in every layer that was measured
# for this; weights that were trained from another start are near 0.
STRANGER = 0.5
TWINS = 0.98  # cosine between two updates from which they are one expert twice
OPPOSED = -0.2
UNEVEN = 10.0  # ratio of update norms from which the largest expert decides plain sums
THIN = 8  # a numerical rank below 1/8 of the full one is a low-rank update
LOST = 0.1  # share of the update lost to bfloat16 that is worth a word


@dataclass(frozen=True)
class Foreign:
    """A layer of an expert that is none of the base's layer."""

    expert: str
    tensor: str
    cosine: float


def strangers(layers: Sequence[LayerView], experts: Sequence[str]) -> list[Finding]:
    """Name experts that were trained from another base."""
    findings: list[Finding] = []
    for expert in experts:
        cosines = [_cosine(layer, expert) for layer in layers if layer.sums.base_norm]
        if cosines and median(cosines) < STRANGER:
            relative = median(layer.relative[expert] for layer in layers if layer.sums.base_norm)
            findings.append(
                Finding(
                    Severity.FAULT,
                    "is not a fine-tune of this base: its weights have a cosine of "
                    f"{median(cosines):.2f} with the base's and an update of {relative:.1f} times "
                    f"their norm (medians of {len(cosines)} matrices; a fine-tune has more than 0.9, "
                    "and far less than 1). Find the base it was trained from",
                    expert,
                )
            )
    return findings


def foreign_layers(layers: Sequence[LayerView], experts: Sequence[str]) -> list[Foreign]:
    """List the layers that are not the base's, of experts that otherwise are."""
    return [
        Foreign(expert, layer.tensor, _cosine(layer, expert))
        for expert in experts
        for layer in layers
        if layer.sums.base_norm and _cosine(layer, expert) < STRANGER
    ]


def findings_of(
    layers: Sequence[LayerView], experts: Sequence[str], *, half: bool
) -> Iterator[Finding]:
    """Say what the sums and spectra of the layers give away.

    Args:
        layers: of all experts.
        experts: their names.
        half: whether the base, and so the merged model, is stored in half precision.
    """
    matrices = [layer for layer in layers if layer.is_matrix]
    for expert in experts:
        yield from _untouched(layers, expert)
        yield from _thin(matrices, expert)
    yield from _scales(layers, experts)
    yield from _pairs(layers, experts)
    yield from _rounding(layers, experts, half)


def _untouched(layers: Sequence[LayerView], expert: str) -> Iterator[Finding]:
    same = [layer for layer in layers if not layer.norms[expert]]
    tensors = tuple(dict.fromkeys(layer.tensor for layer in same))
    if len(same) == len(layers):
        yield Finding(
            Severity.FAULT, "equals the base in every tensor: was it trained, or saved?", expert
        )
        return
    blocks: dict[int, list[LayerView]] = {}
    for layer in layers:
        block = block_of(layer.name)
        if block is not None and layer.is_matrix:
            blocks.setdefault(block, []).append(layer)
    frozen = [b for b, own in blocks.items() if not any(layer.norms[expert] for layer in own)]
    if frozen and len(blocks) > 1:
        named = tuple(dict.fromkeys(layer.tensor for b in frozen for layer in blocks[b]))
        yield Finding(
            Severity.WARNING,
            f"did not change block {ranges(frozen)} of {len(blocks)}: frozen in training, or lost "
            "when it was saved?",
            expert,
            named,
        )
        tensors = tuple(tensor for tensor in tensors if block_of(tensor) not in frozen)
    if tensors:
        yield Finding(
            Severity.NOTE,
            f"left {len(tensors)} {'more ' if frozen else ''}tensors as they are in the base "
            f"({tensors[0]}{', ...' if len(tensors) > 1 else ''})",
            expert,
            tensors,
        )


def _thin(matrices: Sequence[LayerView], expert: str) -> Iterator[Finding]:
    seen = [layer for layer in matrices if layer.norms[expert] and expert in layer.spectra]
    ranks = [layer.spectra[expert].rank for layer in seen]
    thin = [r for r, layer in zip(ranks, seen, strict=True) if THIN * r <= min(layer.shape)]
    if seen and len(thin) >= 0.9 * len(seen):
        yield Finding(
            Severity.NOTE,
            f"its updates have a low rank ({min(ranks)} to {max(ranks)} of "
            f"{min(min(layer.shape) for layer in seen)}): an adapter, or a model that an adapter was "
            "merged into; such experts are merged exactly on their factors (--as adapter)",
            expert,
        )


def _scales(layers: Sequence[LayerView], experts: Sequence[str]) -> Iterator[Finding]:
    norms = {e: sqrt(sum(layer.norms[e] ** 2 for layer in layers)) for e in experts}
    moved = {expert: norm for expert, norm in norms.items() if norm}
    if len(moved) < 2:
        return
    most, least = max(moved, key=moved.__getitem__), min(moved, key=moved.__getitem__)
    if moved[most] > UNEVEN * moved[least]:
        yield Finding(
            Severity.WARNING,
            f"updates are of very different size: '{most}' moved {moved[most] / moved[least]:.0f} "
            f"times as far as '{least}' ({moved[most]:.3g} and {moved[least]:.3g}); averaging and "
            "other plain sums follow the largest",
        )
    matrices = [layer for layer in layers if layer.is_matrix and any(layer.norms.values())]
    fired = [layer for layer in matrices if layer.gate("paper").fired]
    free = [layer for layer in matrices if layer.gate("scale_free").fired]
    yield Finding(
        Severity.NOTE,
        f"ACE's gate fires in {len(fired)} of {len(matrices)} matrices by the paper's γ, in "
        f"{len(free)} by the scale-free one",
    )


def _pairs(layers: Sequence[LayerView], experts: Sequence[str]) -> Iterator[Finding]:
    if len(experts) < 2:
        return
    total = layers[0].sums
    for layer in layers[1:]:
        total = total + layer.sums
    for i, j in combinations(range(len(experts)), 2):
        cosine, pair = total.cosines[i][j], f"'{experts[i]}' and '{experts[j]}'"
        if cosine > TWINS:
            yield Finding(
                Severity.WARNING,
                f"{pair} changed the base alike (cosine {cosine:.3f}): one expert given twice?",
            )
        if cosine < OPPOSED:
            yield Finding(Severity.WARNING, f"{pair} pull against each other (cosine {cosine:.2f})")


def _rounding(layers: Sequence[LayerView], experts: Sequence[str], half: bool) -> Iterator[Finding]:
    squares: Mapping[str, list[float]] = {expert: [0.0, 0.0] for expert in experts}
    for layer in layers:
        for expert, lost in zip(experts, layer.sums.rounding_of_weights, strict=False):
            squares[expert][0] += (lost * layer.norms[expert]) ** 2
            squares[expert][1] += layer.norms[expert] ** 2
    for expert, (lost, whole) in squares.items():
        if whole and lost > LOST**2 * whole:
            yield Finding(
                Severity.WARNING if half else Severity.NOTE,
                f"storing the base with its update in bfloat16 would lose {sqrt(lost / whole):.0%} of "
                "the update"
                + (
                    ": merge to float32 (--out-dtype float32), or keep it as an adapter"
                    if half
                    else ""
                ),
                expert,
            )


def _cosine(layer: LayerView, expert: str) -> float:
    return layer.cosines_with_base[expert]
