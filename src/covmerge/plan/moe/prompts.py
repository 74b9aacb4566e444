"""Gates from prompts as in mergekit-moe: by embeddings of their tokens, or by the base's hidden states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import shown
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.plan.moe.architectures import EMBEDDING
from covmerge.plan.recipe.sections import Prompts
from covmerge.plan.statistics.examples import Batch
from covmerge.plan.statistics.model import RunningModel, load_model
from covmerge.plan.statistics.written import padded
from covmerge.plan.vocabulary.tokens import load_tokenizer, read_files

_MOST_TOKENS = 1 << 16  # run at once; the states of all layers are kept


def mean_embeddings(prompts: Sequence[Prompts], base: Checkpoint) -> Tensor:
    """Return the router `(experts, hidden)` for every layer, from mean embeddings of tokens, float32."""
    encoder = _Encoder.of(base)
    rows: list[Tensor] = []
    for said in prompts:
        row = _unit(_sum(base, [encoder(text) for text in said.positive]))
        if said.negative:
            row = row - _unit(_sum(base, [encoder(text) for text in said.negative]))
        rows.append(_checked(_unit(row), said))
    return torch.stack(rows)


def last_states(states: Tensor) -> Tensor:
    """Return the states `(layers, prompts, hidden)` at the last token, from the states at all tokens."""
    return states[:, :, -1]


def mean_states(states: Tensor) -> Tensor:
    """Return the mean of the states over tokens; padding counts, as in mergekit-moe."""
    return states.sum(2) / states.shape[2]


class HiddenStates:
    """Routers from the residual stream before each layer; the base is run when a router is first read.

        row_t = h(positive prompts of t) − h(negative prompts of t), scaled to length 1

    h is the mean over prompts. As in mergekit-moe, the base runs in bfloat16, on all positive or
    all negative prompts of an expert at once, padded on the left. `chosen` takes states
    `(layers, prompts, tokens, hidden)` to one for each prompt.
    """

    def __init__(
        self, prompts: Sequence[Prompts], base: Checkpoint, chosen: Callable[[Tensor], Tensor]
    ) -> None:
        self._base, self._prompts, self._chosen = base, prompts, chosen
        self._lock = Lock()  # the base is run once, even if threads read at the same time
        encoder = _Encoder.of(base)
        self._batches = [[encoder.batch(p) for p in (s.positive, s.negative) if p] for s in prompts]

    def __call__(self, layer: int) -> Tensor:
        """Return the router of a layer `(experts, hidden)`, float32."""
        with self._lock:
            return self._rows[layer]

    @cached_property
    def _rows(self) -> Tensor:
        """Routers of all layers, `(layers, experts, hidden)`, float32."""
        model = load_model(self._base, "cpu", head=False, dtype=torch.bfloat16, attention="sdpa")
        model.backbone.config.output_hidden_states = True
        rows: list[Tensor] = []
        for said, batches in zip(self._prompts, self._batches, strict=True):
            row, *negative = (self._states(model, batch) for batch in batches)
            for other in negative:
                row = row - other
            length: Tensor = cast("Any", row).norm(dim=-1, keepdim=True)
            rows.append(_checked((row / length.clamp(min=1e-8)).float(), said))
        return torch.stack(rows, 1)

    def _states(self, model: RunningModel, batch: Batch) -> Tensor:
        """Return the mean of the states over prompts, `(layers, hidden)`, bfloat16."""
        with torch.no_grad():
            found: tuple[Tensor, ...] = model.run(batch).hidden_states[:-1]
        states = self._chosen(torch.stack(found))
        return states.sum(1) / states.shape[1]


def _checked(row: Tensor, said: Prompts) -> Tensor:
    if not row.any():
        raise InputError(
            f"the gate of the prompt {shown(said.positive[0])} is zero: write positive prompts of other "
            "tokens than the negative ones"
        )
    return row


def _unit(row: Tensor) -> Tensor:
    length: float = cast("Any", row).norm().item()
    return row / max(length, 1e-8)


def _sum(base: Checkpoint, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the sum of the embeddings of all tokens of all prompts; each row is read once."""
    counts = Counter(number for prompt in prompts for number in prompt)
    total = torch.zeros(base.headers[EMBEDDING].shape[1], dtype=torch.float32)
    for index, count in sorted(counts.items()):
        total += count * base.read(EMBEDDING, range(index, index + 1))[0].float()
    return total


@dataclass(frozen=True)
class _Encoder:
    """Encodes a prompt as tokens, with BOS before it and nothing else, as in mergekit-moe."""

    tokenizer: Any
    where: str
    rows: int

    @classmethod
    def of(cls, base: Checkpoint) -> _Encoder:
        folder = base.companions()
        if folder is None or not read_files(folder):
            raise InputError(
                f"{base.source} has no tokenizer, which gates of prompts need: put its files beside the "
                "weights, or use `gates: random`"
            )
        return cls(load_tokenizer(folder), str(folder), base.headers[EMBEDDING].shape[0])

    def __call__(self, text: str) -> list[int]:
        found = self.tokenizer((self.tokenizer.bos_token or "") + text, add_special_tokens=False)
        ids: list[int] = list(found["input_ids"])
        if not ids or max(ids) >= self.rows:
            raise InputError(
                f"{self.where}: its tokenizer makes {ids[:5]} of the prompt {shown(text)}, and the base "
                f"has {self.rows} embeddings: change the prompt, or correct the tokenizer"
            )
        return ids

    def batch(self, prompts: Sequence[str]) -> Batch:
        """Return prompts as one batch for the base, padded on the left with BOS."""
        encoded = [self(text) for text in prompts]
        longest = max(map(len, encoded))
        if longest * len(encoded) > _MOST_TOKENS:
            raise InputError(
                f"{len(encoded)} prompts of up to {longest:,} tokens are too much to run at once: write "
                "shorter or fewer ones, or use `gates: cheap_embed`"
            )
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in known if number is not None), 0)
        ids, mask = padded(encoded, pad, left=True)
        return {"input_ids": ids, "attention_mask": mask}
