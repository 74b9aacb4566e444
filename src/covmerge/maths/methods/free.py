"""FR-Merging: the sum of high-pass filtered updates (FREE-Merging without its experts)."""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import AXIS_BOUND, Reference, register

_fft: Any = torch.fft  # torch.fft has no types


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    numel = d_out * d_in
    transforms = 2 * count * 10.0 * numel * max(1, numel.bit_length())
    # Update, mask, a spectrum, its inverse transform and its temporary; the last three are complex.
    return Cost(transforms, 8 * numel * itemsize)


@register(
    "free",
    equation="W̄ = W₀ + λ Σ w_t a_t F⁻¹(M ⊙ F(Δ_t)),  F the 2-D Fourier transform, M a high-pass "
    "mask",
    reference=Reference(
        title="FREE-Merging: Fourier Transform for Efficient Model Merging",
        venue="ICCV 2025",
        arxiv="2411.16815",
        equations="FR-Merging",
    ),
    laws=AXIS_BOUND.copies_give(None, "λT times the filtered expert"),
    cost=_cost,
    others="base",
    published_tuning="λ, the filter ratio and whether to align: (0.7, 0.7, yes) for 8 tasks, "
    "(0.15, 0.7, no) for 30",
)
def free(
    group: LinearGroup,
    *,
    filter_ratio: Annotated[
        float, Field(gt=0, description="radius of the kept disc over min(d_out, d_in)")
    ] = 0.7,
    scale: Annotated[float, Field(description="λ, factor of the sum")] = 0.7,
    align: Annotated[
        bool, Field(description="bring the filtered updates to the largest mean magnitude first")
    ] = False,
) -> Merged:
    """Sum the high frequencies of the updates, which are treated as images.

    W̄ = W₀ + λ Σ_t w_t a_t F⁻¹(M ⊙ F(Δ_t))  (FR-Merging), F the 2-D Fourier transform. M keeps the
    disc of radius `filter_ratio` · min(d_out, d_in) around the highest frequency. a_t = 1, or with
    `align` the factor that scales the expert's mean magnitude to the largest.

    Args:
        group: updates `(d_out, d_in)`; weights multiply the filtered and aligned updates.
        filter_ratio: the kept share depends on the aspect ratio: 0.7 keeps nearly all of a square matrix,
            and a third of a 3072 × 768 one.

    Departs from the paper: the mask is that of the published code, in which the disc up to distance
    ⌊min(d_out, d_in)/10⌋ from the highest frequency is counted too, its rim twice. With `align`, an
    expert of which the filter leaves nothing adds nothing (published: division by zero). Tensors other
    than matrices of linear layers keep the base (published: attention and MLP biases are the first
    expert's).

    Example:
        >>> import torch
        >>> smooth, rough = torch.ones(4, 4), torch.ones(4, 4)
        >>> rough[::2] = -1
        >>> group = LinearGroup((smooth, rough), weights=(1.0, 1.0))
        >>> torch.allclose(free(group, filter_ratio=0.5, scale=1.0).delta, rough)
        True
    """
    updates = group.updates
    mask = _mask(updates[0], filter_ratio)
    if not align:
        return Merged(_filtered(stack_weighted(updates, group.weights), mask).mul_(scale))
    merged = torch.zeros_like(updates[0])
    largest = 0.0
    for update, weight in zip(updates, group.weights, strict=True):
        filtered = _filtered(update, mask)
        size = float(filtered.abs().mean())
        # The rounding that is left of an update without high frequencies is not aligned.
        if size > torch.finfo(update.dtype).eps * float(update.abs().mean()):
            merged.add_(filtered, alpha=weight / size)
            largest = max(largest, size)
    return Merged(merged.mul_(scale * largest))


def _mask(like: Tensor, filter_ratio: float) -> Tensor:
    """Return how often the published code counts each frequency: 0, 1 or, on the inner ring, 2."""
    d_out, d_in = like.shape
    rows = torch.arange(d_out, device=like.device) - d_out // 2
    columns = torch.arange(d_in, device=like.device) - d_in // 2
    # Without a shift the highest frequency is in the middle. The distance is always float32, so that the
    # rim does not depend on the dtype.
    distance = (rows.square()[:, None] + columns.square()).to(torch.float32).sqrt_()
    inner, outer = min(d_out, d_in) // 10, min(d_out, d_in) * filter_ratio
    band = (distance >= inner) & (distance <= outer)
    return band.to(like.dtype).add_(distance <= inner)


def _filtered(update: Tensor, mask: Tensor) -> Tensor:
    return cast(
        "Tensor",
        _fft.ifft2(_fft.fft2(update).mul_(mask)).real.clone(memory_format=torch.contiguous_format),
    )
