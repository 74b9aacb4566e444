"""What a sparse update keeps of an update, by the rules that mergekit's recipes name.

Each rule gives a mask; what it keeps may be brought back to the update's ℓ1 length. Every operation
rounds to the update's dtype, so that half-precision arithmetic is that of half-precision tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from covmerge.errors import RecipeError
from covmerge.linalg.select import kth_magnitude

Sparsify = Literal["none", "magnitude", "bernoulli", "ranked", "band"]
Numbers = Callable[[tuple[int, ...]], Tensor]  # uniform in [0, 1), float32, for a shape

_NO_LENGTH = 1e-7  # an ℓ1 length below it is not divided by


def largest(update: Tensor, density: float) -> Tensor:
    """Keep the ⌊density · n⌋ largest entries, one at least.

    Of equal magnitudes at the edge those are kept that torch's sort puts first, which is another order
    on another processor; float32 updates hardly have any.

    Example:
        >>> largest(torch.tensor([3.0, 1.0, -1.0, 2.0]), 0.75).tolist()
        [1.0, 1.0, 0.0, 1.0]
    """
    sizes = update.abs().reshape(-1).float()
    count = max(1, int(density * len(sizes)))
    limit = kth_magnitude(sizes, len(sizes) - count + 1)
    kept = sizes >= limit
    if int(kept.sum()) != count:
        kept.zero_()
        kept[sizes.argsort(descending=True)[:count]] = True
    return kept.to(update.dtype).view_as(update)


def band(update: Tensor, density: float, gamma: float) -> Tensor:
    """Keep ⌊density · n⌋ entries below the ⌊γ n⌋ largest; fewer of these are left out where need be.

    Of equal magnitudes at an edge those are kept that torch's sort puts inside, as in `largest`.

    Example:
        >>> band(torch.tensor([1.0, 4.0, 3.0, 2.0]), density=0.5, gamma=0.25).tolist()
        [0.0, 0.0, 1.0, 1.0]
    """
    sizes = update.abs().reshape(-1).float()
    count = int(density * len(sizes))
    first = max(0, len(sizes) - count - int(gamma * len(sizes)))
    kept = torch.zeros(len(sizes), dtype=torch.bool, device=update.device)
    if count:
        low, high = (kth_magnitude(sizes, rank) for rank in (first + 1, first + count))
        kept = (sizes >= low) & (sizes <= high)
    if int(kept.sum()) != count:
        kept.zero_()
        kept[sizes.sort().indices[first : first + count]] = True
    return kept.to(update.dtype).view_as(update)


def keep_probabilities(
    update: Tensor, density: float, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Probabilities from density − ε to density + ε, by the rank of a magnitude in its row.

    A row goes along the second axis; a tensor of one axis is one row, and one entry has the mean.
    """
    rows = update if update.dim() > 1 else update.reshape(1, -1)
    if rows.shape[1] < 2:
        return torch.full_like(rows, density, dtype=dtype)
    # Which of equal magnitudes comes first is torch's matter.
    rank = rows.abs().argsort(dim=1).argsort(dim=1).to(dtype) + 1
    low, high = rank.amin(dim=1, keepdim=True), rank.amax(dim=1, keepdim=True)
    return ((rank - low) / (high - low)).clamp_(0, 1) * 2 * epsilon + (density - epsilon)


def sparse(
    update: Tensor,
    how: Sparsify,
    *,
    density: float,
    gamma: float,
    epsilon: float,
    rescale: bool,
    numbers: Numbers,
) -> Tensor:
    """Return what a rule leaves of an update.

    A density of 1 or more leaves all of it, and draws no number; of 0 nothing.

    Args:
        update: of any shape.
        how: the rule.
        density: share of the entries that is kept, or its mean.
        gamma: of `band`.
        epsilon: of `ranked`.
        rescale: whether what is left is brought to the update's ℓ1 length.
        numbers: of `bernoulli` and `ranked`.

    Raises:
        RecipeError: density ± ε leaves (0, 1).
    """
    if how == "none" or density >= 1 or not update.numel():
        return update
    if density <= 0 and how in ("magnitude", "ranked"):
        return torch.zeros_like(update)
    if how == "magnitude":
        return _masked(update, largest(update, density), rescale=rescale)
    if how == "band":
        return _masked(update, band(update, density, gamma), rescale=rescale)
    # torch has no Bernoulli numbers of other dtypes on the CPU.
    own = update if update.dtype == torch.bfloat16 else update.float()
    if how == "ranked":
        if not (density - epsilon > 0 and density + epsilon < 1):
            raise RecipeError(
                f"sparsify: ranked: density {density:g} ± epsilon {epsilon:g} must stay within (0, 1): "
                "choose a smaller epsilon"
            )
        probability = keep_probabilities(update, density, epsilon, own.dtype)
    else:
        probability = torch.full_like(own, density)
    kept = numbers(tuple(probability.shape)).to(own.device) < probability.float()
    return _masked(own, kept.to(own.dtype).view_as(own), rescale=rescale).to(update.dtype)


def _masked(update: Tensor, kept: Tensor, *, rescale: bool) -> Tensor:
    """Δ ⊙ M, [times ‖Δ‖₁ / ‖Δ ⊙ M‖₁]."""
    left = kept.mul_(update)
    if rescale:
        whole, rest = update.abs().sum(), left.abs().sum()
        if not (whole < _NO_LENGTH or rest < _NO_LENGTH):
            left *= whole / rest
    return left
