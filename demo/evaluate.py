"""Accuracy of an encoder with a task's classifier on top."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from demo.tasks import Split

BATCH_SIZE = 64


def load_encoder(folder: Path) -> torch.nn.Module:
    """Load the encoder of a checkpoint folder, whatever head it carries."""
    return AutoModel.from_pretrained(folder).eval()


def load_head(file: Path) -> tuple[Tensor, Tensor]:
    """Read weight `(labels, hidden)` and bias `(labels,)` of the classifier in a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor("classifier.weight"), tensors.get_tensor("classifier.bias")


class Encoded:
    """Texts turned into batches of token ids once, short texts with short ones."""

    def __init__(self, base: Path, split: Split, max_length: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(base)
        ids = tokenizer(list(split.texts), truncation=True, max_length=max_length)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        chunks = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        self.batches = [
            (
                tokenizer.pad({"input_ids": [ids[i] for i in chunk]}, return_tensors="pt"),
                torch.tensor([split.labels[i] for i in chunk]),
            )
            for chunk in chunks
        ]


@torch.inference_mode()
def accuracy(encoder: torch.nn.Module, head: tuple[Tensor, Tensor], data: Encoded) -> float:
    """Return the share of texts, in [0, 1], whose highest score is their label's."""
    right = total = 0
    for inputs, labels in data.batches:
        scores = torch.nn.functional.linear(encoder(**inputs).pooler_output, *head)
        right += int((scores.argmax(dim=-1) == labels).sum())
        total += len(labels)
    return right / total
