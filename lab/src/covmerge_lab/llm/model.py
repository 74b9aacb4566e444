"""A language model at work: prompts as token ids, its answers, and how well it foresees a text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from covmerge_lab.llm.tasks import Question
from covmerge_lab.training import device

# Their annotations are partial.
_LanguageModel: Any = transformers.AutoModelForCausalLM
_Tokenizer: Any = transformers.AutoTokenizer

Inputs = Mapping[str, Tensor]
IGNORED = -100  # a target that is no part of the loss


def load(folder: Path) -> Any:
    """Return a model in bfloat16, as language models are served, ready to answer."""
    return _LanguageModel.from_pretrained(folder, dtype=torch.bfloat16).to(device()).eval()


class Encoder:
    """Turns text into token ids, padded on the left: every prompt ends where its answer begins.

    Args:
        folder: of the tokenizer.

    Attributes:
        tokenizer: the tokenizer.
        ends: the tokens after which a line is over: all with a newline in them, and the end of text.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = _Tokenizer.from_pretrained(folder, padding_side="left")
        (self._newline,) = self._ids("\n")
        newline: str = self.tokenizer.convert_ids_to_tokens(self._newline)
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.ends = [
            *(number for token, number in vocabulary.items() if newline in token),
            self.tokenizer.eos_token_id,
        ]

    def prompts(
        self, questions: Sequence[Question], batch_size: int
    ) -> Iterator[tuple[list[int], Inputs]]:
        """Go once over everything, from the shortest prompt to the longest: indices and inputs."""
        ids = [self._ids(question.prompt) for question in questions]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            yield indices, self._pad([ids[index] for index in indices])

    def answered(
        self, questions: Sequence[Question], batch_size: int, seed: int
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Go over prompts with their answers again and again, each time in another order.

        Yields:
            The inputs, and targets `(batch, longest answer)` for the last so many tokens.
        """
        asked = self._asked(questions)
        draw = random.Random(seed)
        while True:
            order = draw.sample(asked, len(asked))
            for start in range(0, max(1, len(order) - batch_size + 1), batch_size):
                yield self._targets(order[start : start + batch_size])

    def told(
        self, questions: Sequence[Question], batch_size: int
    ) -> Iterator[tuple[list[int], Inputs, Tensor]]:
        """Go once over prompts with their answers: indices, and what `answered` yields."""
        asked = self._asked(questions)
        order = sorted(range(len(asked)), key=lambda index: sum(map(len, asked[index])))
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            yield indices, *self._targets([asked[index] for index in indices])

    def longest(self, questions: Sequence[Question]) -> int:
        """Return the tokens of the longest answer and the end of its line: what is longer is wrong."""
        return 1 + max(len(self._ids(f" {question.answer}")) for question in questions)

    def windows(self, texts: Sequence[str], tokens: int) -> Iterator[Inputs]:
        """Go over the first tokens of texts."""
        for text in texts:
            yield self._pad([self._ids(text)[:tokens]])

    def _asked(self, questions: Sequence[Question]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of prompts, and those of answers with the end of their line."""
        return [
            (self._ids(question.prompt), [*self._ids(f" {question.answer}"), self._newline])
            for question in questions
        ]

    def _targets(self, batch: Sequence[tuple[list[int], list[int]]]) -> tuple[Inputs, Tensor]:
        most = max(len(answer) for _, answer in batch)
        targets = [[IGNORED] * (most - len(answer)) + answer for _, answer in batch]
        return self._pad([prompt + answer for prompt, answer in batch]), torch.tensor(targets)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def _pad(self, ids: list[list[int]]) -> Inputs:
        return self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")


def answer_loss(model: Any, inputs: Inputs, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, given what stands before each."""
    logits = _before(model, inputs, targets)
    wanted = targets.to(model.device).flatten()
    return cross_entropy(logits.flatten(0, 1).float(), wanted, ignore_index=IGNORED)


@torch.inference_mode()
def foreseen(model: Any, inputs: Inputs, targets: Tensor) -> list[float]:
    """Return of each answer the share of its tokens that are the likeliest after what stands before."""
    likeliest = _before(model, inputs, targets).argmax(-1).cpu()
    right = (likeliest == targets).sum(1) / (targets != IGNORED).sum(1)
    return [float(share) for share in right]


@torch.inference_mode()
def answers(model: Any, encoder: Encoder, inputs: Inputs, most: int) -> list[str]:
    """Return what the model writes after each prompt, up to the end of the line, greedily.

    Args:
        model: the model.
        encoder: what turned the prompts into inputs.
        inputs: the prompts.
        most: tokens after which it is stopped.
    """
    tokenizer = encoder.tokenizer
    written = model.generate(
        **_at(model, inputs),
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=encoder.ends,
        pad_token_id=tokenizer.pad_token_id,
    )[:, inputs["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return [text.partition("\n")[0].strip() for text in texts]


@torch.inference_mode()
def perplexity(model: Any, windows: Iterator[Inputs]) -> float:
    """Return exp of the mean cross-entropy of every token but the first of each window."""
    losses: list[Tensor] = []
    for window in windows:
        inputs = _at(model, window)
        ids = inputs["input_ids"][0]
        losses.append(
            cross_entropy(model(**inputs).logits[0, :-1].float(), ids[1:], reduction="none")
        )
    return float(torch.cat(losses).mean().exp())


def _before(model: Any, inputs: Inputs, targets: Tensor) -> Tensor:
    """Return the logits of the targets' tokens."""
    return model(**_at(model, inputs), logits_to_keep=targets.shape[1] + 1).logits[:, :-1]


def _at(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}
