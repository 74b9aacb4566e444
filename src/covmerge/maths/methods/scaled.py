"""Scaling of updates near 1, for methods that promise that Δ → sΔ gives s times the merged update.

Such a method multiplies entries with each other: squares in Gram matrices, cubes in Σ Δ_tC_t. Far from
1 these leave the dtype, although updates and result are well within it. In that case the kernel is run on
updates times a power of two, and its result is divided by it. Neither changes a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from covmerge.base.types import Json, LinearGroup, Merged
from covmerge.maths.linalg.lapack import exponent_of

# Exponents of the largest entry that need no scaling: d³ times its cube is far below float32's 2^127, and
# cubes of entries 2^-20 as large are far above its 2^-149.
_EASY = 20


def run_near_one(
    kernel: Callable[..., Merged],
    group: LinearGroup,
    parameters: Mapping[str, Any],
    lengths: Collection[str] = (),
) -> Merged:
    """Run a scale-equivariant kernel on updates scaled near 1, and scale its result back.

    Thresholds of a global pass are in units that only the method knows; a group with them is not scaled.

    Args:
        kernel: the method's function.
        group: the updates.
        parameters: the method's parameters.
        lengths: names of the diagnostics in units of the updates (`Diagnostics.lengths`).

    Example:
        >>> import torch
        >>> from covmerge.methods import get
        >>> group = LinearGroup((torch.eye(2) * 1e30, torch.eye(2) * 1e30), (1.0, 1.0))
        >>> round(float(run_near_one(get("actmat").kernel, group, {}).delta[0, 0]) / 1e30, 5)
        1.0
    """
    exponent = _exponent(group)
    if abs(exponent) <= _EASY:
        return kernel(group, **parameters)
    # An even power, so that its square root is a power of two as well.
    factor = 2.0 ** -(exponent + exponent % 2)
    near = group.times([factor] * len(group.updates))
    if near.base_norm is not None:  # the kernel compares updates with it
        near = replace(near, base_norm=factor * near.base_norm)
    merged = kernel(near, **parameters)
    diagnostics: dict[str, Json] = {
        name: fact / factor if name in lengths and isinstance(fact, float) else fact
        for name, fact in merged.stats.items()
    }
    return replace(merged, delta=merged.delta / factor, diagnostics=diagnostics)


def _exponent(group: LinearGroup) -> int:
    return 0 if group.thresholds is not None else exponent_of(group.updates)
