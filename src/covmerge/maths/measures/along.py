r"""What a merged update keeps of an expert along the expert's own update, predicted from weights alone.

Of W̄ − W_0 only what lies in the direction of Δ_t counts:

    1 − (1 − ⟨W̄ − W_0, Δ_t⟩ / ‖Δ_t‖²)²

1: the update is there at its full length. 0: nothing of it is, or twice as much. What the others put
beside it does not count: there are d_out · d_in directions, and a network bears more in others than
its own than an update that came short. `retention` counts it, on the inputs that the update reveals.
How far either agrees with accuracy is measured by `covmerge study retention`.
"""

from __future__ import annotations


def along(share: float) -> float:
    """Return what is kept, at most 1.

    Args:
        share: ⟨W̄ − W_0, Δ_t⟩ / ‖Δ_t‖².

    Departs from the paper: it has none; how it was found is in docs/auto-log.md, experiment 13.

    Example:
        >>> along(1.0), along(0.5), along(0.0), along(2.0)
        (1.0, 0.75, 0.0, 0.0)
    """
    return 1.0 - (1.0 - share) ** 2
