"""SmolLM2-135M-Instruct and five generative tasks, its experts fine-tuned whole or by LoRA."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
import transformers

from covmerge_lab import training
from covmerge_lab.llm import base, corpora, definitions, tasks
from covmerge_lab.llm.model import (
    Encoder,
    Inputs,
    answer_loss,
    answers,
    load,
    perplexity,
)
from covmerge_lab.llm.tasks import Question
from covmerge_lab.own import WRITTEN, Own
from covmerge_lab.suite import Kind, Lessons, Part, Scores, Suite, Variant
from covmerge_lab.training import Settings
from covmerge_lab.workers import OnProgress, ignore_progress

# Its annotations are partial.
_LanguageModel: Any = transformers.AutoModelForCausalLM

_BATCH = 16
_QUICK = ("arithmetic", "verbs")  # shortest to answer
_QUICK_LAYERS = 2


class LlmSuite(Suite):
    """Generative tasks, right or wrong by the whole answer, unless a suite marks otherwise."""

    name: ClassVar[str] = "llm"
    usual: ClassVar[tuple[int, ...]] = (5,)
    controlled_task: ClassVar[str] = "verbs"
    lora: ClassVar[Mapping[str, Any]] = {"task_type": peft.TaskType.CAUSAL_LM}
    autocast: ClassVar[bool] = True
    own_inputs: ClassVar[Mapping[str, Own]] = WRITTEN
    adapted: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    trained: ClassVar[Mapping[Kind, Settings]] = {
        "full": Settings(steps=80, learning_rate=5e-5, batch_size=_BATCH),
        "lora": Settings(steps=80, learning_rate=1e-3, batch_size=_BATCH),
    }
    window: ClassVar[int] = 512  # tokens of each text that perplexity is of

    @property
    def base(self) -> Path:
        """Folder of the language model, which `make_base` makes."""
        return self.folder / "base"

    @property
    def available(self) -> Mapping[str, str]:
        """The tasks by name."""
        return {s.name: s.about for s in tasks.SPECS if not self.quick or s.name in _QUICK}

    def prepare(self, on_progress: OnProgress) -> None:
        """Make the base, read and split the corpora, and define the tasks for lm-eval."""
        specs = [spec for spec in tasks.SPECS if spec.name in self.tasks]
        first = self.base_steps
        steps = first + len(specs)
        on_progress(0, steps)
        self.make_base(lambda done, _: on_progress(done, steps))
        for done, spec in enumerate(specs, start=first):
            on_progress(done, steps)
            if not all(self._file(spec.name, part).exists() for part in tasks.SIZES):
                for part, questions in tasks.build(spec, self.cache).items():
                    tasks.save(questions, self._file(spec.name, part))
            self._define(spec.name)
        on_progress(steps, steps)

    @property
    def base_steps(self) -> int:
        """How many steps it takes to make the base."""
        return 1

    def make_base(self, on_progress: OnProgress) -> None:
        """Unpack SmolLM2-135M-Instruct, for a smoke run its first layers, unless it is there."""
        marker = {"layers": _QUICK_LAYERS if self.quick else None}
        if not training.is_trained(self.base, marker):
            with training.finished(self.base, marker) as folder:
                base.unpack(folder, self.cache, **marker)
        on_progress(1, 1)

    def fresh(self, task: str) -> Any:
        """Return the language model: no task has a head."""
        return _LanguageModel.from_pretrained(self.base, dtype=torch.float32)

    def lessons(self, task: str, batch_size: int, seed: int) -> Lessons:
        model = self.fresh(task)
        questions = tasks.load(self._file(task, "train"))
        batches = Encoder(self.base).answered(questions, batch_size, seed)
        return Lessons(model, batches, lambda batch: answer_loss(model, *batch))

    def settings(self, task: str, variant: Variant) -> Settings:
        """See `Suite.settings`: all tasks alike."""
        settings = self.trained[variant.kind]
        return replace(settings, steps=5) if self.quick else settings

    def learnt_from(self, task: str) -> Mapping[str, str]:
        return {"data": hashlib.sha256(self._file(task, "train").read_bytes()).hexdigest()}

    @property
    def tokenizer(self) -> Path:
        """The base's."""
        return self.base

    def score(
        self,
        task: str,
        part: Part,
        model: Path,
        expert: Path,
        on_progress: OnProgress | None = None,
    ) -> Scores:
        """See `Suite.score`: as `marks` does; no task has a head."""
        questions = self._questions(task, part)
        scores: list[float] = [0.0] * len(questions)
        done = 0
        for indices, marks in self.marks(load(model), Encoder(self.base), questions):
            for index, mark in zip(indices, marks, strict=True):
                scores[index] = mark
            done += len(indices)
            (on_progress or ignore_progress)(done, len(questions))
        return scores

    def marks(
        self, model: Any, encoder: Encoder, questions: Sequence[Question]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Go over questions: indices, and 1.0 where the answer is right to the letter."""
        longest = encoder.longest(questions)
        for indices, inputs in encoder.prompts(questions, 2 * _BATCH):
            written = answers(model, encoder, inputs, longest)
            right = [questions[index].answer for index in indices]
            yield indices, [float(w == r) for w, r in zip(written, right, strict=True)]

    def inputs(self, task: str, examples: int) -> Sequence[Inputs]:
        questions = tasks.load(self._file(task, "train"))[:examples]
        return [inputs for _, inputs in Encoder(self.base).prompts(questions, _BATCH)]

    def measures(self, model: Path) -> dict[str, float]:
        """Return the perplexity on English that no task is about: what is lost of the base shows there."""
        texts = corpora.general_text(self.cache)[: 1 if self.quick else None]
        return {
            "perplexity": perplexity(load(model), Encoder(self.base).windows(texts, self.window))
        }

    def _file(self, task: str, part: Part) -> Path:
        return self.examples / task / f"{part}.jsonl"

    def _define(self, task: str) -> None:
        test = self._file(task, "test")
        most = Encoder(self.base).longest(tasks.load(test))
        definitions.write(task, test, most, self.folder / "lm_eval")

    def _questions(self, task: str, part: Part) -> list[Question]:
        return tasks.load(self._file(task, part))[: _BATCH if self.quick else None]
