"""Accuracy of an encoder with a task's classifier on top."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from demo.encode import Encoded

BATCH_SIZE = 64


def load_encoder(folder: Path) -> torch.nn.Module:
    """Load the encoder of a checkpoint folder, whatever head it carries."""
    return AutoModel.from_pretrained(folder).eval()


def load_head(file: Path) -> tuple[Tensor, Tensor]:
    """Read weight `(labels, hidden)` and bias `(labels,)` of the classifier in a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor("classifier.weight"), tensors.get_tensor("classifier.bias")


@torch.inference_mode()
def accuracy(encoder: torch.nn.Module, head: tuple[Tensor, Tensor], data: Encoded) -> float:
    """Return the share of texts, in [0, 1], whose highest score is their label's."""
    right = total = 0
    for inputs, labels in data.in_order(BATCH_SIZE):
        scores = torch.nn.functional.linear(encoder(**inputs).pooler_output, *head)
        right += int((scores.argmax(dim=-1) == labels).sum())
        total += len(labels)
    return right / total
