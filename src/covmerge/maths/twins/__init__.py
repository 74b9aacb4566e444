"""The papers' equations typed literally, in float64, without any thought of speed.

Every fast kernel is compared with its twin in the tests, and `covmerge verify --deep` holds merged
models against them. So that no fault can be in both, twins share nothing with the kernels but
`covmerge.base.types`: no solver, no estimate, no rule of where a rank ends (`covmerge.maths.twins.rank`).

A twin is a function `(group, **parameters) -> Tensor`: the merged update of a group that is not in a
`Frame`, in float64, with the parameters of its method. Names follow the papers. Steps have twins of
their own (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from covmerge.maths.twins import closed_form, data, elementwise, spaces, spectral, spheres, weights
from covmerge.maths.twins.steps import STEP_TWINS

Twin = Callable[..., Tensor]

TWINS: Mapping[str, Twin] = {
    **closed_form.TWINS,
    **data.TWINS,
    **elementwise.TWINS,
    **spectral.TWINS,
    **spaces.TWINS,
    **weights.TWINS,
    **spheres.TWINS,
}

__all__ = ["STEP_TWINS", "TWINS", "Twin"]
