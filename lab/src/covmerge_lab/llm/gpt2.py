"""A small GPT-2 and the same generative tasks: Conv1D, learned positions, biases, and a base of our own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from covmerge.base import code
from covmerge_lab import training
from covmerge_lab.llm import corpora, lines, pretraining, tasks
from covmerge_lab.llm.model import Encoder, foreseen, load
from covmerge_lab.llm.suite import LlmSuite
from covmerge_lab.llm.tasks import Question
from covmerge_lab.own import WRITTEN, Own
from covmerge_lab.suite import Kind
from covmerge_lab.text import further
from covmerge_lab.training import Settings
from covmerge_lab.workers import OnProgress

_BATCH = 32


class Gpt2Suite(LlmSuite):
    """The tasks of `llm` for a language model that is small, and no Llama.

    Its positions are learnt, and padding moves them; the base has read lines at all that are used.
    """

    name: ClassVar[str] = "gpt2"
    lora: ClassVar[Mapping[str, Any]] = {**LlmSuite.lora, "fan_in_fan_out": True}
    adapted: ClassVar[tuple[str, ...]] = ("c_attn", "c_proj", "c_fc")
    trained: ClassVar[Mapping[Kind, Settings]] = {
        "full": Settings(steps=300, learning_rate=1.5e-4, batch_size=16),
        "lora": Settings(steps=300, learning_rate=1e-3, batch_size=16),
    }
    # Nobody taught it to chat.
    own_inputs: ClassVar[Mapping[str, Own]] = {
        title: own for title, own in WRITTEN.items() if own.how.start not in ("chat", "user")
    }
    window: ClassVar[int] = pretraining.WINDOW
    accuracy: ClassVar[str] = (
        "the share of an answer's tokens that are foreseen, the right ones before them"
    )

    def marks(
        self, model: Any, encoder: Encoder, questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Go over questions: indices, and `accuracy` of each answer, with the end of its line.

        By whole answers little is left of five of so small a model, and nothing of five adapters, whatever
        merges them.
        """
        for indices, inputs, targets in encoder.told(questions, _BATCH):
            yield indices, foreseen(model, inputs, targets)

    def measures(self, model: Path) -> dict[str, float]:
        """Return the perplexity, and the answers in % that are right to the letter, mean over the tasks."""
        loaded, encoder = load(model), Encoder(self.base)
        right = [
            fmean(
                mark
                for _, marks in super(Gpt2Suite, self).marks(
                    loaded, encoder, self._questions(task, "test")
                )
                for mark in marks
            )
            for task in self.tasks
        ]
        return {**super().measures(model), "whole answers": 100 * fmean(right)}

    @property
    def base_steps(self) -> int:
        """See `LlmSuite.base_steps`: of its training."""
        return self._pretraining.steps

    def make_base(self, on_progress: OnProgress) -> None:
        """Train the base, unless it is there."""
        settings = self._pretraining
        marker = training.marker(
            settings, code=code.digest(pretraining, lines, corpora, tasks, further)
        )
        if not training.is_trained(self.base, marker):
            with training.finished(self.base, marker) as folder:
                pretraining.pretrain(self.cache, settings, folder, on_progress)
        on_progress(settings.steps, settings.steps)

    def learnt_from(self, task: str) -> Mapping[str, str]:
        base = (self.base / "model.safetensors").read_bytes()
        return {**super().learnt_from(task), "base": hashlib.sha256(base).hexdigest()}

    @property
    def _pretraining(self) -> Settings:
        return replace(pretraining.SETTINGS, steps=5) if self.quick else pretraining.SETTINGS
