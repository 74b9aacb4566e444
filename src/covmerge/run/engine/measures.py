"""What a comparison says of merged updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from covmerge.base.types import Json
from covmerge.files.tensors.views import MatrixLayout, matrices
from covmerge.maths.measures.retention import energy_gram, retention
from covmerge.maths.measures.spectrum import stable_rank


class Measures:
    """Of the updates of some rows; what several merged updates are held against is made once."""

    def __init__(self, updates: Mapping[str, Tensor], layout: MatrixLayout | None) -> None:
        """Look at updates.

        Args:
            updates: Δ_t by expert, of one shape.
            layout: how the rows hold whole matrices; None: they hold none.
        """
        self._updates = updates
        self._layout = layout

    def of(self, merged: Tensor) -> dict[str, Json]:
        """Return ⟨W̄ − W_0, Δ_t⟩ by expert; of every matrix the stable rank and what it retains."""
        flat = merged.reshape(-1)
        dots: dict[str, Json] = {
            expert: float(torch.dot(flat, update.reshape(-1)))
            for expert, update in self._updates.items()
        }
        if self._layout is None:
            return {"dots": dots}
        parts = matrices(merged, self._layout)
        ranks: list[Json] = [stable_rank(matrix) for matrix in parts]
        retained: list[Json] = [
            {expert: retention(matrix, update, gram) for expert, (update, gram) in experts.items()}
            for matrix, experts in zip(parts, self._experts, strict=True)
        ]
        return {"dots": dots, "stable_ranks": ranks, "retention": retained}

    @cached_property
    def _experts(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """Of every matrix, by expert, the update and its Gram matrix."""
        assert self._layout is not None
        split = {name: matrices(update, self._layout) for name, update in self._updates.items()}
        count = len(next(iter(split.values())))
        return [
            {name: (parts[place], energy_gram(parts[place])) for name, parts in split.items()}
            for place in range(count)
        ]
