"""Sparsify updates, elect signs, and add: settings of it are TIES, DARE, DELLA and Breadcrumbs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.random import mersenne_twister
from covmerge.maths.methods.arithmetic import (
    ArithmeticParameter,
    Weight,
    each,
    inputs_of,
    weights_of,
    wide,
)
from covmerge.maths.methods.registry import (
    EQUIVARIANT,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    Reference,
    TensorPass,
    Unit,
    register,
)
from covmerge.maths.methods.sparsify import KeptEntries, Numbers, Rows, Sparsify, keep
from covmerge.maths.registry import PerExpert

_NO_SHARE = 1e-8  # a smaller sum of weights is not divided by

Share = Annotated[float, Field(ge=0)]


def _unit(parameters: Parameters) -> Unit:
    """Return the unit: the entries that S keeps of a tensor depend on the whole tensor."""
    return "element" if parameters["sparsify"] == "none" else "tensor"


def _kept_entries(groups: Groups, shape: Sequence[int], parameters: Parameters) -> KeptEntries:
    """Return the entries that S keeps of one expert's tensor."""
    one = {name: _only(parameters[name]) for name in ("density", "gamma", "epsilon", "drawn")}
    seed: int = parameters["seed"]

    def blocks() -> Iterator[Rows]:
        in_order = _in_order(one["drawn"], seed, prod(shape))
        for group in groups():
            base, (model,) = inputs_of(group, parameters["arithmetic"])
            yield Rows(model - base, in_order or partial(_expert_numbers, group, 0, seed))

    return keep(
        blocks,
        shape,
        parameters["sparsify"],
        density=one["density"],
        gamma=one["gamma"],
        epsilon=one["epsilon"],
        rescale=parameters["rescale"],
    )


def _only(value: Any) -> Any:
    """Return a parameter's value for one expert, from a list of one value or a value for all."""
    return cast("list[Any]", value)[0] if isinstance(value, list) else value


def _expert_numbers(group: LinearGroup, expert: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return an expert's random numbers from its own stream."""
    return group.streams[expert].uniform(seed, shape)


def _in_order(place: int | str | None, seed: int, count: int) -> Numbers | None:
    """Return an expert's numbers for a tensor, from its place in torch's one stream; None: no place."""
    return mersenne_twister(seed).along(place, count) if isinstance(place, int) else None


def _tensor_pass_bytes(parameters: Parameters) -> float:
    """Return the bytes per entry: magnitudes if lengths are asked for; mask bits if entries are random."""
    by_chance = parameters["sparsify"] in ("bernoulli", "ranked")
    return 5.0 if parameters["rescale"] else 1.0 if by_chance else 0.0


def _reads(parameters: Parameters) -> int:
    """Return how often a tensor is read.

    It is read for a sample and to count, or for random numbers; `rescale` needs two more readings.
    """
    sparsify, density = parameters["sparsify"], _only(parameters["density"])
    if sparsify == "none" or density >= 1 or (density <= 0 and sparsify != "bernoulli"):
        return 0
    half = parameters["arithmetic"] in ("float16", "bfloat16")
    by_chance = sparsify in ("bernoulli", "ranked")
    return (1 if half or by_chance else 2) + (2 if parameters["rescale"] else 0)


@register(
    "generalized_task_arithmetic",
    equation="W̄ = W₀ + λ Σ w_t S(Δ_t) [M_t] / (Σ w_t [M_t] or 1),  M_t = [sgn w_t S(Δ_t) = elected]",
    reference=Reference(
        title="Arcee's MergeKit: A Toolkit for Merging Large Language Models",
        venue="EMNLP 2024",
        arxiv="2403.13257",
        equations="task arithmetic and what it generalizes to",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: parameters["scale"] * count,
        "λT times its update (weights 1, without sparsity, consensus and normalization)",
    ),
    # The kept entries of each expert and three sums; magnitudes of one expert, and their order.
    cost=EntryCost(PerEntry(60, copies=1), PerEntry(copies=4, bytes=2 * 8)),
    unit=_unit,
    sees="weights",
    tensor_pass=TensorPass(_kept_entries, _tensor_pass_bytes, readings=_reads),
)
def generalized_task_arithmetic(
    group: LinearGroup,
    *,
    weight: Weight = 1.0,
    sparsify: Annotated[
        Sparsify,
        Field(
            description="S: all entries, the largest, random ones, random ones by rank in their row, or "
            "those below the largest"
        ),
    ] = "none",
    density: Annotated[
        Share | list[Share],
        PerExpert(),
        Field(description="share of an expert's entries that S keeps, or its mean; 1 is all"),
    ] = 1.0,
    gamma: Annotated[
        Share | list[Share],
        PerExpert(),
        Field(description="of `band`: share of an expert's entries, the largest, that is left out"),
    ] = 0.01,
    epsilon: Annotated[
        Share | list[Share],
        PerExpert(),
        Field(description="of `ranked`: how far probabilities are from the density at most"),
    ] = 0.15,
    rescale: Annotated[
        bool, Field(description="bring what S keeps of an update to its ℓ1 length")
    ] = False,
    consensus: Annotated[
        bool, Field(description="of each entry, add those that have the sign of the sum")
    ] = False,
    normalize: Annotated[bool, Field(description="divide by the weights that were added")] = False,
    scale: Annotated[float, Field(description="λ, factor of what is added")] = 1.0,
    seed: Annotated[int, Field(ge=0, description="seed of the random masks")] = 0,
    drawn: Annotated[
        int | list[int] | Literal["in_order"] | None,
        PerExpert(),
        Field(
            description="numbers of torch's one stream of this seed that were drawn before each expert's "
            "of this tensor; in_order: by tensors in the order of their names; null: each tensor of each "
            "expert has a stream of its own"
        ),
    ] = None,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Sparsify each update, elect a sign per entry, and add the rest, all within one tensor.

    m_t = w_t S(W_t − W_0);  without consensus W̄ = W₀ + λ Σ m_t [/ Σ w_t];  with it
    γ = sgn Σ m_t (+ where it is 0), M_t = [sgn m_t = γ], W̄ = W₀ + λ Σ m_t M_t [/ Σ w_t M_t]

    This is what mergekit computes as task_arithmetic, ties, dare_linear, dare_ties, della, della_linear,
    breadcrumbs and breadcrumbs_ties, which are settings of it (`maths/methods/mergekit.py`). Of equal
    magnitudes at a threshold, those of a stable sort are kept, where mergekit's choice depends on the
    processor. covmerge's `ties`, `dare_ties` and `della` differ: they trim by one threshold over the model,
    divide by probabilities, and elect no sign in a tie.

    Random numbers are drawn for each expert with a density below 1, one for each entry in order.

    Args:
        group: models of any one shape; a row of `ranked` runs along the second axis.
        sparsify: S; `magnitude` is TIES', `bernoulli` DARE's, `ranked` DELLA's, `band` Breadcrumbs'.
        rescale: whether S keeps Σ|Δ|; in their papers DARE and DELLA divide by probabilities instead.
        drawn: places in torch's stream, as mergekit reaches them (`methods.mergekit.places`).

    Raises:
        RecipeError: with `ranked`, density ± epsilon leaves (0, 1).

    Departs from the paper: `ranked` keeps a row of one entry with probability `density`, where mergekit
    divides 0 by 0; otherwise it is the result of mergekit 0.1.5. mergekit's sums of five or more experts
    may differ in the last digit of the last 31 entries of a tensor. Its lengths in half precision depend
    on its number of threads; here they are those of one thread.

    Example:
        >>> import torch
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(3),
        ...                     models=(torch.tensor([3.0, 1.0, 0.1]), torch.tensor([1.0, -2.0, 0.2])))
        >>> generalized_task_arithmetic(
        ...     group, sparsify="magnitude", density=0.7, consensus=True, normalize=True
        ... ).tolist()
        [2.0, -2.0, 0.0]
    """
    base, models = inputs_of(group, arithmetic)
    factors = torch.tensor(weights_of(weight, group), dtype=base.dtype, device=base.device)
    shares, bands, widths = each(density, group), each(gamma, group), each(epsilon, group)
    places = each(drawn, group) if isinstance(drawn, int | list) else [None] * len(models)
    added: list[Tensor] = []
    for t, model in enumerate(models):
        update = model - base
        if group.known:
            entries: KeptEntries = group.known[t]
        else:
            in_order = _in_order(places[t], seed, update.numel())
            whole = [Rows(update, in_order or partial(_expert_numbers, group, t, seed))]
            entries = keep(
                partial(iter, whole),
                update.shape,
                sparsify,
                density=shares[t],
                gamma=bands[t],
                epsilon=widths[t],
                rescale=rescale,
            )
        added.append(entries.of(update).mul_(factors[t]))
    if consensus:
        elected = (_sum(added) >= 0).to(base.dtype).mul_(2).sub_(1)
        total = torch.zeros_like(base, dtype=wide(base.dtype))
        divisor = torch.zeros_like(total)
        for update, factor in zip(added, factors, strict=True):
            # 1 where the sign is the elected one; boolean tensors would take several times as long.
            agreed = update.sign().mul_(elected).clamp_min_(0)
            total.add_(update.mul_(agreed))
            divisor.add_(agreed.mul_(factor))
        total, divisor = total.to(base.dtype), divisor.to(base.dtype)
        divisor.masked_fill_(divisor == 0, 1)
    else:
        total, divisor = _sum(added), factors.sum()
        divisor = torch.where(divisor.abs() < _NO_SHARE, torch.ones_like(divisor), divisor)
    if normalize:
        total.div_(divisor)
    if scale != 1:
        total.mul_(scale)
    return (base + total).to(group.models[0].dtype)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum, added term by term in at least float32 and rounded once."""
    total = torch.zeros_like(terms[0], dtype=wide(terms[0].dtype))
    for term in terms:
        total.add_(term)
    return total.to(terms[0].dtype)
