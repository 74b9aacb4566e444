"""Where the numerical rank of a layer's updates ends: by the dtype of the computation and of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from covmerge.linalg.spectral import rank_tolerance
from covmerge.types import LinearGroup


@dataclass(frozen=True)
class Resolution:
    """What can be told from rounding: a share of σ₁, and a singular value per expert.

    Attributes:
        rtol: of the computation: √max(d_out, d_in) · eps of its dtype.
        floors: of the stored weights (`LinearGroup.floors`).
    """

    rtol: float
    floors: tuple[float, ...]

    def of_sum(self, weights: Sequence[float]) -> float:
        """The floor of Σ w_tΔ_t: rounding errors of two experts are independent."""
        return hypot(*(w * floor for w, floor in zip(weights, self.floors, strict=True)))


def resolution(group: LinearGroup, rank_rtol: float | None) -> Resolution:
    """Return a group's resolution; a tolerance that the user gives takes the place of all of it.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.eye(4),), (1.0,), floors=(0.1,))
        >>> resolution(group, None), resolution(group, 0.5).floors
        (Resolution(rtol=2.384185791015625e-07, floors=(0.1,)), (0.0,))
    """
    rtol = rank_tolerance(group.shape, group.updates[0].dtype, rank_rtol)
    unknown = rank_rtol is not None or not group.floors
    return Resolution(rtol, (0.0,) * len(group.updates) if unknown else group.floors)
