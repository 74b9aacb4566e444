"""Token sequences at random: for encoders, which write nothing, and for what any model of text sees.

A vocabulary lists its words by frequency, or by the order in which frequent pairs were joined, which
comes near it. So the rank stands in for the frequency by Zipf's law, p ∝ 1 / (rank + 20).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.plan.statistics.examples import Batch, Reading, longest_text

if TYPE_CHECKING:
    from covmerge.plan.statistics.model import RunningModel

_OFFSET = 20
LENGTHS = (3, 9, 18)
LONG = (8, 24, 64)  # of language models, whose texts are longer
_IN_BRACKETS = re.compile(r"[\[<]\w+[\]>]")  # [unused7], <0x0A>: places, and no words
_MARKS = re.compile(r"^(##|[Ġ▁])")  # that a word goes on, or begins


@dataclass(frozen=True)
class Sequences:
    """Tokens drawn by their rank, between the special tokens, a third each of three lengths.

    Attributes:
        seed: of the tokens.
        lengths: of a third of the texts each.
        shared: whether all experts are shown the same.
    """

    shared: ClassVar[bool] = True

    seed: int = 0
    lengths: tuple[int, ...] = LENGTHS

    def as_json(self, reading: Reading) -> dict[str, str | int | float]:
        """What a statistics file says of it."""
        return {
            "kind": f"tokens, p = 1 / (rank + {_OFFSET})",
            "lengths": ", ".join(map(str, self.lengths)),
            "seed": self.seed,
        }

    def batches(self, model: RunningModel, reading: Reading) -> Iterator[Batch]:
        """Yield batches of one length each, so that nothing is padded.

        Raises:
            InputError: there is no tokenizer, it has no words, or texts have no room for one.
        """
        tokenizer, source = model.tokenizer(reading), model.checkpoint.source
        before, after = _around(tokenizer)
        words = _words(tokenizer, model.whole.get_input_embeddings().num_embeddings)
        limit = reading.max_length or longest_text(tokenizer, model.whole.config)
        room = max(self.lengths) if limit is None else limit - len(before) - len(after)
        if not len(words) or room < 1:
            problem = "has no words" if not len(words) else f"leaves no room in {limit} tokens"
            raise InputError(f"the tokenizer of {source} {problem}: pass a file of examples")
        odds = 1.0 / (torch.arange(len(words)) + _OFFSET)
        draw = torch.Generator().manual_seed(self.seed)
        for number, length in enumerate(self.lengths):
            count = (reading.wanted + number) // len(self.lengths)
            if not count:
                continue
            shape = (count, min(length, room))
            drawn = torch.multinomial(odds, count * shape[1], replacement=True, generator=draw)
            ids = torch.cat(
                [before.expand(count, -1), words[drawn].reshape(shape), after.expand(count, -1)], 1
            )
            for first in range(0, count, reading.at_once):
                part = ids[first : first + reading.at_once]
                yield {"input_ids": part, "attention_mask": torch.ones_like(part)}


def _around(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """The special tokens before a text and behind it."""
    text = "a"
    bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(text)["input_ids"]
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    before, after = whole[:at], whole[at + len(bare) :]
    return torch.tensor(before, dtype=torch.long), torch.tensor(after, dtype=torch.long)


def _words(tokenizer: Any, size: int) -> Tensor:
    """The ids of ordinary tokens, by rank.

    Single characters come last: a vocabulary begins with its alphabet, in no order of frequency.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ranked = sorted(
        (len(_MARKS.sub("", token)) < 2, number)
        for token, number in vocabulary.items()
        if number not in special and number < size and not _IN_BRACKETS.fullmatch(token)
    )
    return torch.tensor([number for _, number in ranked], dtype=torch.long)
