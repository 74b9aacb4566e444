"""A small ViT and eight classification tasks, its experts fine-tuned alike, whole or by LoRA."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from covmerge.base import code
from covmerge_lab import training
from covmerge_lab.heads import classifier, naming
from covmerge_lab.suite import Batch, Lessons, Part, Scores, Suite, Variant
from covmerge_lab.training import Settings
from covmerge_lab.vision import canvas, materials, pretraining, tasks, views
from covmerge_lab.vision.tasks import Split, Task
from covmerge_lab.workers import OnProgress, ignore_progress

# Their annotations are partial.
_Classifier: Any = transformers.ViTForImageClassification
_Encoder: Any = transformers.ViTModel

_BATCH = 32
_QUICK = ("digits", "letters")
_SETTINGS = {
    "full": Settings(steps=800, learning_rate=2e-4, batch_size=_BATCH),
    "lora": Settings(steps=800, learning_rate=2e-3, batch_size=_BATCH),
}


class VisionSuite(Suite):
    """Handwriting, clothes, fonts, textures and emoji; homogeneous updates, as the CLIP suites' are."""

    name: ClassVar[str] = "vision"
    usual: ClassVar[tuple[int, ...]] = (4, 8)  # what more of them do to a merge
    controlled_task: ClassVar[str] = "clothes"
    lora: ClassVar[Mapping[str, Any]] = {"modules_to_save": ["classifier"]}
    autocast: ClassVar[bool] = True
    adapted: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")

    @property
    def base(self) -> Path:
        """Folder of the encoder that `prepare` trains."""
        return self.folder / "base"

    @property
    def available(self) -> Mapping[str, str]:
        """The tasks by name."""
        return {s.name: s.about for s in tasks.SPECS if not self.quick or s.name in _QUICK}

    def prepare(self, on_progress: OnProgress) -> None:
        """Draw and split the pictures, and pretrain the base."""
        settings = self._few(pretraining.SETTINGS)
        specs = [spec for spec in tasks.SPECS if spec.name in self.tasks]
        total = len(specs) + settings.steps
        for done, spec in enumerate(specs):
            on_progress(done, total)
            if not self._file(spec.name).exists():
                tasks.save(tasks.build(spec, self.cache), self._file(spec.name))
        made_by = code.digest(pretraining, materials, canvas, views)
        marker = training.marker(settings, code=made_by)
        if not training.is_trained(self.base, marker):
            pictures = pretraining.collect(self.cache, self.quick)
            with training.finished(self.base, marker) as folder:
                pretraining.pretrain(
                    pictures,
                    settings,
                    folder,
                    lambda done, _: on_progress(len(specs) + done, total),
                )
        on_progress(total, total)

    def fresh(self, task: str) -> Any:
        """Return an image classifier."""
        return _Classifier.from_pretrained(
            self.base,
            **naming(self._data(task).labels),
        )

    def lessons(self, task: str, batch_size: int, seed: int) -> Lessons:
        model = self.fresh(task)

        def loss(batch: Batch) -> Tensor:
            inputs, labels = batch
            return cross_entropy(model(**inputs).logits.float(), labels)

        return Lessons(model, _shuffled(self._data(task).train, batch_size, seed), loss)

    def settings(self, task: str, variant: Variant) -> Settings:
        """See `Suite.settings`: all tasks alike."""
        return self._few(_SETTINGS[variant.kind])

    def learnt_from(self, task: str) -> Mapping[str, str]:
        seen = self._data(task).train
        return {
            "base": _sha256((self.base / "model.safetensors").read_bytes()),
            "data": _sha256(seen.pixels.tobytes() + seen.labels.tobytes()),
        }

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
        split: Split = getattr(data, part)
        split = split.first(_BATCH) if self.quick else split
        encoder = _Encoder.from_pretrained(model, add_pooling_layer=False, dtype=torch.float32)
        encoder.eval()
        head = classifier(expert)
        scores: list[float] = []
        with torch.inference_mode():
            for pixels, labels in _in_order(split, _BATCH):
                seen = encoder(pixel_values=pixels).last_hidden_state[:, 0]
                right = linear(seen, *head).argmax(dim=-1) == labels
                scores += [float(each) for each in right]
        (on_progress or ignore_progress)(len(scores), len(scores))
        return scores

    def inputs(self, task: str, examples: int) -> Sequence[Mapping[str, Tensor]]:
        first = self._data(task).train.first(examples)
        return [{"pixel_values": pixels} for pixels, _ in _in_order(first, _BATCH)]

    def describe(self, task: str) -> dict[str, Any]:
        """Return what it is about, its labels and the sizes of its parts."""
        data = self._data(task)
        parts = {"train": data.train, "validation": data.validation, "test": data.test}
        sizes = {name: len(split.labels) for name, split in parts.items()}
        return {"about": self.tasks[task], "labels": list(data.labels), **sizes}

    def _few(self, settings: Settings) -> Settings:
        return replace(settings, steps=5) if self.quick else settings

    def _file(self, task: str) -> Path:
        return self.examples / f"{task}.npz"

    def _data(self, task: str) -> Task:
        return tasks.load(self._file(task))


def _in_order(split: Split, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    indices = range(len(split.labels))
    for start in indices[::batch_size]:
        yield _batch(split, list(indices[start : start + batch_size]))


def _shuffled(split: Split, batch_size: int, seed: int) -> Iterator[Batch]:
    """Go over the pictures again and again, without end: in another order, shown another way."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        order = draw.sample(range(len(split.labels)), len(split.labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            pixels, labels = _batch(split, order[start : start + batch_size])
            yield {"pixel_values": views.moved(pixels, generator, most=0.1)}, labels


def _batch(split: Split, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Return pictures `(n, 3, SIDE, SIDE)` within [−1, 1], gray ones too, and labels."""
    pixels = torch.as_tensor(split.pixels[indices]).expand(-1, 3, -1, -1).float()
    return pixels / 127.5 - 1, torch.as_tensor(split.labels[indices])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
