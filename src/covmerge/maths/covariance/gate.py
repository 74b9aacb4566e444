"""The heterogeneity statistic γ that decides whether experts are put on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import fmean, variance
from typing import Literal

# Norms of float32 updates are known to about 1e-7.
_ROUNDING = 1e-6

Statistic = Literal["paper", "scale_free"]
# Thresholds per statistic: the paper's τ, and a spread of about e^±½ between update norms.
DEFAULT_TAU: dict[Statistic, float] = {"paper": 0.3, "scale_free": 1.0}


@dataclass(frozen=True)
class Gate:
    """Outcome of the gate: the statistic, its threshold and whether it fired."""

    gamma: float
    tau: float
    fired: bool


def heterogeneity(norms: Sequence[float], statistic: Statistic = "paper") -> float:
    r"""Return γ over the experts' update norms ‖Δ_t‖_F, all positive.

    paper:       γ = Var_t[log‖Δ_t‖²] / (E_t[log‖Δ_t‖²])²     (ACE, Eq. 7; unbiased variance)
    scale_free:  γ = Var_t[log‖Δ_t‖²]

    The paper's γ changes when all updates are scaled together, and diverges for norms near 1,
    where the denominator vanishes; the scale-free one does neither. One expert, or norms that agree
    to rounding: γ = 0 (the paper's quotient would be one of rounding errors for norms of 1).

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
    """Compare γ with τ; None is the statistic's own default (0.3 in the paper)."""
    threshold = DEFAULT_TAU[statistic] if tau is None else tau
    gamma = heterogeneity(norms, statistic)
    return Gate(gamma, threshold, gamma > threshold)
