"""How the bank's bases are made: each learns from its kind of data what no task asks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from covmerge_lab import training
from covmerge_lab.bank import architectures, bases, data
from covmerge_lab.bank.architectures import PAD
from covmerge_lab.bank.bases import Base
from covmerge_lab.training import Settings
from covmerge_lab.vision import pretraining as vision
from covmerge_lab.workers import OnProgress

_Bert: Any = transformers.BertModel

SEED = 63
_MASK_TOKEN = 2
_LAYERS = 3  # kept of the package's six: half the price
Batch = tuple[Tensor, ...]


def folder_of(base: Base, cache: Path) -> Path:
    """Return where a base lies."""
    return cache / "bank" / "bases" / base.name


def prepare(base: Base, cache: Path, on_progress: OnProgress) -> None:
    """Make a base, unless it is there, made by the same code."""
    settings = Settings(max(1, base.steps), 2 * base.rate, 32, weight_decay=0.05)
    network = hashlib.sha256(repr(base.build()).encode()).hexdigest()
    marker = training.marker(settings, name=base.name, network=network)
    folder = folder_of(base, cache)
    if training.is_trained(folder, marker):
        return
    torch.default_generator.manual_seed(SEED)
    net = _shortened() if base.name == "minilm" else base.build()
    if base.steps:
        learner = _LEARNERS[base.kind if base.kind != "text" else base.answers](net, base, cache)
        training.fit(
            learner.train(), learner.batches(settings.batch_size), learner, settings, on_progress
        )
    with training.finished(folder, marker) as unfinished:
        bases.save(net, unfinished)
        if base.kind == "text":
            bases.save_tokenizer(base, cache, unfinished)


def _shortened() -> Any:
    """Return the first layers of the package's model."""
    net = _Bert.from_pretrained(
        architectures.minilm_folder(), add_pooling_layer=False, num_hidden_layers=_LAYERS
    )
    return net


class _Learner(nn.Module):
    """A network with what its pretraining needs; called with a batch it returns the loss."""

    def __init__(self, net: Any, base: Base, cache: Path) -> None:
        super().__init__()
        self.net, self.base, self.cache = net, base, cache
        self.generator = torch.Generator().manual_seed(SEED)

    def drawn(self, size: int, of: int) -> Tensor:
        return torch.randint(of, (size,), generator=self.generator)


class _Texts(_Learner):
    """Masked tokens of the tasks' training texts, without labels."""

    def batches(self, size: int) -> Iterator[Batch]:
        tasks = data.tasks("text", self.cache).values()
        rows = torch.cat([bases.encode(self.base, t, t.train, self.cache) for t in tasks])
        while True:
            yield (rows[self.drawn(size, len(rows))],)

    def forward(self, batch: Batch) -> Tensor:
        (rows,) = batch
        hidden_ones = (torch.rand(rows.shape, generator=self.generator) < 0.2) & (rows != PAD)
        seen = rows.masked_fill(hidden_ones, _MASK_TOKEN)
        found = self.net(input_ids=seen, attention_mask=(rows != PAD).long()).last_hidden_state
        words = self.net.get_input_embeddings().weight
        return cross_entropy(found[hidden_ones] @ words.T, rows[hidden_ones])


class _Continued(_Texts):
    """The next token of the same texts; for an encoder with a decoder, texts with holes made whole."""

    def batches(self, size: int) -> Iterator[Batch]:
        tokenizer = bases.tokenizer_of(self.base, self.cache)
        texts = [x for t in data.tasks("text", self.cache).values() for x in t.train.inputs]
        found = [each.ids[: architectures.LENGTH] for each in tokenizer.encode_batch(texts)]
        rows = torch.tensor([row + [PAD] * (architectures.LENGTH - len(row)) for row in found])
        while True:
            yield (rows[self.drawn(size, len(rows))],)

    def forward(self, batch: Batch) -> Tensor:
        (rows,) = batch
        mask = (rows != PAD).long()
        wanted = rows.masked_fill(rows == PAD, -100)
        if self.net.config.is_encoder_decoder:
            holes = torch.rand(rows.shape, generator=self.generator) < 0.3
            seen = rows.masked_fill(holes & (rows != PAD), _MASK_TOKEN)
            return self.net(input_ids=seen, attention_mask=mask, labels=wanted).loss
        logits = self.net(input_ids=rows, attention_mask=mask).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())


class _Headed(_Learner):
    """Examples that have a number each, told by a head."""

    def __init__(self, net: Any, base: Base, cache: Path) -> None:
        super().__init__(net, base, cache)
        example, _ = next(self.batches(2))
        with torch.no_grad():
            width = bases.features(net, base, example).shape[1]
        self.head = nn.Linear(width, self.classes)

    classes: int

    def batches(self, size: int) -> Iterator[Batch]:
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        shown, labels = batch
        return cross_entropy(self.head(bases.features(self.net, self.base, shown)), labels)


class _Pictures(_Headed):
    """What fonts' characters, writing systems, textures and emoji are called that no task has."""

    def batches(self, size: int) -> Iterator[Batch]:
        pictures = vision.collect(self.cache, quick=False)
        self.classes = int(pictures.labels.max()) + 1
        for shown, labels in vision.Views(pictures, size, SEED):
            yield avg_pool2d(shown, 2), labels


class _Sounds(_Headed):
    """Which recording a part of it is from; recordings of the tests are left out."""

    def batches(self, size: int) -> Iterator[Batch]:
        voices = data.recordings(self.cache)
        known = [s for voice in voices for i, s in enumerate(voice) if i % 5]
        self.classes = len(known)
        draw: Any = np.random.default_rng(SEED)
        while True:
            labels = draw.integers(0, len(known), size)
            parts = [data.window(known[label], draw) for label in labels]
            noisy = np.stack(parts) + 0.1 * draw.standard_normal((size, data.SAMPLES))
            yield torch.as_tensor(noisy.astype(np.float32)), torch.as_tensor(labels)


class _Tables(_Learner):
    """A hidden value of a row, of tables that no task has."""

    def __init__(self, net: Any, base: Base, cache: Path) -> None:
        super().__init__(net, base, cache)
        self.tables = data.table_rows(cache)
        with torch.no_grad():
            width = net(self.tables[0][:1]).shape[1]
        self.asked = nn.Embedding(data.COLUMN_NAMES, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, data.BINS))

    def batches(self, size: int) -> Iterator[Batch]:
        while True:
            rows = self.tables[int(self.drawn(1, len(self.tables)))]
            yield rows[self.drawn(size, len(rows))], self.drawn(size, rows.shape[1])

    def forward(self, batch: Batch) -> Tensor:
        rows, column = batch
        every = torch.arange(len(rows))
        names, wanted = rows[every, column, 0], rows[every, column, 1]
        seen = rows.clone()
        seen[every, column, 1] = data.MASK
        return cross_entropy(self.head(self.net(seen) * self.asked(names)), wanted)


_LEARNERS: dict[str, type[Any]] = {
    "heads": _Texts,
    "tokens": _Continued,
    "pictures": _Pictures,
    "sounds": _Sounds,
    "tables": _Tables,
}
