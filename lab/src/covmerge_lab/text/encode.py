"""Texts as token ids, in batches of like length: padding costs as much time as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from covmerge_lab.suite import Batch
from covmerge_lab.text.tasks import Split

# Its annotations are partial.
_Tokenizer: Any = transformers.AutoTokenizer

Inputs = Mapping[str, Tensor]  # of the encoder


class Encoded:
    """A split turned into token ids once.

    Args:
        tokenizer: folder of the tokenizer.
        split: texts and labels.
        max_length: tokens kept of each text.
    """

    def __init__(self, tokenizer: Path, split: Split, max_length: int) -> None:
        self._tokenizer = _Tokenizer.from_pretrained(tokenizer)
        self._labels = split.labels
        self._ids = self._tokenizer(list(split.texts), truncation=True, max_length=max_length)[
            "input_ids"
        ]

    def __len__(self) -> int:
        return len(self._ids)

    def in_order(self, batch_size: int) -> Iterator[tuple[list[int], Batch]]:
        """Go once over everything, from the shortest text to the longest: indices and batch."""
        order = sorted(range(len(self)), key=self._length)
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            yield indices, self._batch(indices)

    def shuffled(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Go over the texts again and again, without end, each time in another order."""
        draw = random.Random(seed)
        while True:
            order = draw.sample(range(len(self)), len(self))
            pool_size = 8 * batch_size
            for start in range(0, len(order) - batch_size + 1, pool_size):
                pool = sorted(order[start : start + pool_size], key=self._length)
                batches = [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
                draw.shuffle(batches)
                yield from (self._batch(batch) for batch in batches)

    def _length(self, index: int) -> int:
        return len(self._ids[index])

    def _batch(self, indices: list[int]) -> Batch:
        inputs = self._tokenizer.pad(
            {"input_ids": [self._ids[i] for i in indices]}, return_tensors="pt"
        )
        return inputs, torch.tensor([self._labels[i] for i in indices])
