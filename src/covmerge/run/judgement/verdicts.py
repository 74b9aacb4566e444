"""From sums to findings: what lengths and directions of the updates give away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median

from covmerge.base.findings import UNCHANGED, Finding, Severity
from covmerge.base.settings import Hint
from covmerge.run.judgement.layers import Layer
from covmerge.run.judgement.names import block_of, ranges

# Cosine between W_t and W_0. Fine-tunes of one base stay above 0.9 in every layer that was measured
# for this; weights that were trained from another start are near 0.
STRANGER = 0.5
# ‖Δ‖ over ‖W_0‖ beyond which the direction says nothing: weights times three go along the base too.
SCALED = 2.0
UNEVEN = 10.0  # ratio of update norms from which the largest expert decides plain sums


@dataclass(frozen=True)
class Foreign:
    """A layer of an expert that is none of the base's layer."""

    expert: str
    tensor: str
    cosine: float


def stranger(matrices: Sequence[Layer], expert: str) -> Finding | None:
    """Say that an expert was trained from another base, if it was."""
    known = [(cosine, m) for m in matrices if (cosine := m.cosine(expert)) is not None]
    if not known:
        return None
    middle = median(cosine for cosine, _ in known)
    relative = median(matrix.relative(expert) for _, matrix in known)
    if middle >= STRANGER and relative <= SCALED:
        return None
    return Finding(
        Severity.FAULT,
        f"is not a fine-tune of this base: its weights have a cosine of {middle:.2f} with the base's "
        f"and an update of {relative:.1f} times their norm (medians of {len(known)} matrices; a "
        "fine-tune has more than 0.9, and far less than 1). Find the base it was trained from",
        expert,
        name="not-a-fine-tune",
    )


def foreign_layers(matrices: Sequence[Layer], expert: str) -> list[Foreign]:
    """List the layers that are not the base's, of an expert that otherwise is."""
    return [
        Foreign(expert, matrix.tensor, cosine)
        for matrix in matrices
        if (cosine := matrix.cosine(expert)) is not None and cosine < STRANGER
    ]


def replaced_tables(layers: Sequence[Layer], expert: str) -> Finding | None:
    """Say that the rows of embeddings are not the base's: merged, those of other tokens are mixed."""
    found = {
        layer.tensor: cosine
        for layer in layers
        if layer.is_table and (cosine := layer.cosine(expert)) is not None and cosine < STRANGER
    }
    if not found:
        return None
    shown = ", ".join(f"'{name}' (cosine {cosine:.2f})" for name, cosine in found.items())
    return Finding(
        Severity.WARNING,
        f"has other rows than the base in {shown}: another vocabulary, or rows that were moved or "
        "trained anew? Merged with the base's they mix tokens; leave them to the base by "
        f"{Hint('tensors', {'embeddings': 'base'})}",
        expert,
        tuple(found),
    )


def untouched(layers: Sequence[Layer], expert: str, *, has_head: bool) -> Iterator[Finding]:
    """Say what an expert left as it is in the base: all of it, whole blocks, or tensors.

    Args:
        layers: what is merged.
        expert: its name.
        has_head: whether it has a task head of its own, which may be all that was trained.
    """
    same = [layer for layer in layers if not layer.norm(expert)]
    tensors = tuple(dict.fromkeys(layer.tensor for layer in same))
    if len(same) == len(layers) and has_head:
        text = "equals the base in all that is merged: only its task head is its own"
        yield Finding(Severity.WARNING, text, expert)
        return
    if len(same) == len(layers):
        yield Finding(
            Severity.FAULT,
            "equals the base in every tensor: was it trained, or saved?",
            expert,
            name=UNCHANGED,
        )
        return
    blocks: dict[int, list[Layer]] = {}
    for layer in layers:
        block = block_of(layer.name)
        if block is not None and layer.is_matrix:
            blocks.setdefault(block, []).append(layer)
    frozen = [b for b, layers in blocks.items() if not any(layer.norm(expert) for layer in layers)]
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


def uneven(layers: Sequence[Layer], experts: Sequence[str]) -> Finding | None:
    """Say that updates are of very different size, if they are."""
    norms = {expert: hypot(*(layer.norm(expert) for layer in layers)) for expert in experts}
    moved = {expert: norm for expert, norm in norms.items() if norm}
    if len(moved) < 2:
        return None
    most, least = max(moved, key=moved.__getitem__), min(moved, key=moved.__getitem__)
    if moved[most] <= UNEVEN * moved[least]:
        return None
    return Finding(
        Severity.WARNING,
        f"updates are of very different size: '{most}' moved {moved[most] / moved[least]:.0f} "
        f"times as far as '{least}' ({moved[most]:.3g} and {moved[least]:.3g}); averaging and "
        "other plain sums follow the largest",
    )
