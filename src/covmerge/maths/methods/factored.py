r"""Methods on adapters: exact, and without forming a `(d_out, d_in)` matrix.

All updates Δ_t = B_tA_t of a layer lie in the span of Q = orth([A_1; …; A_T]ᵀ) on the right and of
U = orth([B_1 … B_T, 𝟏]) on the left. A method that turns with its inputs and outputs,
f(UΔQᵀ) = U f(Δ) Qᵀ, is run on the cores UᵀΔ_tQ, whose sides are Σr + 1 and Σr. Its result is
U · f(cores) · Qᵀ, an adapter of rank at most Σr. ACE depends on the axes only through 𝟏, on both sides,
and gets Uᵀ𝟏 and Qᵀ𝟏 (`Frame`). A method that turns with its outputs alone, f(UΔ) = U f(Δ), is run on
UᵀΔ_t `(Σr, d_in)`, and one that turns with its inputs alone on Δ_tQ `(d_out, Σr)`. Gram matrices of the
inputs become QᵀG_tQ, the part on which the factors act.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covmerge.base.types import Frame, Json, LinearGroup, LowRank, Measured
from covmerge.maths.linalg.joint import Basis, basis_of
from covmerge.maths.linalg.lapack import exponent_of, svd
from covmerge.maths.methods.registry import Method, Parameters, Sides


@dataclass(frozen=True)
class MergedFactors:
    """The merged update as U · core · Qᵀ, and the method's diagnostics."""

    left: Basis | None  # U, a basis of the left factors and of 𝟏; None: the identity
    core: Tensor  # `(p, q)`, float64
    right: Basis | None  # Q, a basis of the right factors; None: the identity
    dtype: torch.dtype  # the adapters' dtype
    stats: Mapping[str, Json]  # the method's diagnostics, as JSON

    @property
    def delta(self) -> LowRank:
        """The merged update as exact factors, of rank min(p, q)."""
        return self.truncated(min(self.core.shape))[0]

    def times(self, scale: float) -> MergedFactors:
        """Return the merged update times a number."""
        return self if scale == 1.0 else replace(self, core=self.core * scale)

    def truncated(self, rank: int) -> tuple[LowRank, Tensor]:
        """Return the best approximation of a given rank, and all singular values.

        U and Q are orthonormal, so the core's singular values are the update's. Each factor gets √σ, as
        trained factors have about equal shares.
        """
        u, sigma, v = svd(self.core)
        root = sigma[:rank].sqrt()
        left = _expand(self.left, u[:, :rank] * root)
        right = _expand(self.right, v[:rank].mT * root).mT
        return LowRank(left, right).to(self.dtype), sigma


def merge_factors(
    method: Method,
    updates: Sequence[LowRank],
    weights: Sequence[float],
    parameters: Parameters,
    thresholds: Sequence[float] | None = None,
    measured: Sequence[Measured] = (),
    base_norm: float | None = None,
) -> MergedFactors:
    """Run a method on low-rank updates in a basis of their factors.

    Args:
        method: a method for which `factored_for(parameters)` holds.
        updates: adapters' updates of one shape, dtype and device.
        weights: one positive number per update.
        parameters: as `method.resolve` returns them.
        thresholds: per update, the threshold that a global pass found; None: there was no pass.
        measured: per update, the Gram matrix of its inputs, if the method needs it.
        base_norm: ‖W_0‖, if the method uses it and it is known.

    Raises:
        TensorError: a Gram matrix does not fit these updates.

    Example:
        >>> from covmerge.methods import get
        >>> average = get("average")
        >>> a = LowRank(torch.ones(3, 1), torch.ones(1, 2))
        >>> merge_factors(average, [a, a], [1.0, 1.0], {}).delta.dense()[0].round().tolist()
        [1.0, 1.0]
    """
    method.check_data(measured, updates[0].shape, len(updates))
    group, left, right = _reduce(method.sides_for(parameters), updates, weights)
    group = replace(
        group,
        thresholds=None if thresholds is None else tuple(thresholds),
        expert_statistics=tuple(
            replace(gram, value=_turned(gram.value, right)) for gram in measured
        ),
        base_norm=base_norm,
    )
    merged = method(group, **parameters)
    return MergedFactors(left, merged.delta, right, updates[0].dtype, merged.stats)


def ranked_factors(
    method: Method, updates: Sequence[LowRank], weights: Sequence[float], parameters: Parameters
) -> tuple[Tensor, ...]:
    """Return per update the values whose magnitudes the method's global pass ranks, float64."""
    group, _, _ = _reduce(method.sides_for(parameters), updates, weights)
    return method.ranked_values(group, parameters)


def _reduce(
    sides: Sides, updates: Sequence[LowRank], weights: Sequence[float]
) -> tuple[LinearGroup, Basis | None, Basis | None]:
    """Write the updates in a basis on one side or on both; return the small group and the bases.

    Every factor is first scaled near 1 by a power of two, which changes no digit. The bases then do not
    depend on how an update's scale is split between its factors (1e20 and 1e-20, for example).
    """
    d_out, d_in = updates[0].shape
    lefts, outer = _near_one([update.left for update in updates])
    rights, inner = _near_one([update.right.mT for update in updates])
    left = right = None
    if sides == "both":
        left = basis_of([*lefts, lefts[0].new_ones(d_out, 1)])
    elif sides == "outputs":
        left = basis_of(lefts)
    if sides in ("both", "inputs"):
        right = basis_of(rights)
    ones_out, ones_in = lefts[0].new_ones(d_out), rights[0].new_ones(d_in)
    frame = Frame(
        (d_out, d_in),
        ones_out if left is None else left.coordinates(ones_out),
        ones_in if right is None else right.coordinates(ones_in),
    )
    outputs = lefts if left is None else left.blocks[: len(lefts)]
    inputs = rights if right is None else right.blocks
    # The cores are small, and float64 shows their rank.
    factors = tuple(
        LowRank(b.to(torch.float64) * out, a.mT.to(torch.float64) * into)
        for b, a, out, into in zip(outputs, inputs, outer, inner, strict=True)
    )
    cores = tuple(each.dense() for each in factors)
    return LinearGroup(cores, tuple(weights), frame=frame, factors=factors), left, right


def _turned(gram: Tensor, right: Basis | None) -> Tensor:
    """Return a Gram matrix of the layer's inputs in coordinates of a basis."""
    if right is None:
        return gram
    columns, mix = right.columns.to(torch.float64), right.mix
    return mix.mT @ (columns.mT @ (gram.to(torch.float64) @ columns)) @ mix


def _near_one(factors: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
    """Return the factors times powers of two that scale them near 1, and the inverse powers."""
    sizes = [2.0 ** exponent_of([factor]) for factor in factors]
    return [factor / size for factor, size in zip(factors, sizes, strict=True)], sizes


def _expand(basis: Basis | None, coordinates: Tensor) -> Tensor:
    return coordinates if basis is None else basis.expand(coordinates)
