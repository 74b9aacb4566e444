"""Estimates of one expert's layer-input covariance, from its update alone.

Fine-tuning gradients are outer products e zᵀ of an output error and a layer input, so the Gram
matrix of the accumulated update Δ_t is a proxy for E[z zᵀ]: ACE-Merging Theorem 1 and Eq. 6,
ACTMat Theorem 3.1. Every estimate here has the form

    C_t = scale · RᵀR + ridge · I        R = Δ_t − 𝟏μᵀ  or  R = Δ_t

and is stored as its root R, never as a (d_in, d_in) matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from statistics import fmean, variance
from typing import Literal

import torch
from torch import Tensor

from covmerge.base.types import Frame
from covmerge.maths.linalg.lapack import norm

# As in the published code: an update of norm below 1e-6 is not scaled up to the weight of the others.
TRACE_FLOOR = 1e-12
_NOT_ROUNDING = 0.1


@dataclass(frozen=True)
class Covariance:
    """C = scale · RᵀR + ridge · I, `(d_in, d_in)`."""

    update: Tensor  # Δ `(d_out, d_in)`
    # μ `(d_in,)`, which is subtracted from every row of Δ to give the root R; None for R = Δ
    mean: Tensor | None = None
    ones: Tensor | None = None  # 𝟏 `(d_out,)` in the coordinates of Δ; None: 𝟏 is a vector of ones
    scale: float = 1.0  # factor of the Gram matrix RᵀR
    ridge: float = 0.0  # multiple of the identity
    exact: bool = False  # whether the root is computed in float64, whatever the update's dtype

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the root."""
        return torch.float64 if self.exact else self.update.dtype

    def root(self) -> Tensor:
        """Return R `(d_out, d_in)`, computed on demand so that only one copy of all experts is held."""
        update = self.update.to(self.dtype)
        if self.mean is None:
            return update
        if self.ones is None:
            return update - self.mean
        return torch.addr(update, self.ones.to(self.dtype), self.mean.to(self.dtype), alpha=-1.0)

    def energy(self) -> float:
        """Return Tr RᵀR = ‖R‖²_F."""
        whole = norm(self.update) ** 2
        if self.mean is None:
            return whole
        rows = len(self.update) if self.ones is None else norm(self.ones) ** 2
        rest = whole - rows * norm(self.mean) ** 2
        # A difference as small as its rounding error tells nothing.
        return rest if rest > _NOT_ROUNDING * whole else norm(self.root()) ** 2

    def times(self, factor: float) -> Covariance:
        """Return factor · C."""
        return replace(self, scale=self.scale * factor, ridge=self.ridge * factor)


def centered_gram(update: Tensor, *, eps: float = 0.0, frame: Frame | None = None) -> Covariance:
    """Return C_t = (Δ_t − 𝟏μ_tᵀ)ᵀ(Δ_t − 𝟏μ_tᵀ) + εI, μ_t the column means (ACE, Eqs. 5, 6 and 10)."""
    if frame is None:
        return Covariance(update, mean=update.mean(0), ridge=eps)
    mean = (frame.ones_out @ update) / frame.shape[0]
    return Covariance(update, mean=mean, ones=frame.ones_out, ridge=eps)


# The heterogeneity statistic γ, which decides whether all experts are scaled alike.

# Norms of float32 updates are known to about 1e-7 of their size.
_ROUNDING = 1e-6

Statistic = Literal["paper", "scale_free"]
# Thresholds per statistic: the paper's τ, and a spread of about e^±½ between update norms.
DEFAULT_TAU: dict[Statistic, float] = {"paper": 0.3, "scale_free": 1.0}


@dataclass(frozen=True)
class Gate:
    """Outcome of the gate: the statistic γ, its threshold τ, and whether γ > τ."""

    gamma: float
    tau: float
    fired: bool


def heterogeneity(norms: Sequence[float], statistic: Statistic = "paper") -> float:
    r"""Return γ over the experts' update norms ‖Δ_t‖_F, all positive.

    paper:       γ = Var_t[log‖Δ_t‖²] / (E_t[log‖Δ_t‖²])²     (ACE, Eq. 7; unbiased variance)
    scale_free:  γ = Var_t[log‖Δ_t‖²]

    The paper's γ changes when all updates are scaled together, and diverges for norms near 1,
    where the denominator vanishes; the scale-free γ does neither. For one expert, or norms that agree
    to rounding, γ = 0: for norms of 1 the paper's quotient would be a ratio of rounding errors.

    Example:
        >>> round(heterogeneity([0.2, 0.19, 0.21]), 4), round(heterogeneity([1.0, 0.95, 1.05]), 1)
        (0.001, 3597.7)
    """
    if len(norms) < 2 or max(norms) - min(norms) <= _ROUNDING * max(norms):
        return 0.0
    logs = [2.0 * log(norm) for norm in norms]
    spread = variance(logs)
    if statistic == "scale_free":
        return spread
    mean = fmean(logs)
    return spread / mean**2 if mean else inf


def gate(norms: Sequence[float], *, tau: float | None, statistic: Statistic = "paper") -> Gate:
    """Compare γ with τ. If `tau` is None, the statistic's default is used (0.3 for the paper's γ)."""
    threshold = DEFAULT_TAU[statistic] if tau is None else tau
    gamma = heterogeneity(norms, statistic)
    return Gate(gamma, threshold, gamma > threshold)
