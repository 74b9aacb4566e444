"""A small ViT and eight classification tasks, its experts fine-tuned alike, whole or by LoRA."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from covmerge.evaluation import code, training
from covmerge.evaluation.suite import Part, Scores, Suite, Variant
from covmerge.evaluation.text.suite import classifier
from covmerge.evaluation.training import ALPHA, RANK, Settings, device, products
from covmerge.evaluation.vision import canvas, materials, pretraining, tasks, views
from covmerge.evaluation.vision.tasks import Split, Task
from covmerge.evaluation.workers import Tell, untold

# Their annotations are partial.
_Classifier: Any = transformers.ViTForImageClassification
_Encoder: Any = transformers.ViTModel

Batch = tuple[Mapping[str, Tensor], Tensor]  # what the model is given, and labels

_BATCH = 32
_QUICK = ("digits", "letters")
_SETTINGS = {
    "full": Settings(steps=800, learning_rate=2e-4, batch_size=_BATCH),
    "lora": Settings(steps=800, learning_rate=2e-3, batch_size=_BATCH),
}


class VisionSuite(Suite):
    """Handwriting, clothes, fonts, textures and emoji; homogeneous updates, as the CLIP suites' are."""

    name: ClassVar[str] = "vision"
    controlled_task: ClassVar[str] = "clothes"
    adapted: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")

    @property
    def base(self) -> Path:
        """Folder of the encoder that `prepare` trains."""
        return self.folder / "base"

    @property
    def subsets(self) -> Sequence[Sequence[str]]:
        """Four tasks, and all: what more of them do to a merge."""
        names = tuple(self.tasks)
        return (names,) if self.quick else (names[:4], names)

    @property
    def tasks(self) -> Mapping[str, str]:
        """The tasks by name."""
        return {s.name: s.about for s in tasks.SPECS if not self.quick or s.name in _QUICK}

    def prepare(self, tell: Tell) -> None:
        """Draw and split the pictures, and pretrain the base."""
        settings = self._few(pretraining.SETTINGS)
        specs = [spec for spec in tasks.SPECS if spec.name in self.tasks]
        total = len(specs) + settings.steps
        for done, spec in enumerate(specs):
            tell(done, total)
            if not self._file(spec.name).exists():
                tasks.save(tasks.build(spec, self.cache), self._file(spec.name))
        made_by = code.digest(pretraining, materials, canvas, views)
        marker = training.marker(settings, code=made_by)
        if not training.is_trained(self.base, marker):
            pictures = pretraining.collect(self.cache, self.quick)
            with training.finished(self.base, marker) as folder:
                pretraining.pretrain(
                    pictures, settings, folder, lambda done, _: tell(len(specs) + done, total)
                )
        tell(total, total)

    def fresh(self, task: str) -> Any:
        """Return an image classifier."""
        labels = self._data(task).labels
        return _Classifier.from_pretrained(
            self.base,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
        )

    def train(self, task: str, variant: Variant, tell: Tell) -> float | None:
        """See `Suite.train`: an image classifier, or PEFT's adapter of one."""
        data = self._data(task)
        settings = self._few(_SETTINGS[variant.kind])
        marker = training.marker(
            settings,
            variant=str(variant),
            base=_sha256((self.base / "model.safetensors").read_bytes()),
            data=_sha256(data.train.pixels.tobytes() + data.train.labels.tobytes()),
        )
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
                    r=RANK,
                    lora_alpha=ALPHA,
                    target_modules=list(self.adapted),
                    modules_to_save=["classifier"],
                ),
            )
        model.to(device()).train()

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            pixels, labels = (each.to(device()) for each in batch)
            with products():
                logits = model(pixel_values=pixels).logits
            return cross_entropy(logits.float(), labels)

        batches = _shuffled(data.train, settings.batch_size, _seed(variant, task))
        seconds = training.fit(model, batches, loss, settings, tell)
        with training.finished(out, marker) as folder:
            model.save_pretrained(str(folder))
        return seconds

    def controlled(
        self, batch_size: int, seed: int
    ) -> tuple[nn.Module, Iterator[Batch], Callable[[Batch], Tensor]]:
        """See `covmerge.evaluation.studies.controlled.Controlled`."""
        model = self.fresh(self.controlled_task)
        pictures = _shuffled(self._data(self.controlled_task).train, batch_size, seed)

        def loss(batch: Batch) -> Tensor:
            inputs, labels = batch
            return cross_entropy(model(**inputs).logits, labels)

        return model, (({"pixel_values": pixels}, labels) for pixels, labels in pictures), loss

    def score(
        self, task: str, part: Part, model: Path, expert: Path, tell: Tell | None = None
    ) -> Scores:
        """See `Suite.score`: 1.0 where the expert's classifier gives the right label."""
        data = self._data(task)
        split: Split = getattr(data, part)
        split = split.first(_BATCH) if self.quick else split
        encoder = _Encoder.from_pretrained(model, add_pooling_layer=False).eval()
        head = classifier(expert)
        scores: list[float] = []
        with torch.inference_mode():
            for pixels, labels in _in_order(split, _BATCH):
                seen = encoder(pixel_values=pixels).last_hidden_state[:, 0]
                right = linear(seen, *head).argmax(dim=-1) == labels
                scores += [float(each) for each in right]
        (tell or untold)(len(scores), len(scores))
        return scores

    def inputs(self, task: str, examples: int) -> Sequence[Mapping[str, Tensor]]:
        """See `Suite.inputs`."""
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


def _shuffled(split: Split, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go over the pictures again and again, without end: in another order, shown another way."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        order = draw.sample(range(len(split.labels)), len(split.labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            pixels, labels = _batch(split, order[start : start + batch_size])
            yield views.moved(pixels, generator, most=0.1), labels


def _batch(split: Split, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Return pictures `(n, 3, SIDE, SIDE)` within [−1, 1], gray ones too, and labels."""
    pixels = torch.as_tensor(split.pixels[indices]).expand(-1, 3, -1, -1).float()
    return pixels / 127.5 - 1, torch.as_tensor(split.labels[indices])


def _seed(variant: Variant, task: str) -> int:
    # One of its own for each expert: with one for all, adapters would share their random `lora_A`,
    # which adapters that meet in practice do not.
    names = [spec.name for spec in tasks.SPECS]
    return 1000 * variant.seed + names.index(task)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
