"""`merge_layer`: merge the updates of one layer, given as tensors."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from covmerge.base.errors import RecipeError, TensorError
from covmerge.base.settings import UNNAMED, choose
from covmerge.base.types import Json, LinearGroup, LowRank, Measured, Rounding
from covmerge.maths.linalg.lapack import exponent_of, norm
from covmerge.maths.linalg.random import Stream
from covmerge.maths.linalg.spectral import rank_tolerance, singular_values
from covmerge.maths.linalg.stored import all_finite, stored_as
from covmerge.maths.measures.retention import times_as_long
from covmerge.maths.measures.rounding import has_few_digits, rounding_of
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.methods.registry import Kernel
from covmerge.maths.steps import Steps, with_steps
from covmerge.maths.steps.compose import steps_around

_Update = TypeVar("_Update", bound=Tensor | LowRank)


def merge_layer(
    updates: Sequence[_Update],
    method: str | Kernel = "",
    *,
    weights: Sequence[float] | None = None,
    data: Sequence[Tensor] | None = None,
    base: Tensor | None = None,
    stored: torch.dtype | None = None,
    before: Steps = (),
    after: Steps = (),
    **params: Any,
) -> Tensor | _Update:
    """Merge the task vectors of one layer and return the merged update.

    Args:
        updates: Δ_t = W_t − W_0, each `(d_out, d_in)`, of one dtype and device; half precision is
            computed in float32. Adapters may be given as their factors.
        method: a registered name, or a function or class as in `merge`. By default it is `average` of one
            expert alone, which is added to its base, and `auto` of several.
        weights: one positive number per update; 1 is neutral. The weight of a single update scales the
            result.
        data: for methods that need it, per update the mean input Gram matrix `(d_in, d_in)`, or the
            diagonal Fisher information in the update's shape.
        base: W_0 `(d_out, d_in)`, for methods and steps that need it or its norm, and for use with
            `stored`.
        stored: the dtype that the weights W_0 + Δ_t were rounded to if `base` is W_0, and else the dtype
            that the Δ_t were rounded to; by default the dtype of the updates. Directions of an update that
            are no larger than this rounding are ignored.
        before: steps before the method, in order: names, or `{name: {parameters}}`.
        after: steps after the method, in order.
        **params: the method's parameters.

    Returns:
        W̄ − W_0 `(d_out, d_in)` in the dtype and on the device of the updates. It is returned as factors,
        of rank at most Σr + 1, if all updates are factors and the method is exact on them.

    A `UserWarning` is given if the merged update is longer than all updates together, which no mean and
    no sum of them is, and if updates in float64 have smallest directions that look like rounding of a
    narrower dtype while `stored` is left out.

    Random numbers of methods with a `seed` depend on an update's content, not on its place in the list.

    Raises:
        TensorError: no updates; differing shapes or dtypes; NaN or Inf; or the result is not finite, or
            not finite in the dtype of the updates.
        RecipeError: unknown method or parameter, or weights that are not positive and finite.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> torch.allclose(merge_layer([d, d], method="actmat"), d)
        True
        >>> adapter = LowRank(left=torch.ones(4, 1), right=torch.ones(1, 3))
        >>> merge_layer([adapter, adapter], method="actmat").dense().round()[0].tolist()
        [1.0, 1.0, 1.0]
    """
    method = registry.name_of(method)
    _check_given(updates)
    if method == UNNAMED:
        method, _ = choose(len(updates))
    chosen = with_steps(registry.get(method), *steps_around(before, after))
    parameters = registry.get(method).resolve(params)
    names = [f"update {place}" for place in range(len(updates))]
    parameters = registry.get(method).for_experts(parameters, names)
    _check(chosen, updates, data or (), base, stored)
    shares = [1.0] * len(updates) if weights is None else list(weights)
    if len(shares) != len(updates) or not all(0 < weight < inf for weight in shares):
        raise RecipeError(
            f"weights {shares} for {len(updates)} updates: pass one positive, finite number each"
        )
    if 0 in updates[0].shape:  # there is nothing to merge
        return updates[0]
    # The weight of a single update scales the result.
    scale = shares[0] if len(shares) == 1 else 1.0
    shares = [1.0] if len(shares) == 1 else shares
    given = updates[0].dtype
    dtype = torch.promote_types(given, torch.float32)
    adapters = all(isinstance(update, LowRank) for update in updates)
    factors = [u.to(dtype) for u in cast("Sequence[LowRank]", updates)] if adapters else []
    if factors and chosen.factored_for(parameters):
        measured = _measured(data or (), factors[0].left)
        found = merge_factors(
            chosen,
            factors,
            shares,
            parameters,
            measured=measured,
            base_norm=_size(chosen, base),
        )
        delta = found.times(scale).delta
        norms = [sqrt(update.square_norm()) for update in factors]
        _say_if_long(chosen, found.stats, sqrt(delta.square_norm()), norms)
        # All updates are factors.
        return cast("_Update", LowRank(*_stored(_parts(delta), given)))
    dense = tuple(_dense(index, update.to(dtype)) for index, update in enumerate(updates))
    start = None if base is None else base.to(dense[0].device, dtype)
    models = () if start is None or chosen.sees == "updates" else [start + u for u in dense]
    group = LinearGroup(
        () if models else dense,
        tuple(shares),
        models=tuple(models),
        streams=_streams(dense, shares) if chosen.seeded else (),
        rounding=_rounding(chosen, dense, given, stored, start),
        expert_statistics=_measured(data or (), dense[0]),
        factors=tuple(factors),
        base=start if chosen.needs_base else None,
        base_norm=_size(chosen, base),
    )
    merged = chosen(group, **parameters).times(scale, group.base)
    norms = [norm(update) for update in dense]
    _say_if_long(chosen, merged.stats, norm(merged.delta), norms)
    return _stored((merged.delta,), given)[0]


def _rounding(
    method: Method,
    updates: Sequence[Tensor],
    given: torch.dtype,
    stored: torch.dtype | None,
    base: Tensor | None,
) -> tuple[Rounding, ...]:
    """Return the rounding of each update: by `stored`, or by the dtype that the updates were given in."""
    if stored is not None:
        return rounding_of(updates, [stored] * len(updates), base)
    if given != updates[0].dtype:
        return rounding_of(updates, [given] * len(updates))
    if given == torch.float64 and not method.takes_any_shape:
        _say_if_rounded(updates)
    return ()


def _say_if_rounded(updates: Sequence[Tensor]) -> None:
    """Warn of the first float64 update whose entries have the digits of a narrower dtype."""
    index = next((t for t, update in enumerate(updates) if has_few_digits(update)), None)
    if index is None:
        return
    sigma = singular_values(updates[index])
    shape = updates[index].shape
    in64, in32 = (
        int((sigma > rank_tolerance(shape, dtype, None) * sigma.max()).sum())
        for dtype in (torch.float64, torch.float32)
    )
    if in64 > in32:
        warnings.warn(
            f"update {index} is float64 and its entries have the digits of a narrower dtype: {in64 - in32} "
            f"of its {in64} directions look like rounding of float32, and are merged as its own. Pass "
            "stored=torch.float32 if the update was rounded to it, and base= too if the weights were; "
            "or stored=torch.float64 if it is exact",
            stacklevel=4,
        )


def _size(method: Method, base: Tensor | None) -> float | None:
    return None if base is None or not method.base_norm else norm(base.cpu().double())


def _measured(data: Sequence[Tensor], like: Tensor) -> tuple[Measured, ...]:
    return tuple(Measured(value.to(like), rows=0, total=norm(value)) for value in data)


def _say_if_long(
    method: Method, diagnostics: Mapping[str, Json], merged: float, experts: Sequence[float]
) -> None:
    times = times_as_long(merged, experts)
    if times == 1.0:
        return
    in_outputs = method.diagnostics.from_json(diagnostics).length_in_outputs
    if in_outputs is None or in_outputs > 1.0:
        warnings.warn(
            f"{method.name}: the merged update is {times:.3g} times as long as the experts' together; take "
            "a smaller scale where the method has one, or another method",
            stacklevel=3,
        )


def _stored(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the merged update, or its factors, in the dtype of the updates."""
    try:
        return [stored_as(part, dtype) for part in parts]
    except OverflowError as error:
        raise TensorError(
            f"the merged update is finite in {parts[0].dtype} and overflows {dtype}, the dtype of the "
            f"updates ({error}): pass them in a wider one, as update.float() or update.double()"
        ) from error


def _dense(index: int, update: Tensor | LowRank) -> Tensor:
    if isinstance(update, Tensor):
        return update
    product = update.dense()
    if not all_finite(product):
        raise TensorError(
            f"update {index}: left · right overflows {product.dtype}, and this method needs the "
            "product; pass the factors in float64, or divided by what the result is multiplied by"
        )
    return product


def _streams(updates: Sequence[Tensor], weights: Sequence[float]) -> tuple[Stream, ...]:
    """Return streams that depend on an update's content only, not on its place, dtype or power of two.

    Equal updates are distinguished by their weights, and then by a count.
    """
    digests: list[str] = []
    for update in updates:
        near_one = (update * 2.0 ** -exponent_of([update])).float() + 0.0  # −0 is 0
        content = near_one.contiguous().cpu().numpy().tobytes()
        digests.append(hashlib.blake2b(content, digest_size=16).hexdigest())
    order = sorted(range(len(updates)), key=lambda t: (digests[t], weights[t]))
    streams: dict[int, Stream] = {}
    for place, t in enumerate(order):
        copies = sum(digests[other] == digests[t] for other in order[:place])
        streams[t] = Stream(f"update {digests[t]}, copy {copies}")
    return tuple(streams[t] for t in range(len(updates)))


def _parts(update: Tensor | LowRank) -> tuple[Tensor, ...]:
    return (update.left, update.right) if isinstance(update, LowRank) else (update,)


def _check_given(updates: object) -> None:
    """Raise an error unless the updates are a list of tensors or factors; not every caller checks types."""
    if isinstance(updates, Tensor | LowRank | str) or not isinstance(updates, Sequence):
        raise TensorError(
            f"merge_layer: the updates are a {type(updates).__name__}: pass a list, one tensor an expert"
        )
    for index, update in enumerate(cast("Sequence[object]", updates)):
        if not isinstance(update, Tensor | LowRank):
            raise TensorError(
                f"update {index} is a {type(update).__name__}: pass a tensor, as torch.as_tensor gives it"
            )


def _check(
    method: Method,
    updates: Sequence[Tensor | LowRank],
    data: Sequence[Tensor],
    base: Tensor | None,
    stored: torch.dtype | None,
) -> None:
    """Raise an error with the index of the update if the arguments cannot be merged."""
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
        if not all(map(all_finite, _parts(update))):
            raise TensorError(
                f"update {index} holds NaN or Inf: pass the difference of finite weights"
            )
    for index, value in enumerate(data):
        if not all_finite(value):
            raise TensorError(f"data {index} holds NaN or Inf: collect it again")
    if method.needs_base and base is None:
        raise TensorError(f"method '{method.name}' needs the base's weights: pass them as `base=`")
    if stored is not None and not stored.is_floating_point:
        raise TensorError(f"stored={stored}: pass a floating-point dtype, as torch.float32")
    if stored is not None and any(isinstance(update, LowRank) for update in updates):
        raise TensorError(
            f"stored={stored}, and updates are given by their factors, which are taken as they are: leave "
            "out `stored=`, or pass the updates multiplied out, as update.dense()"
        )
    if base is not None and not (method.needs_base or method.base_norm or stored):
        raise TensorError(f"method '{method.name}' does not look at the base: leave out `base=`")
    if base is not None and (base.shape != first.shape or not all_finite(base)):
        raise TensorError(
            f"the base is {list(base.shape)}, the updates are {list(first.shape)}: pass finite weights "
            "of their shape"
        )
    if not method.takes_any_shape and len(first.shape) != 2:
        raise TensorError(
            f"method '{method.name}' merges matrices (d_out, d_in), the updates are "
            f"{list(first.shape)}; merge other tensors by `average`"
        )
