"""The papers' equations typed literally, in float64, without any thought of speed.

The tests compare every kernel with its reference implementation, and `covmerge verify --deep` compares
merged models with it. So that no fault can be in both, a reference implementation shares nothing with the
kernels but `covmerge.base.types`: no solver, no estimate, no rule of where a rank ends (`rank.py`).

It is a function `(group, **parameters) -> Tensor`: the merged update of a group that is not in a `Frame`,
in float64, with the parameters of its method. Names follow the papers. Steps have their own (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from covmerge.maths.reference import (
    closed_form,
    data,
    elementwise,
    spaces,
    spectral,
    spheres,
    weights,
)
from covmerge.maths.reference.steps import STEP_REFERENCES

ReferenceFunction = Callable[..., Tensor]

REFERENCES: Mapping[str, ReferenceFunction] = {
    **closed_form.REFERENCES,
    **data.REFERENCES,
    **elementwise.REFERENCES,
    **spectral.REFERENCES,
    **spaces.REFERENCES,
    **weights.REFERENCES,
    **spheres.REFERENCES,
}

__all__ = ["REFERENCES", "STEP_REFERENCES", "ReferenceFunction"]
