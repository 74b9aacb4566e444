"""Train one adapter with PEFT: LoRA on the linear layers, the task's classifier beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.lora.subjects import Settings, Subject
from covmerge.evaluation.text.encode import Encoded
from covmerge.evaluation.text.suite import fingerprint
from covmerge.evaluation.text.tasks import Task
from covmerge.evaluation.training import MARKER, is_trained
from covmerge.evaluation.workers import Tell, untold

# Their annotations are partial.
_files: Any = safetensors.torch
_transformers: Any = transformers

RANK, ALPHA = 16, 32
ADAPTER, HEAD = "adapter", "head.safetensors"


def train(subject: Subject, task: Task, folder: Path, tell: Tell = untold) -> None:
    """Train the task's adapter, unless it is there, trained alike on the same texts.

    Args:
        subject: the base and how to train.
        task: the task, of which only the training split is used.
        folder: where the adapter and the classifier go.
        tell: hears of every step.
    """
    settings = subject.settings[task.name]
    marker = {"settings": asdict(settings), "lora": [RANK, ALPHA], "texts": fingerprint(task)}
    if is_trained(folder, marker):
        tell(settings.steps, settings.steps)
        return
    path = folder / MARKER
    path.unlink(missing_ok=True)
    torch.default_generator.manual_seed(settings.seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(subject.targets))
    model: Any = peft.get_peft_model(subject.load(subject.base), config)
    head = subject.head(task)
    _fit(subject, task, model, head, settings, tell)
    model.save_pretrained(folder / ADAPTER, save_embedding_layers=False)
    _files.save_file(head.state_dict(), folder / HEAD)
    path.write_text(json.dumps(marker, indent=1))


def trained_head(subject: Subject, task: Task, folder: Path) -> nn.Module:
    """Return the classifier that was trained beside an adapter."""
    head = subject.head(task)
    head.load_state_dict(_files.load_file(folder / HEAD))
    return head


def _fit(
    subject: Subject, task: Task, model: Any, head: nn.Module, settings: Settings, tell: Tell
) -> None:
    # The model stays as it was loaded, without dropout.
    parameters = [p for p in (*model.parameters(), *head.parameters()) if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = _transformers.get_linear_schedule_with_warmup(
        optimizer, round(settings.warmup * settings.steps), settings.steps
    )
    answers = subject.answers(task)
    data = Encoded(subject.base, task.train, settings.max_length)
    batches = islice(data.shuffled(settings.batch_size, settings.seed), settings.steps)
    for step, (inputs, labels) in enumerate(batches, start=1):
        loss: Any = cross_entropy(subject.logits(model, head, inputs), answers[labels])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(step, settings.steps)
