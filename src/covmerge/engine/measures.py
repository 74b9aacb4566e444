"""What a comparison says of a merged update, beside its norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.linalg.lapack import norm
from covmerge.tensors import MatrixLayout, matrices
from covmerge.types import Json

_ITERATIONS = 16


def measure(
    merged: Tensor, updates: Mapping[str, Tensor], layout: MatrixLayout | None
) -> dict[str, Json]:
    """Return ⟨W̄ − W_0, Δ_t⟩ by expert, and the stable rank of every matrix.

    Args:
        merged: the merged update, as the tensor is stored.
        updates: Δ_t by expert, of the same shape.
        layout: how the tensor holds matrices; None: it holds none.
    """
    flat = merged.reshape(-1)
    dots: dict[str, Json] = {
        expert: float(torch.dot(flat, update.reshape(-1))) for expert, update in updates.items()
    }
    if layout is None:
        return {"dots": dots}
    ranks: list[Json] = [stable_rank(matrix) for matrix in matrices(merged, layout)]
    return {"dots": dots, "stable_ranks": ranks}


def stable_rank(matrix: Tensor) -> float:
    """‖M‖²_F / σ₁²: between 1 and the rank, and not fooled by tiny singular values.

    σ₁ comes from a few power iterations: where they have not converged, σ₂ is so near σ₁ that
    their Rayleigh quotient is too.

    Example:
        >>> stable_rank(torch.eye(5)), stable_rank(torch.ones(3, 4)), stable_rank(torch.zeros(2, 2))
        (5.0, 1.0, 0.0)
    """
    square = norm(matrix) ** 2
    if square == 0.0:
        return 0.0
    # Any fixed start will do that is orthogonal to nothing in particular.
    start = torch.arange(1, matrix.shape[1] + 1, dtype=torch.float32) * 0.754877666 % 1 + 0.5
    vector = start.to(matrix)
    top = 0.0
    for _ in range(_ITERATIONS):
        image = matrix @ (vector / norm(vector))
        top = max(top, norm(image) ** 2)
        vector = matrix.mT @ image
        if norm(vector) == 0.0:
            break
    return round(square / top, 4) if top else 0.0
