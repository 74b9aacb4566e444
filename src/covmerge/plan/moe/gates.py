"""The routers' weights, `(layers, experts, hidden)` in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import shown
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.recipe.moe import Mixture
from covmerge.plan.vocabulary.tokens import load_tokenizer, read_files

EMBEDDING = "model.embed_tokens.weight"
_NEARLY_DEPENDENT = 5.0  # condition number above which mergekit-moe warns too


def gates_of(moe: Mixture, experts: Sequence[str], base: Checkpoint, layers: int) -> Tensor:
    """Return the routers of all layers.

    Args:
        moe: of the recipe.
        experts: their names, in order.
        base: the dense base.
        layers: how many it has.

    Raises:
        InputError: the base has no tokenizer, or a prompt is nothing to it.
    """
    hidden = base.headers[EMBEDDING].shape[1]
    shape = (layers, len(experts), hidden)
    if moe.gates != "cheap_embed":
        generator = torch.Generator().manual_seed(moe.seed)
        if moe.gates == "random":
            return torch.randn(shape, generator=generator)
        bound = hidden**-0.5
        return torch.rand(shape, generator=generator) * 2 * bound - bound
    encode = _encoder(base)
    rows: list[Tensor] = []
    for name in experts:
        said = moe.prompts[name]
        row = _unit(_sum(base, [encode(text) for text in said.positive]))
        if said.negative:
            row = _unit(row - _unit(_sum(base, [encode(text) for text in said.negative])))
        if not row.any():
            raise InputError(
                f"expert '{name}': the gate of its prompts is zero: write positive prompts of other tokens "
                "than the negative ones"
            )
        rows.append(row)
    return torch.stack(rows).expand(shape).contiguous()


def warnings_of(gates: Tensor) -> list[str]:
    """Return a warning where the gates of a layer are nearly dependent."""
    linalg = cast("Any", torch.linalg)
    conditions: list[float] = linalg.cond(gates.double()).tolist()
    worst = max(conditions)
    if worst <= _NEARLY_DEPENDENT:
        return []
    count = sum(condition > _NEARLY_DEPENDENT for condition in conditions)
    return [
        f"the gates are nearly dependent in {count} of {len(conditions)} layers (condition number up to "
        f"{worst:.3g}; {_NEARLY_DEPENDENT:g} is much), so some experts will seldom be chosen: write "
        "prompts that differ more, or add what the experts share as negative prompts"
    ]


def _unit(row: Tensor) -> Tensor:
    length: float = cast("Any", row).norm().item()
    return row / max(length, 1e-8)


def _sum(base: Checkpoint, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Sum of the embeddings of all tokens of all prompts; each row is read once."""
    counts = Counter(number for prompt in prompts for number in prompt)
    total = torch.zeros(base.headers[EMBEDDING].shape[1], dtype=torch.float32)
    for index, count in sorted(counts.items()):
        total += count * base.read(EMBEDDING, range(index, index + 1))[0].float()
    return total


def _encoder(base: Checkpoint) -> Callable[[str], list[int]]:
    """Return what gives a prompt's tokens: BOS before it, and nothing else, as mergekit-moe has it."""
    folder = base.companions()
    if folder is None or not read_files(folder):
        raise InputError(
            f"{base.source} has no tokenizer, which `gates: cheap_embed` needs: put its files beside the "
            "weights, or use `gates: random`"
        )
    tokenizer = load_tokenizer(folder)
    rows = base.headers[EMBEDDING].shape[0]

    def encode(text: str) -> list[int]:
        found = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False)
        ids: list[int] = list(found["input_ids"])
        if not ids or max(ids) >= rows:
            raise InputError(
                f"{folder}: its tokenizer makes {ids[:5]} of the prompt {shown(text)}, and the base has "
                f"{rows} embeddings: change the prompt, or correct the tokenizer"
            )
        return ids

    return encode
