"""What a suite is: a base, tasks, how experts of the base are trained, and how any model does on a task.

A suite is small enough to be sent to a worker process: what it knows lies in its cache folder.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import peft
import torch
import transformers
from torch import Tensor, nn

from covmerge.base import code
from covmerge_lab import splits, training
from covmerge_lab.own import DRAWN, Own
from covmerge_lab.training import ALPHA, RANK, Optimizer, Settings, device, products
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_Tokenizer: Any = transformers.AutoTokenizer

Kind = Literal["full", "lora"]
Part = Literal["train", "validation", "test"]
Scores = list[float]  # of each example, in [0, 1]: how right it is
Batch = tuple[Mapping[str, Tensor], Tensor]  # inputs of the model, and what it is to answer


@dataclass(frozen=True, order=True)
class Variant:
    """One way of training the experts of all tasks.

    Attributes:
        kind: every weight, or LoRA.
        seed: of the order of the examples, of fresh heads and of LoRA's random factors.
        rank: of LoRA.
        times: how many times as many steps as the suite has it.
        optimizer: by which it is trained.
        one_start: whether all tasks' LoRA begins with the same random factors.
        frozen: whether the embeddings of what comes in, words or patches, are left as they are, and with
            them outputs that are tied to them; positions are trained. Of full fine-tunes.
    """

    kind: Kind
    seed: int
    rank: int = RANK
    times: float = 1.0
    optimizer: Optimizer = "adamw"
    one_start: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        unusual = (
            f"-rank-{self.rank}" if self.rank != RANK else "",
            f"-times-{self.times:g}" if self.times != 1 else "",
            f"-{self.optimizer}" if self.optimizer != "adamw" else "",
            "-one-start" if self.one_start else "",
            "-frozen" if self.frozen else "",
        )
        return f"{self.kind}-{self.seed}{''.join(unusual)}"


@dataclass(frozen=True)
class Lessons:
    """What an expert learns from.

    Attributes:
        model: the base with a fresh head, where the task has one; without dropout.
        batches: without end.
        loss: the mean loss of a batch.
    """

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Suite(ABC):
    """A base model and its tasks.

    Attributes:
        cache: folder of the base, the data and the experts; kept between runs.
        quick: a smoke run: few examples, few steps; its numbers mean nothing.
        counts: of experts that are merged, the first so many of its tasks; None for `usual`.
        usual: numbers of experts of the suite's tables; the last of them is that of studies, but
            for `tuned`, which is of all.
        name: what the command line calls it.
        kinds: how its experts can be trained.
        adapted: names of the linear layers that LoRA adapts.
        lora: what else PEFT needs to know of it.
        autocast: whether experts are trained with products in bfloat16.
        controlled_task: of the trainings that studies watch.
        own_inputs: ways of making inputs for its experts without data; the first is for the tables.
        accuracy: what it is here.
    """

    cache: Path
    quick: bool = False
    counts: tuple[int, ...] | None = None
    usual: ClassVar[tuple[int, ...]]
    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ("full", "lora")
    adapted: ClassVar[tuple[str, ...]]
    lora: ClassVar[Mapping[str, Any]] = {}
    autocast: ClassVar[bool] = False
    controlled_task: ClassVar[str]
    own_inputs: ClassVar[Mapping[str, Own]] = DRAWN
    accuracy: ClassVar[str] = "the share of examples that are answered right"

    @property
    def folder(self) -> Path:
        """Where everything of this suite is kept."""
        return self.cache / (f"{self.name}-quick" if self.quick else self.name)

    @property
    def examples(self) -> Path:
        """Folder of the tasks' examples; another one for each state of the code that draws them."""
        drawn_by = sys.modules[type(self).__module__.rpartition(".")[0]]
        return self.folder / "tasks" / code.digest(drawn_by, splits)[:12]

    @property
    @abstractmethod
    def base(self) -> Path:
        """Folder of the base, there after `prepare`."""

    @property
    @abstractmethod
    def available(self) -> Mapping[str, str]:
        """All tasks that it could have, and what each is about."""

    @property
    def tasks(self) -> Mapping[str, str]:
        """Its tasks: the first that are available, as many as are merged at most."""
        return dict(list(self.available.items())[: max(self.counts or self.usual)])

    @property
    def subsets(self) -> Sequence[Sequence[str]]:
        """The choices of tasks whose experts are merged, each for a table of its own."""
        names = tuple(self.tasks)
        return (names,) if self.quick else tuple(names[:n] for n in self.counts or self.usual)

    def expert(self, task: str, variant: Variant) -> Path:
        """Return the folder of an expert: an ordinary checkpoint, or an adapter as PEFT saves it."""
        return self.folder / "experts" / str(variant) / task

    @abstractmethod
    def prepare(self, on_progress: OnProgress) -> None:
        """Fetch the data and make the base, unless they are there."""

    @abstractmethod
    def fresh(self, task: str) -> Any:
        """Return the base as a task's experts begin: with a fresh head, where the task has one."""

    @abstractmethod
    def lessons(self, task: str, batch_size: int, seed: int) -> Lessons:
        """Return what experts of a task learn from; the same seed gives the same batches."""

    @abstractmethod
    def settings(self, task: str, variant: Variant) -> Settings:
        """Return how an expert is trained."""

    @abstractmethod
    def learnt_from(self, task: str) -> Mapping[str, str]:
        """Return hashes of what else an expert depends on: its examples, a base of the suite's own."""

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer that experts are saved with; None where there is no text."""
        return None

    def train(self, task: str, variant: Variant, on_progress: OnProgress) -> float | None:
        """Train an expert, unless it is there, trained alike on the same examples.

        Returns:
            Seconds per step, or None when the expert was there already.
        """
        settings = self.settings(task, variant).by(variant.optimizer)
        settings = replace(settings, steps=max(1, round(variant.times * settings.steps)))
        marker = training.marker(settings, variant=str(variant), **self.learnt_from(task))
        out = self.expert(task, variant)
        if training.is_trained(out, marker):
            on_progress(settings.steps, settings.steps)
            return None
        # One of its own for each expert: with one for all, adapters would share their random `lora_A`,
        # which adapters that meet in practice do not.
        seed = 1000 * variant.seed + list(self.tasks).index(task)
        torch.default_generator.manual_seed(seed)
        lessons = self.lessons(task, settings.batch_size, seed)
        if variant.one_start:
            torch.default_generator.manual_seed(1000 * variant.seed)
        model: Any = lessons.model
        if variant.kind == "lora":
            model = self.adapt(model, variant.rank)
        if variant.frozen:
            model.get_input_embeddings().requires_grad_(requires_grad=False)
        model.to(device()).train()

        def loss(batch: Batch) -> Tensor:
            inputs, wanted = batch
            there = {name: tensor.to(device()) for name, tensor in inputs.items()}
            with products() if self.autocast else nullcontext():
                return lessons.loss((there, wanted.to(device())))

        seconds = training.fit(
            model, lessons.batches, loss, settings, on_progress, by=variant.optimizer
        )
        with training.finished(out, marker) as folder:
            model.save_pretrained(str(folder))
            if self.tokenizer is not None:
                _Tokenizer.from_pretrained(self.tokenizer).save_pretrained(folder)
        return seconds

    def adapt(self, model: Any, rank: int = RANK) -> Any:
        """Return the model with fresh adapters by PEFT, which are put into the model itself."""
        config = peft.LoraConfig(
            r=rank, lora_alpha=ALPHA * rank // RANK, target_modules=list(self.adapted), **self.lora
        )
        return peft.get_peft_model(model, config)

    @abstractmethod
    def score(
        self,
        task: str,
        part: Part,
        model: Path,
        expert: Path,
        on_progress: OnProgress | None = None,
    ) -> Scores:
        """Return how a model does on each example of a task.

        Args:
            task: the task.
            part: of which part of its examples.
            model: folder of an ordinary checkpoint: the base, a merge, an expert made whole.
            expert: folder of the task's expert, whose head is used where a task has one.
            on_progress: called with the examples done and all examples.
        """

    @abstractmethod
    def inputs(self, task: str, examples: int) -> Sequence[Mapping[str, Any]]:
        """Return batches of the first training examples, without labels, for methods with data."""

    def describe(self, task: str) -> dict[str, Any]:
        """Return what the results say of a task."""
        return {"about": self.tasks[task]}

    def measures(self, model: Path) -> dict[str, float]:
        """Return what else is measured of a model, such as its perplexity on general text."""
        return {}
