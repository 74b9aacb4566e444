"""Accuracy of encoders with a task's classifier on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

import covmerge
from demo.encode import Encoded
from demo.models import Model
from demo.tasks import Split
from demo.workers import Tell, untold

BATCH_SIZE = 32


@dataclass(frozen=True)
class Exam:
    """One task as put to encoders.

    Attributes:
        base: folder of the base model, with the tokenizer.
        expert: folder of the task's expert, which has the classifier.
        split: the texts and their labels.
        max_length: tokens read of each text.
    """

    task: str
    base: Path
    expert: Path
    split: Split
    max_length: int


def accuracies(exam: Exam, models: Sequence[Model], tell: Tell = untold) -> list[float]:
    """Return the accuracy in [0, 1] of each model."""
    data = Encoded(exam.base, exam.split, exam.max_length)
    head = _classifier(exam.expert)
    found: list[float] = []
    for model in models:
        tell(len(found), len(models))
        found.append(_accuracy(_encoder(model, exam), head, data))
    tell(len(found), len(models))
    return found


def _encoder(model: Model, exam: Exam) -> torch.nn.Module:
    folder = model.folders[exam.task]
    encoder = AutoModel.from_pretrained(folder).eval()
    if model.masked:
        weights = covmerge.load_expert(folder, exam.task, exam.base)
        encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
    return encoder


def _classifier(expert: Path) -> tuple[Tensor, Tensor]:
    """Return weight `(labels, hidden)` and bias `(labels,)`."""
    with safe_open(expert / "model.safetensors", framework="pt") as tensors:
        return tensors.get_tensor("classifier.weight"), tensors.get_tensor("classifier.bias")


@torch.inference_mode()
def _accuracy(encoder: torch.nn.Module, head: tuple[Tensor, Tensor], data: Encoded) -> float:
    """Return the share of texts, in [0, 1], whose highest score is their label's."""
    right = 0
    for inputs, labels in data.in_order(BATCH_SIZE):
        scores = torch.nn.functional.linear(encoder(**inputs).pooler_output, *head)
        right += int((scores.argmax(dim=-1) == labels).sum())
    return right / len(data)
