"""How exactly models are trained: weights in float32, products in bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from covmerge.evaluation.training import device


def products() -> AbstractContextManager[object]:
    """Multiply in bfloat16, which CPUs that know it do twice as fast."""
    return torch.autocast(device().type, torch.bfloat16)
