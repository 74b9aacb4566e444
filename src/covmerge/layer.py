"""One layer at a time, for those who hold the updates in their hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from covmerge.errors import RecipeError, TensorError
from covmerge.linalg.finite import all_finite
from covmerge.linalg.lapack import norm
from covmerge.linalg.random import Stream
from covmerge.methods import Method, registry
from covmerge.methods.factored import merge_factors
from covmerge.types import LinearGroup, LowRank, Measured


@overload
def merge_layer(
    updates: Sequence[Tensor],
    method: str = "ace",
    *,
    weights: Sequence[float] | None = None,
    data: Sequence[Tensor] | None = None,
    **params: Any,
) -> Tensor: ...
@overload
def merge_layer(
    updates: Sequence[Tensor | LowRank],
    method: str = "ace",
    *,
    weights: Sequence[float] | None = None,
    data: Sequence[Tensor] | None = None,
    **params: Any,
) -> Tensor | LowRank: ...
def merge_layer(
    updates: Sequence[Tensor | LowRank],
    method: str = "ace",
    *,
    weights: Sequence[float] | None = None,
    data: Sequence[Tensor] | None = None,
    **params: Any,
) -> Tensor | LowRank:
    """Merge the task vectors of one layer and return the merged update.

    Args:
        updates: Δ_t = W_t − W_0, each `(d_out, d_in)`, of one dtype and device; half precision is
            computed in float32. Adapters may be given by their factors.
        method: a registered name.
        weights: one positive number per update; 1 is neutral.
        data: for methods that need it, per update the mean input Gram matrix `(d_in, d_in)`, or the
            diagonal Fisher information in the update's shape.
        **params: the method's parameters.

    Returns:
        W̄ − W_0 `(d_out, d_in)` in the dtype and on the device of the updates. By its factors, of
        rank at most Σr + 1, where all updates are and the method is exact on them.

    Raises:
        TensorError: no updates, shapes or dtypes that differ, NaN or Inf.
        RecipeError: unknown method or parameter.

    Departs from the paper: nowhere by itself; see the method.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> torch.allclose(merge_layer([d, d], method="actmat"), d)
        True
        >>> adapter = LowRank(left=torch.ones(4, 1), right=torch.ones(1, 3))
        >>> merge_layer([adapter, adapter], method="actmat").dense().round()[0].tolist()
        [1.0, 1.0, 1.0]
    """
    chosen = registry.get(method)
    parameters = chosen.resolve(params)
    _check(chosen, updates)
    shares = [1.0] * len(updates) if weights is None else list(weights)
    if len(shares) != len(updates) or not all(weight > 0 for weight in shares):
        raise RecipeError(
            f"weights {shares} for {len(updates)} updates: pass one positive number each"
        )
    stored = updates[0].dtype
    dtype = torch.promote_types(stored, torch.float32)
    if all(isinstance(u, LowRank) for u in updates) and chosen.factored_for(parameters):
        factors = [update.to(dtype) for update in cast("Sequence[LowRank]", updates)]
        return merge_factors(chosen, factors, shares, parameters).delta.to(stored)
    dense = tuple(u.to(dtype).dense() if isinstance(u, LowRank) else u.to(dtype) for u in updates)
    group = LinearGroup(
        dense,
        tuple(shares),
        streams=tuple(Stream(f"update {index}") for index in range(len(updates))),
        measured=tuple(
            Measured(value.to(dense[0].device, dtype), rows=0, total=norm(value))
            for value in data or ()
        ),
    )
    return chosen(group, **parameters).delta.to(stored)


def _check(method: Method, updates: Sequence[Tensor | LowRank]) -> None:
    """Refuse what cannot be merged, with the index of the update."""
    if not updates:
        raise TensorError("merge_layer: the list of updates is empty; pass at least one")
    first = updates[0]
    for index, update in enumerate(updates):
        if (update.shape, update.dtype, update.device) != (first.shape, first.dtype, first.device):
            raise TensorError(
                f"update {index} is {list(update.shape)} {update.dtype} on {update.device}, update 0 "
                f"is {list(first.shape)} {first.dtype} on {first.device}: bring them to one shape, "
                "dtype and device"
            )
        if not update.dtype.is_floating_point:
            raise TensorError(f"update {index} is {update.dtype}: pass floating-point differences")
        parts = (update.left, update.right) if isinstance(update, LowRank) else (update,)
        if not all(map(all_finite, parts)):
            raise TensorError(
                f"update {index} holds NaN or Inf: check the checkpoint it comes from"
            )
    if not method.takes_any_shape and len(first.shape) != 2:
        raise TensorError(
            f"method '{method.name}' merges matrices (d_out, d_in), the updates are "
            f"{list(first.shape)}; merge other tensors by `average`"
        )
