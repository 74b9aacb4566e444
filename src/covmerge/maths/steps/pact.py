"""PACT: updates are kept out of the base's directions that other experts rely on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank, Rounding
from covmerge.maths.linalg.auto import FLOAT64, Cost, eigh_cost, svd_cost
from covmerge.maths.linalg.lapack import eigh, norm, qr
from covmerge.maths.linalg.spectral import EXACT, RankRule, leading_svd
from covmerge.maths.linalg.symmetric import gram
from covmerge.maths.methods.registry import EQUIVARIANT, Reference
from covmerge.maths.methods.resolution import resolution
from covmerge.maths.steps.registry import register_step

# The part of the base's unit directions outside an expert's singular vectors is off by rounding; below this
# size it counts as zero.
_ROUNDED = 1e-4
# The norm, in units of the rank's tolerance, below which a projection's result is only rounding.
_NOTHING_LEFT = 4.0


def _cost(
    d_out: int, d_in: int, count: int, itemsize: int, *, core: float = 0.8, own: int = 10
) -> Cost:
    side = min(d_out, d_in)
    each = svd_cost(d_out, d_in, side, itemsize)
    n = max(1, int(core * side)) + count * min(own, side)  # directions, dependent ones too
    m = min(d_in, n)
    solve = eigh_cost(m)
    frame = FLOAT64 * 4.0 * d_in * n * m
    products = FLOAT64 * 4.0 * m * m * side + 2.0 * m * d_in * m + 4.0 * d_out * d_in * m
    held = (3 * d_in * n + m * n + (count + 4) * m * m) * 8
    return each.times(count + 1) + solve.times(count) + Cost(frame + count * products, held)


@register_step(
    "pact",
    when="before",
    equation="Δ_t ← Δ_t (I − P_t),  P_t onto span{(I − V_sV_sᵀ) V₀ : s ≠ t},  "
    "V₀, V_s: leading right singular vectors of W₀, Δ_s",
    reference=Reference(
        title="PACT: Preserving Anchored Cores in Task-vectors for Model Merging",
        venue="arXiv 2026",
        arxiv="2606.18627",
        equations="as in the code under its name (`pact_utils.py`; `own: 0` as `sift_utils.py`)",
    ),
    laws=EQUIVARIANT,
    cost=_cost,
    needs_base=True,
)
def pact(
    group: LinearGroup,
    *,
    core: Annotated[
        float,
        Field(gt=0.0, le=1.0, description="share of min(d_out, d_in) that V₀ has as directions"),
    ] = 0.8,
    own: Annotated[
        int, Field(ge=0, description="k, directions of V_s; 0: all of V₀ is protected")
    ] = 10,
) -> LinearGroup:
    """Take from every update the changes along inputs for which other experts need the base.

    Expert s needs W₀'s leading right singular directions V₀ of the base, except those that its own update
    V_s rewrites. These directions are projected out of the other experts' updates. With `own: 0` they are
    V₀ for all: the code's static form (SIFT), for two experts or more. A single expert stays as it is.

    With three experts or more, P_t comes to hold V₀ and nearly all V_s. At the defaults, a square or tall
    layer with many inputs (far more than `own`) then keeps a fifth of its updates or less. It keeps
    nothing if V₀ and the V_s together have more directions than there are inputs (768 x 768: from 16
    experts on), and stays as in the base. Take a smaller `core`, or follow the method by `rescale`.

    Args:
        group: updates `(d_out, d_in)` and the base's weights; the experts' weights have no effect.
        core: K / min(d_out, d_in); K is rounded down.

    Departs from the paper: P_t holds only directions whose singular value is above 1e-4. (The published
    QR makes an orthonormal column of every column, an arbitrary one if columns are dependent: at its
    defaults, from three experts on, only rounding is left of square and tall layers, 1e-6 of the
    updates.) V_s ends at the update's numerical rank: an expert that did not change the layer relies on
    all of V₀. Directions whose singular value equals the last are kept.

    Example:
        >>> base = torch.diag(torch.tensor([3.0, 1.0]))
        >>> group = LinearGroup((torch.ones(2, 2), torch.ones(2, 2)), (1.0, 1.0), base=base)
        >>> pact(group, core=0.5, own=0).updates[0].tolist()
        [[0.0, 1.0], [0.0, 1.0]]
    """
    if len(group.updates) < 2:
        return group
    rtol = resolution(group, None).rtol
    made: list[Tensor] = []
    factors: list[LowRank] = []
    rounding: list[Rounding] = []
    for t, basis in enumerate(_protected(group, core, own)):
        update = group.updates[t]
        remaining = _off(update, basis)
        filled = basis.shape[1] == basis.shape[0]
        nothing = filled or norm(remaining) <= _NOTHING_LEFT * rtol * norm(update)
        made.append(torch.zeros_like(update) if nothing else remaining)
        if group.factors:
            adapter = group.factors[t]
            right = _off(adapter.right, basis)
            factors.append(adapter.zero() if nothing else replace(adapter, right=right))
        if group.rounding:
            rounding.append(
                _within(group.rounding[t], update.shape, basis.shape[0] - basis.shape[1])
            )
    return replace(group, updates=tuple(made), factors=tuple(factors), rounding=tuple(rounding))


def _off(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the rows without their part in the span of a basis."""
    return rows - (rows @ basis) @ basis.mT


def _within(error: Rounding, shape: Sequence[int], inputs: int) -> Rounding:
    """Return the part of the rounding of a `(d_out, d_in)` matrix along `inputs` orthonormal inputs."""
    d_out, d_in = shape
    share = inputs / d_in
    return replace(
        error,
        edge=error.edge * (sqrt(d_out) + sqrt(inputs)) / (sqrt(d_out) + sqrt(d_in)),
        energy=share * error.energy,
        before=share * error.before,
    )


def _protected(group: LinearGroup, core: float, own: int) -> Iterator[Tensor]:
    """Yield for each expert a basis `(d_in, p)` of the directions that the others rely on.

    They lie in the span of V₀ and the V_s, and are computed in an orthonormal basis of that span.
    """
    assert group.base is not None
    known = resolution(group, None)
    k = max(1, int(core * min(group.shape)))
    parts = [leading_svd(group.base, k, RankRule(known.rtol)).right]
    for update, error in zip(group.updates, known.rounding, strict=True):
        # An update that is no larger than its file's rounding still counts as the expert's change.
        error = error if error.edge < norm(update) else EXACT
        parts.append(leading_svd(update, own, RankRule(known.rtol, error)).right)
    frame, coordinates = qr(torch.cat(parts).to(torch.float64).mT)
    anchored, *rewritten = torch.split(coordinates, [len(part) for part in parts], dim=1)
    relied = [gram((anchored - v @ (v.mT @ anchored)).mT) for v in rewritten]
    for t in range(len(relied)):
        others = sum((relied[s] for s in range(len(relied)) if s != t), torch.zeros_like(relied[t]))
        values, vectors = eigh(others)
        basis = vectors[:, values > _ROUNDED**2]
        yield (frame @ basis).to(group.updates[t].dtype)
