"""Fine-tune one expert: every weight of the encoder, plus a fresh classifier."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
)

from demo.encode import Encoded
from demo.tasks import Task
from demo.workers import Tell

MARKER = "training.json"


@dataclass(frozen=True)
class Settings:
    """How one expert is trained."""

    steps: int
    learning_rate: float
    max_length: int
    batch_size: int = 32
    warmup: float = 0.1
    weight_decay: float = 0.01
    seed: int = 7


# Different on purpose: experts met in practice were not trained alike.
SETTINGS = {
    "language": Settings(steps=120, learning_rate=3e-4, max_length=32),
    "medicine": Settings(steps=160, learning_rate=2e-4, max_length=32),
    "code": Settings(steps=90, learning_rate=2e-4, max_length=40),
    "sentiment": Settings(steps=150, learning_rate=5e-5, max_length=16),
    "places": Settings(steps=200, learning_rate=2e-4, max_length=24),
    "syllables": Settings(steps=300, learning_rate=2e-4, max_length=16),
}


def train_expert(base: Path, task: Task, settings: Settings, out: Path, tell: Tell) -> float | None:
    """Fine-tune `base` on `task` and save an ordinary Hugging Face folder.

    Args:
        base: folder of the pretrained encoder.
        task: the task, of which only the training split is used.
        settings: how to train.
        out: where the expert goes. One trained before, with the same settings and data, is kept.
        tell: hears of every step.

    Returns:
        Seconds per step, or None when the expert was there already.
    """
    marker = {"settings": asdict(settings), "data": fingerprint(task)}
    if is_trained(out, marker):
        tell(settings.steps, settings.steps)
        return None
    torch.manual_seed(settings.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        num_labels=len(task.labels),
        id2label=dict(enumerate(task.labels)),
        label2id={label: i for i, label in enumerate(task.labels)},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    started = time.perf_counter()
    _fit(model, Encoded(base, task.train, settings.max_length), settings, tell)
    seconds = (time.perf_counter() - started) / settings.steps
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    (out / MARKER).write_text(json.dumps(marker, indent=1))
    return seconds


def _fit(model: PreTrainedModel, data: Encoded, settings: Settings, tell: Tell) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(settings.warmup * settings.steps), settings.steps
    )
    model.train()
    batches = islice(data.shuffled(settings.batch_size, settings.seed), settings.steps)
    for step, (inputs, labels) in enumerate(batches, start=1):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(step, settings.steps)


def fingerprint(task: Task) -> str:
    """Tell training texts from others."""
    content = json.dumps([task.labels, task.train.texts, task.train.labels])
    return hashlib.sha256(content.encode()).hexdigest()


def is_trained(folder: Path, marker: Mapping[str, object]) -> bool:
    """Whether a folder holds what was trained so before."""
    # The marker is written last: an interrupted training leaves none.
    path = folder / MARKER
    return path.exists() and json.loads(path.read_text()) == marker
