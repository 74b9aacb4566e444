"""Where models are trained, and how exactly: weights in float32, products in bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def products() -> AbstractContextManager[object]:
    """Multiply in bfloat16, which CPUs that know it do twice as fast."""
    return torch.autocast(device().type, torch.bfloat16)
