"""mergekit with an order of its own, where it hangs on the processor or on the process.

A sort leaves equal magnitudes in their order where the largest entries are taken: torch's own `argsort`
leaves them as the processor's instructions come to them, so that mergekit's choice among equals is another
one elsewhere. covmerge's choice is that of a stable sort everywhere.

Models come in the recipe's order where mergekit takes them out of a set: the first has the config, and a
union's tokens are numbered by them.
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


def name_in_order() -> None:
    """Let mergekit, in this process, take models in the recipe's order, the base before all."""
    from mergekit.config import MergeConfiguration

    def in_order(recipe: Any) -> list[Any]:
        parts = [recipe, *(recipe.modules or {}).values()]
        sources = [own for part in parts for piece in part.slices or () for own in piece.sources]
        listed = [own for part in parts for own in part.models or ()]
        base = [] if recipe.base_model is None else [recipe.base_model]
        return list(dict.fromkeys([*base, *(own.model for own in (*listed, *sources))]))

    MergeConfiguration.referenced_models = in_order
