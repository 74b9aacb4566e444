"""How far a merge may be from its equation, and whether it is.

The equation is the reference implementation f in float64. A stable algorithm gives f of updates that are
off by rounding, rounded itself (Higham, Accuracy and Stability of Numerical Algorithms, 2002, §1.5), so
that with u the unit roundoff of the dtype that is computed in, x the updates, n the longest of d_out,
d_in and T, and errors that add up as √n (Higham and Mary, SIAM Journal on Scientific Computing 2019)

    ‖f̂(x) − f(x)‖ ≤ 64 √n ( u ‖f(x)‖ + max_δ ‖f(x + δ) − f(x)‖ ),   ‖δ_t‖ ≈ 2u ‖Δ_t‖.

The last term is the condition number times u, and is measured by the reference: at δ drawn at random,
entry by entry in proportion, and for methods on matrices in all entries, where the first term alone does
not do. Base and data are moved as the updates are. Methods on Gram matrices have κ² of that in float32,
and go over to float64 where it is large (docs/numbers.md): `GRAM` is what they then have lost, in shares
of ‖f‖.

At a tie f jumps: 16 δ moves it no further than δ does. Which side is taken there is rounding, and nothing
is held against it but that it is finite; such inputs are counted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, sqrt
from random import Random

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.errors import CovmergeError
from tests.campaigns.layers import Layer, rows_of
from tests.methods.groups import permuted

_C = 64.0
_THREADS = (2, 3, 8)
_DRAWS, _LARGE = 3, 2**16  # a layer of more entries is moved once
# ACE goes over to float64 from a condition number of 1e4 on, where 1.5 eps times it is 1.8e-3.
GRAM = {torch.float32: 2e-3, torch.float64: 1e-7}
OF_GRAMS = frozenset(
    [
        "ace",
        "actmat",
        "auto",
        "auto_measured",
        "wudi",
        "aswudi",
        "swudi",
        "regmean",
        "lot",
        "ssr",
        "esm",
    ]
).union(["step pact"])  # its cut at a singular value of 1e-4 is one at 1e-8 of a Gram matrix
# Their formulas take the arc cosine of a rounded cosine, as mergekit's do: angles near 0 or π are known
# to √u.
SPHERES = frozenset(["slerp", "nuslerp", "multislerp", "karcher"])
OUTCOMES = ("agrees", "by its condition", "refused", "at a tie", "failed")


@dataclass(frozen=True)
class Found:
    """What became of one input; `kind` names a failure."""

    outcome: str
    kind: str = ""
    detail: str = ""


def look(layer: Layer) -> Found:
    """Merge a layer, and compare it with its reference implementation, and with itself elsewhere."""
    try:
        group = layer.group
        merged = layer.merged(group)
    except CovmergeError as error:
        return _refused(layer, error)
    except Exception:
        return Found("failed", "an error that is not covmerge's", traceback.format_exc()[-1500:])
    if not torch.isfinite(merged).all():
        return Found("failed", "NaN or Inf")
    reference = layer.reference(group)
    if not torch.isfinite(reference).all():
        return Found("failed", "the reference implementation gives NaN or Inf")
    bound = _Bound(layer, group, reference)
    outcome, said = bound.holds(merged)
    if outcome == "failed":
        return Found("failed", "off", said)
    for name, other, exact in _others(layer, group):
        again = other()
        if exact and not torch.equal(again, merged):
            off = _norm(again.double() - merged.double())
            return Found("failed", f"other bytes by {name}", f"off by {off:.3g}")
        if not exact:
            fits, said = bound.holds(again)
            if fits == "failed":
                return Found("failed", f"other numbers by {name}", said)
    return Found(outcome, detail=said)


def _refused(layer: Layer, error: CovmergeError) -> Found:
    """A named error is right where the method promises nothing of such sizes."""
    named = f"'{layer.method.name}'" in str(error) or "`eps`" in str(error)
    if not named:
        return Found("failed", "an error that does not name the method", str(error))
    promised = layer.method.scales_with(layer.resolved) and layer.method.laws.scale_equivariant
    if promised and layer.step is None:
        return Found("failed", "refused, though it scales", str(error))
    return Found("refused", detail=str(error))


def _others(layer: Layer, group: LinearGroup) -> list[tuple[str, Callable[[], Tensor], bool]]:
    """The same merge in other circumstances, and whether its bytes are promised to be the same."""
    by_entries = layer.step is None and layer.method.unit_for(layer.resolved) in ("element", "row")
    which = layer.number % 4
    # What sees weights sums over experts as torch does, whose order follows the shape, as mergekit's does.
    by_entries = by_entries and not group.factors and layer.method.sees == "updates"
    if which == 0:
        return [("another run", lambda: layer.merged(group), True)]
    if which == 1:
        return [("threads", lambda: _by_threads(layer, group), by_entries)]
    if which == 2 and layer.method.laws.order_invariant:
        order = list(range(len(group.weights)))[::-1]
        if layer.step is None and not layer.parameters:  # at the defaults it is declared
            return [("order", lambda: layer.merged(permuted(group, order)), False)]
    if which == 3 and by_entries and group.shape[0] > 1 and layer.method.global_pass is None:
        rows, blocks = group.shape[0], 2 + layer.number // 4 % 3
        cuts = sorted(Random(layer.number).sample(range(1, rows), min(blocks, rows) - 1))
        parts = [slice(*ends) for ends in pairwise((0, *cuts, rows))]
        return [
            ("blocks", lambda: torch.cat([layer.merged(rows_of(group, p)) for p in parts]), True)
        ]
    return []


def _by_threads(layer: Layer, group: LinearGroup) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS[layer.number // 4 % len(_THREADS)])
    try:
        return layer.merged(group)
    finally:
        torch.set_num_threads(before)


class _Bound:
    """What is allowed around one reference implementation's answer."""

    def __init__(self, layer: Layer, group: LinearGroup, reference: Tensor) -> None:
        self._layer, self._group, self._reference = layer, group, reference
        eps = max(torch.finfo(own).eps for own in (layer.computed, layer.arithmetic))
        self._u = eps / 2
        self._n = sqrt(max(*group.shape, len(group.weights)))
        # What is rounded is the merged weights, where a method returns these.
        placed = (
            reference + group.base.double()
            if group.models and group.base is not None
            else reference
        )
        self._size = _norm(placed)
        largest = max(map(_norm, group.tensors), default=0.0)
        if self._size <= self._n * self._u * largest:  # experts that cancel leave rounding
            self._size = largest
        self._moved: tuple[float, float] | None = None

    def holds(self, merged: Tensor) -> tuple[str, str]:
        """An outcome, and the distance in words."""
        off, size = _norm(merged.double() - self._reference), self._size
        straight = _C * self._n * self._u * size
        said = f"off by {off:.3g} of {size:.3g}"
        if off <= straight:
            return "agrees", said
        near, far = self._responses()
        said += f"; rounding moves the reference by {near:.3g}, sixteen times that by {far:.3g}"
        allowed = straight + _C * self._n * near
        jumps = far < 4 * near and near > 4 * straight
        if off <= allowed:
            return ("at a tie" if jumps else "by its condition"), said
        if self._layer.subject in OF_GRAMS:
            allowed += GRAM[self._layer.computed] * size
            if off <= allowed:
                return "by its condition", said
        return "failed", f"{said}; allowed {allowed:.3g}"

    def _responses(self) -> tuple[float, float]:
        if self._moved is None:
            self._moved = self._response(2.0), self._response(32.0)
        return self._moved

    def _response(self, times: float) -> float:
        """How far the reference implementation moves when its updates are off by so many times u."""
        whole = self._layer.step is not None or not self._layer.method.takes_any_shape
        moved = [0.0]
        for draw in range(1 if self._reference.numel() > _LARGE else _DRAWS):
            for fill in (False, True) if whole else (False,):
                generator = torch.Generator().manual_seed(draw)
                by = sqrt(self._u) if self._layer.subject in SPHERES else self._u
                there = _moved(self._group, times * by, generator, fill)
                found = self._layer.reference(there)
                moved.append(_norm(found - self._reference))
        finite = [each for each in moved if isfinite(each)]
        return max(finite) if len(finite) == len(moved) else float("inf")


def _moved(group: LinearGroup, by: float, generator: torch.Generator, fill: bool) -> LinearGroup:
    """The group with each of its tensors off by a share of itself, in its dtype, which ends ranks."""

    def off(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        exact = tensor.double()
        if fill and tensor.numel():
            return (exact + by * _norm(exact) / sqrt(tensor.numel()) * noise).to(tensor.dtype)
        return (exact * (1 + by * noise)).to(tensor.dtype)

    base = None if group.base is None else off(group.base)
    measured = tuple(
        replace(own, value=_symmetric(off(own.value))) for own in group.expert_statistics
    )
    return replace(
        group,
        updates=tuple(map(off, group.updates)),
        models=tuple(map(off, group.models)),
        base=base,
        expert_statistics=measured,
        factors=tuple(type(one)(off(one.left), off(one.right)) for one in group.factors),
    )


def _symmetric(value: Tensor) -> Tensor:
    return (value + value.T) / 2 if value.dim() == 2 and len(value) == value.shape[1] else value


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
