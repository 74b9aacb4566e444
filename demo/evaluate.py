"""Accuracy of an encoder with a task's classifier on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from demo.encode import Encoded
from demo.tasks import Split

BATCH_SIZE = 64


@dataclass(frozen=True)
class Exam:
    """One task as put to an encoder.

    Attributes:
        head: safetensors file that holds the classifier of the task's expert.
        split: the texts and their labels.
        max_length: tokens read of each text.
    """

    task: str
    head: Path
    split: Split
    max_length: int


def accuracies(encoder: Path, tokenizer: Path, exams: Sequence[Exam]) -> dict[str, float]:
    """Return the accuracy in [0, 1] of the encoder in a checkpoint folder, by task."""
    model = AutoModel.from_pretrained(encoder).eval()
    return {
        exam.task: accuracy(
            model, load_head(exam.head), Encoded(tokenizer, exam.split, exam.max_length)
        )
        for exam in exams
    }


def load_head(file: Path) -> tuple[Tensor, Tensor]:
    """Read weight `(labels, hidden)` and bias `(labels,)` of the classifier in a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor("classifier.weight"), tensors.get_tensor("classifier.bias")


@torch.inference_mode()
def accuracy(encoder: torch.nn.Module, head: tuple[Tensor, Tensor], data: Encoded) -> float:
    """Return the share of texts, in [0, 1], whose highest score is their label's."""
    right = 0
    for inputs, labels in data.in_order(BATCH_SIZE):
        scores = torch.nn.functional.linear(encoder(**inputs).pooler_output, *head)
        right += int((scores.argmax(dim=-1) == labels).sum())
    return right / len(data)
