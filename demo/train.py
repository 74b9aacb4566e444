"""Fine-tune one expert: every weight of the encoder, plus a fresh classifier."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from demo.tasks import Task

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
    "language": Settings(steps=200, learning_rate=2e-4, max_length=32),
    "medicine": Settings(steps=250, learning_rate=1e-4, max_length=32),
    "code": Settings(steps=180, learning_rate=1e-4, max_length=64),
    "sentiment": Settings(steps=250, learning_rate=5e-5, max_length=16),
    "places": Settings(steps=300, learning_rate=1e-4, max_length=24),
    "syllables": Settings(steps=400, learning_rate=2e-4, max_length=16),
}


def train_expert(
    base: Path, task: Task, settings: Settings, out: Path, progress: Callable[[int, float], None]
) -> float | None:
    """Fine-tune `base` on `task` and save an ordinary Hugging Face folder.

    Args:
        base: folder of the pretrained encoder.
        task: the task, of which only the training split is used.
        settings: how to train.
        out: where the expert goes. One trained before, with the same settings and data, is kept.
        progress: called with the step and its loss.

    Returns:
        Seconds per step, or None when the expert was there already.
    """
    marker = {"settings": asdict(settings), "data": _fingerprint(task)}
    if _is_trained(out, marker):
        return None
    torch.manual_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        num_labels=len(task.labels),
        id2label=dict(enumerate(task.labels)),
        label2id={label: i for i, label in enumerate(task.labels)},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    started = time.perf_counter()
    _fit(model, tokenizer, task, settings, progress)
    seconds = (time.perf_counter() - started) / settings.steps
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / MARKER).write_text(json.dumps(marker, indent=1))
    return seconds


def _fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: Settings,
    progress: Callable[[int, float], None],
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(settings.warmup * settings.steps), settings.steps
    )
    draw = torch.Generator().manual_seed(settings.seed)
    labels = torch.tensor(task.train.labels)
    order = torch.empty(0, dtype=torch.long)
    model.train()
    for step in range(settings.steps):
        if len(order) < settings.batch_size:
            order = torch.randperm(len(labels), generator=draw)
        batch, order = order[: settings.batch_size], order[settings.batch_size :]
        encoded = tokenizer(
            [task.train.texts[i] for i in batch.tolist()],
            padding=True,
            truncation=True,
            max_length=settings.max_length,
            return_tensors="pt",
        )
        loss = model(**encoded, labels=labels[batch]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step + 1, loss.item())


def _fingerprint(task: Task) -> str:
    content = json.dumps([task.labels, task.train.texts, task.train.labels])
    return hashlib.sha256(content.encode()).hexdigest()


def _is_trained(folder: Path, marker: dict[str, object]) -> bool:
    # The marker is written last: an interrupted training leaves none.
    path = folder / MARKER
    return path.exists() and json.loads(path.read_text()) == marker
