"""Priors: terms that join the sum of covariances before it is inverted."""

from __future__ import annotations

from torch import Tensor

from covmerge.maths.covariance.normal import NormalEquations


def collective_prior(
    normal: NormalEquations, d_in: int, *, energy: float = 1.0, ones: Tensor | None = None
) -> Tensor:
    r"""Return cᵀ of the collective structural prior C_agg = 𝟏cᵀ (ACE, Eqs. 11–13).

    cᵀ = (1/d_in) 𝟏ᵀ Σ_t Σ̃_t / energy, in the coordinates of `normal`; the ridge is not part of it.

    Args:
        normal: the sums, without prior.
        d_in: input dimension of the layer.
        ones: 𝟏 in the coordinates of the layer's inputs, where it is not literally that.
        energy: τ̄ = mean ‖Δ_t‖²_F where the experts were trace-normalised (Eq. 12), else 1.
    """
    return normal.row_sums(ones) / (d_in * energy)
