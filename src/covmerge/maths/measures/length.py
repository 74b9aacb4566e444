"""Whether a merged update is longer than all that it was merged from."""

from __future__ import annotations

from collections.abc import Iterable

_ROUNDING = 1e-3  # of norms that were rounded with the weights


def times_as_long(merged: float, experts: Iterable[float]) -> float:
    """Return ‖W̄ − W_0‖ over Σ ‖Δ_t‖ where it is above 1 by more than rounding, and else 1.

    Means and sums of updates never are: whatever is has blown something up.

    Example:
        >>> times_as_long(3.0, [1.0, 0.5]), times_as_long(1.0, [1.0, 0.5])
        (2.0, 1.0)
    """
    together = sum(experts)
    return merged / together if merged > (1.0 + _ROUNDING) * together > 0.0 else 1.0
