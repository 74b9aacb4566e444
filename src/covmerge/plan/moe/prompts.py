"""Gates `cheap_embed`: the mean embedding of the tokens of prompts, as mergekit-moe has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import shown
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.moe.architectures import EMBEDDING
from covmerge.plan.recipe.sections import Prompts
from covmerge.plan.vocabulary.tokens import load_tokenizer, read_files


def rows_of_prompts(
    prompts: Mapping[str, Prompts], experts: Sequence[str], base: Checkpoint
) -> Tensor:
    """Return the router `(experts, hidden)` of every layer, float32.

    Args:
        prompts: by expert.
        experts: their names, in order.
        base: the dense base.

    Raises:
        InputError: the base has no tokenizer, or a prompt is nothing to it.
    """
    encode = _encoder(base)
    rows: list[Tensor] = []
    for name in experts:
        said = prompts[name]
        row = _unit(_sum(base, [encode(text) for text in said.positive]))
        if said.negative:
            row = _unit(row - _unit(_sum(base, [encode(text) for text in said.negative])))
        if not row.any():
            raise InputError(
                f"expert '{name}': the gate of its prompts is zero: write positive prompts of other tokens "
                "than the negative ones"
            )
        rows.append(row)
    return torch.stack(rows)


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
