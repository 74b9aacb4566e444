"""Heads of classifiers: made for a task's labels, and taken from a trained expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

# Its annotations are partial.
_files: Any = safetensors.torch


def naming(labels: Sequence[str]) -> dict[str, Any]:
    """Return what transformers' classifiers are told of their labels.

    Example:
        >>> naming(["no", "yes"])["label2id"]
        {'no': 0, 'yes': 1}
    """
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def classifier(expert: Path) -> tuple[Tensor, Tensor]:
    """Return weight `(labels, hidden)` and bias `(labels,)` of an expert, whole or adapter, in float32."""
    (file,) = (path for path in expert.glob("*model.safetensors"))
    tensors: dict[str, Tensor] = _files.load_file(file)
    (weight,) = (tensor for name, tensor in tensors.items() if name.endswith("classifier.weight"))
    (bias,) = (tensor for name, tensor in tensors.items() if name.endswith("classifier.bias"))
    return weight.float(), bias.float()
