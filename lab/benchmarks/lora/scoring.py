"""Accuracy of a base with adapters, and how far its logits are from a merged model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from benchmarks.lora.subjects import Subject
from benchmarks.lora.training import trained_head
from covmerge_lab.text.encode import Encoded
from covmerge_lab.text.tasks import Split, Task
from covmerge_lab.workers import OnProgress, ignore_progress

# Its annotations are partial.
_PeftModel: Any = peft.PeftModel

BATCH_SIZE = 32


def accuracies(
    subject: Subject,
    experts: Path,
    adapters: Mapping[str, Path | None],
    splits: Mapping[str, Split],
    on_progress: OnProgress = ignore_progress,
) -> dict[str, float]:
    """Return the accuracy in [0, 1] on each task.

    Args:
        subject: the base and its tasks.
        experts: folder of what was trained, by task, with the classifiers.
        adapters: the adapter to put on the base for each task; None: the base alone.
        splits: the texts of each task.
        on_progress: called with the tasks done and all tasks.
    """
    found: dict[str, float] = {}
    models: dict[Path | None, Any] = {}
    for task in subject.tasks:
        on_progress(len(found), len(subject.tasks))
        adapter = adapters[task.name]
        if adapter not in models:
            models = {adapter: _adapted(subject, adapter)}
        found[task.name] = _accuracy(
            subject, task, models[adapter], experts / task.name, splits[task.name]
        )
    on_progress(len(found), len(subject.tasks))
    return found


def difference(
    subject: Subject,
    experts: Path,
    adapter: Path,
    merged: Path,
    splits: Mapping[str, Split],
    on_progress: OnProgress = ignore_progress,
) -> float:
    """Return max |logits of base and adapter − logits of the merged model| / max |logits|."""
    # The adapter is left beside the weights, where the rounding differs most.
    first = _PeftModel.from_pretrained(subject.load(subject.base), adapter)
    second = subject.load(merged)
    apart = largest = 0.0
    for done, task in enumerate(subject.tasks):
        on_progress(done, len(subject.tasks))
        pairs = zip(
            _logits(subject, task, first, experts / task.name, splits[task.name]),
            _logits(subject, task, second, experts / task.name, splits[task.name]),
            strict=True,
        )
        for (found, _), (expected, _) in pairs:
            apart = max(apart, float((found - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
    on_progress(len(subject.tasks), len(subject.tasks))
    return apart / largest


def _adapted(subject: Subject, adapter: Path | None) -> Any:
    base = subject.load(subject.base)
    if adapter is None:
        return base
    return _PeftModel.from_pretrained(base, adapter).merge_and_unload()


def _accuracy(subject: Subject, task: Task, model: Any, expert: Path, split: Split) -> float:
    answers = subject.answers(task)
    right = sum(
        int((logits[:, answers].argmax(dim=-1) == labels).sum())
        for logits, labels in _logits(subject, task, model, expert, split)
    )
    return right / len(split.texts)


@torch.inference_mode()
def _logits(
    subject: Subject, task: Task, model: Any, expert: Path, split: Split
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go over a split's batches: logits and labels."""
    head = trained_head(subject, task, expert)
    data = Encoded(subject.base, split, subject.settings[task.name].max_length)
    for _, (inputs, labels) in data.in_order(BATCH_SIZE):
        yield subject.logits(model, head, inputs), labels
