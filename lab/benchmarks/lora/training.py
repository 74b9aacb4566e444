"""Train one adapter with PEFT: LoRA on the linear layers, the task's classifier beside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.lora.subjects import Subject
from covmerge_lab.suite import Batch
from covmerge_lab.text.encode import Encoded
from covmerge_lab.text.suite import fingerprint
from covmerge_lab.text.tasks import Task
from covmerge_lab.training import ALPHA, RANK, finished, fit, is_trained
from covmerge_lab.workers import OnProgress, ignore_progress

# Their annotations are partial.
_files: Any = safetensors.torch

ADAPTER, HEAD = "adapter", "head.safetensors"


def train(
    subject: Subject, task: Task, folder: Path, on_progress: OnProgress = ignore_progress
) -> None:
    """Train the task's adapter, unless it is there, trained alike on the same texts.

    Args:
        subject: the base and how to train.
        task: the task, of which only the training split is used.
        folder: where the adapter and the classifier go.
        on_progress: called with the steps done and all steps.
    """
    settings = subject.settings[task.name]
    marker = {"settings": asdict(settings), "lora": [RANK, ALPHA], "texts": fingerprint(task)}
    if is_trained(folder, marker):
        on_progress(settings.steps, settings.steps)
        return
    torch.default_generator.manual_seed(settings.seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(subject.targets))
    # The model stays as it was loaded, without dropout.
    model: Any = peft.get_peft_model(subject.load(subject.base), config)
    head = subject.head(task)
    answers = subject.answers(task)

    def loss(batch: Batch) -> Tensor:
        inputs, labels = batch
        return cross_entropy(subject.logits(model, head, inputs), answers[labels])

    data = Encoded(subject.base, task.train, settings.max_length)
    batches = data.shuffled(settings.batch_size, settings.seed)
    fit(nn.ModuleList([model, head]), batches, loss, settings, on_progress)
    with finished(folder, marker) as unfinished:
        model.save_pretrained(unfinished / ADAPTER, save_embedding_layers=False)
        _files.save_file(head.state_dict(), unfinished / HEAD)


def trained_head(subject: Subject, task: Task, folder: Path) -> nn.Module:
    """Return the classifier that was trained beside an adapter."""
    head = subject.head(task)
    head.load_state_dict(_files.load_file(folder / HEAD))
    return head
