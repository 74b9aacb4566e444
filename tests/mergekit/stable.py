"""mergekit with a sort that leaves equal magnitudes in their order, where it takes the largest entries.

torch's own `argsort` leaves them as the processor's instructions come to them, so that mergekit's choice
among equals is another one elsewhere. covmerge's choice is that of a stable sort everywhere.
"""

from __future__ import annotations

from typing import Any

import torch


class _Torch:
    """torch, but that sorts of a whole tensor are stable; those along rows (DELLA's) stay as they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def argsort(values: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.argsort(values, stable="dim" not in given, **given)

    @staticmethod
    def sort(values: torch.Tensor, **given: Any) -> Any:
        return torch.sort(values, stable=True, **given)


def sort_stably(*, stably: bool = True) -> None:
    """Let mergekit, in this process, take equal magnitudes in their order; or let it do as it does."""
    from mergekit import sparsify

    sparsify.torch = _Torch() if stably else torch
