"""The papers' equations written out literally, in float64, without regard to speed.

The tests compare every kernel with its reference implementation, and `covmerge verify --deep` compares
merged models with it. So that no fault can be in both, a reference implementation shares only
`covmerge.base.types` with the kernels: no solver, no estimate, no rule for numerical ranks (`rank.py`).

A reference implementation is a function `(group, **parameters) -> Tensor`. It returns the merged update of
a group that is not in a `Frame`, in float64, with the parameters of its method. Names follow the papers.
Steps have their own reference implementations (`steps.py`).
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
