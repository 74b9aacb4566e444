"""The promises of a method's `Laws`, and the rules that every method must keep; one function each.

Each function takes a subject and a case, and raises `Broken` with the result if the law does not hold. A
law that is not declared is not checked. A law that is declared not to hold must fail on every case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.random import Stream
from covmerge.maths.linalg.select import kth_magnitude, threshold_rank
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.steps import resolve_steps
from covmerge.maths.testing.groups import permuted, random_rotation, relative
from covmerge.maths.testing.subject import Case, Subject, expect

Law = Callable[[Subject, Case], None]

SHAPES = ((16, 12), (12, 16), (5, 30), (30, 5))


def _as_declared(law: str, declared: bool | None, off: float, limit: float) -> None:
    """Check a distance against the declaration of a law."""
    if declared is None:
        return
    holds = off < limit
    expect(
        holds == declared,
        f"`{law}` is declared {declared}, and the results differ by {off:.2g} of their norm "
        f"(kept below {limit:g})" + ("" if declared else ": declare it"),
    )


def order_of_experts(subject: Subject, case: Case) -> None:
    """Permuting the experts changes nothing, if that is declared."""
    group = subject.group(case.updates)
    turned = permuted(group, range(case.count)[::-1])
    off = relative(subject.merge(turned), subject.merge(group))
    _as_declared("order_invariant", subject.method.laws.order_invariant, off, 1e-8)


def zero_updates_give_the_base(subject: Subject, case: Case) -> None:
    """Experts that changed nothing merge to the base."""
    group = subject.group([torch.zeros_like(update) for update in case.updates])
    merged = subject.merge(group)
    # A mean of equal weights equals them up to rounding, in the named arithmetic.
    rounding = 0.0
    if group.models and group.base is not None:
        named = subject.given.get("arithmetic")
        eps = torch.finfo(merged.dtype if named is None else getattr(torch, named)).eps
        rounding = 4 * len(group.models) * eps * norm(group.base)
    off = norm(merged)
    expect(off <= rounding, f"updates of zero give {off:.2g}, which rounding alone is not")


def replicas_of_one_expert(subject: Subject, case: Case) -> None:
    """T copies of one update give the declared multiple of the update."""
    law = subject.method.laws.replicas
    if law is None:
        return
    update = case.updates[0]
    for count in filter(subject.method.takes, (1, case.count)):
        factor = law(subject.given, count)
        merged = subject.merged([update] * count)
        share = float((merged * update).sum() / update.square().sum())
        if factor is not None and isnan(factor):
            continue
        if factor is None:
            off = relative(merged, share * update)
            expect(
                off > 1e-4, f"{count} copies give {share:.6g} times it: declare it in `replicas`"
            )
        else:
            off = relative(merged, factor * update)
            expect(
                off < 1e-8,
                f"{count} copies are declared to give {factor:.6g} times the update, and give "
                f"{share:.6g} times it and more: off by {off:.2g}",
            )


def scaling_all_updates(subject: Subject, case: Case) -> None:
    """Δ → sΔ gives s times the merged update, if that is declared."""
    for factor in (0.1, 3.0):
        scaled = subject.merged([factor * update for update in case.updates])
        off = relative(scaled, factor * subject.merged(case.updates))
        _as_declared("scale_equivariant", subject.method.laws.scale_equivariant, off, 1e-7)


def rotating_all_updates(subject: Subject, case: Case) -> None:
    """Δ → QΔPᵀ gives Q(merged update)Pᵀ, if that is declared; data and base are rotated with it."""
    d_out, d_in = case.shape
    left, right = random_rotation(d_out, 1), random_rotation(d_in, 2)
    group = subject.group(case.updates)
    measured = group.expert_statistics
    if subject.method.data == "gram":
        measured = tuple(replace(m, value=right @ m.value @ right.T) for m in measured)
    turned = replace(
        group,
        updates=tuple(left @ update @ right.T for update in group.updates),
        models=tuple(left @ model @ right.T for model in group.models),
        expert_statistics=measured,
        base=None if group.base is None else left @ group.base @ right.T,
    )
    off = relative(subject.merge(turned), left @ subject.merge(group) @ right.T)
    _as_declared("rotation_equivariant", subject.method.laws.rotation_equivariant, off, 1e-7)


def weights_of_one_value_are_neutral(subject: Subject, case: Case) -> None:
    """A weight of 1 for each expert has the same effect as no weights."""
    weighted = subject.merged(case.updates, [1.0] * case.count)
    off = relative(weighted, subject.merged(case.updates))
    expect(off < 1e-12, f"weights of 1 change the result by {off:.2g} of its norm")


def a_weight_pulls_towards_its_expert(subject: Subject, case: Case) -> None:
    """A larger weight of an expert does not move the result away from the expert."""
    if subject.stepped:
        return  # a step may use weights in its own way
    updates = case.updates
    cosine = torch.nn.functional.cosine_similarity
    towards = subject.merged(updates, [20.0, *[1.0] * (case.count - 1)])
    before = float(cosine(subject.merged(updates).flatten(), updates[0].flatten(), dim=0))
    after = float(cosine(towards.flatten(), updates[0].flatten(), dim=0))
    # A minimum that every expert reaches (ACTMat, WUDI, if T·d_out ≤ d_in) cannot move closer.
    expect(
        after >= before - 1e-12,
        f"a weight of 20 on the first expert takes the cosine with it from {before:.6g} to {after:.6g}",
    )


def inputs_are_not_modified(subject: Subject, case: Case) -> None:
    """Updates, data and base are not modified."""
    group = subject.group([update.clone() for update in case.updates])
    given = [*group.tensors, *(m.value for m in group.expert_statistics)]
    given += [] if group.base is None else [group.base]
    copies = [tensor.clone() for tensor in given]
    subject.merge(group)
    for place, (tensor, copy) in enumerate(zip(given, copies, strict=True)):
        what = f"update {place}" if place < case.count else "the data, or the base"
        expect(torch.equal(tensor, copy), f"it modified {what}")


def merged_update_is_not_modified(subject: Subject, case: Case) -> None:
    """A step after a method does not modify the method's result."""
    merged = replace(subject, after=()).method(subject.group(case.updates), **subject.given)
    copy = merged.delta.clone()
    for use in resolve_steps(subject.after, "after"):
        use.step.finish(subject.group(case.updates), merged, use.parameters)
        expect(torch.equal(merged.delta, copy), "it modified the merged update")


def the_same_bytes_every_time(subject: Subject, case: Case) -> None:
    """Two runs give the same bytes."""
    once, again = subject.merged(case.updates), subject.merged(case.updates)
    expect(
        torch.equal(once, again),
        f"two runs differ by {relative(once, again):.2g} of the norm; random numbers come from a parameter "
        "`seed` and `group.streams`",
    )


def diagnostics_are_plain_json(subject: Subject, case: Case) -> None:
    """Diagnostics can be written to covmerge.json, and read back as the declared type."""
    facts = dict(subject.method(subject.group(case.updates), **subject.given).stats)
    try:
        written = json.loads(json.dumps(facts, allow_nan=False))
        subject.method.diagnostics.from_json(written)
    except (TypeError, ValueError) as error:
        expect(False, f"its diagnostics {facts} are no JSON of their type: {error}")


def cost_model_is_positive(subject: Subject, case: Case) -> None:
    """The cost model returns an estimate that a plan can add up."""
    cost = subject.method.cost(*case.shape, case.count, 4)
    expect(cost.flops > 0 and cost.workspace >= 0, f"it is declared to cost {cost}")


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        inputs_are_not_modified,
        merged_update_is_not_modified,
        the_same_bytes_every_time,
        order_of_experts,
        zero_updates_give_the_base,
        replicas_of_one_expert,
        scaling_all_updates,
        rotating_all_updates,
        weights_of_one_value_are_neutral,
        a_weight_pulls_towards_its_expert,
        diagnostics_are_plain_json,
        cost_model_is_positive,
    )
}


# The same updates in other forms give the same result; one function per form.

_RANK = 3  # rank of the adapters


def strides(subject: Subject, case: Case) -> None:
    """Matrices that are stored transposed are views with other strides."""
    strided = [update.T.contiguous().T for update in case.updates]
    off = relative(subject.merged(strided), subject.merged(case.updates))
    expect(off < 1e-7, f"updates with other strides change the result by {off:.2g} of its norm")


def single_precision(subject: Subject, case: Case) -> None:
    """Float32 gives float64's result in its own dtype, and so does half precision, rounded once."""
    exact = subject.merged(case.updates)
    singles = [update.float() for update in case.updates]
    single = subject.merged(singles)
    expect(single.dtype == torch.float32, f"float32 updates give {single.dtype}")
    off = relative(single, exact)
    expect(off < 1e-3, f"float32 and float64 differ by {off:.2g} of the result's norm")
    halves = [update.to(torch.bfloat16) for update in case.updates]
    half = subject.layer(halves)
    rounded = subject.layer([update.float() for update in halves]).to(torch.bfloat16)
    expect(torch.equal(half, rounded), "bfloat16 updates are not computed in float32, rounded once")


def blocks_of_rows(subject: Subject, case: Case) -> None:
    """A method whose unit is an element, or a row, gives the same result by blocks of rows."""
    method = subject.method
    if method.unit_for(subject.given) not in ("element", "row"):
        return
    whole = subject.group(case.updates)
    density = method.ranked(subject.given)
    if density is not None:
        assert method.global_pass is not None
        vectors = method.global_pass.vectors(whole, subject.given)
        found = [kth_magnitude(v, threshold_rank(density, v.numel())) for v in vectors]
        whole = replace(whole, thresholds=tuple(found))
    middle = case.shape[0] // 2
    parts = [subject.merge(_rows(whole, rows)) for rows in (slice(middle), slice(middle, None))]
    off = relative(torch.cat(parts), subject.merge(whole))
    expect(
        off < 1e-12,
        f"its unit is declared `{method.unit_for(subject.given)}`, and blocks of rows give another "
        f"result than the whole: off by {off:.2g} of its norm; declare `tensor`",
    )


def _rows(group: LinearGroup, rows: slice) -> LinearGroup:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows]

    first = (rows.start or 0) * group.tensors[0].shape[1]
    return replace(
        group,
        updates=tuple(map(cut, group.updates)),
        models=tuple(map(cut, group.models)),
        streams=tuple(Stream(f"tensor/expert{t}", first) for t in range(len(group.tensors))),
        expert_statistics=tuple(
            replace(measured, value=cut(measured.value)) for measured in group.expert_statistics
        ),
        base=None if group.base is None else cut(group.base),
    )


def factors(subject: Subject, case: Case) -> None:
    """Adapters merged on their factors, where that is declared exact, give the result of full updates."""
    method = subject.method
    # Rounding would hide the rank of the full updates; a cut-off shows it.
    plain = {"rank_rtol": 1e-6} if method.has("rank_rtol") else {}
    given = {**subject.given, **plain}
    if not method.factored_for(given):
        return
    generator = torch.Generator().manual_seed(case.seed)
    adapters: list[LowRank] = []
    for t in range(case.count):
        left = torch.randn(case.shape[0], _RANK, generator=generator, dtype=torch.float64)
        right = torch.randn(_RANK, case.shape[1], generator=generator, dtype=torch.float64)
        adapters.append(LowRank(left * (0.3 * (t + 1) / norm(left @ right)), right))
    weights = (1.0,) * case.count
    full = replace(subject.group([one.dense() for one in adapters]), factors=tuple(adapters))
    merged = merge_factors(method, adapters, weights, given, measured=full.expert_statistics)
    by_factors = merged.delta.dense()
    off = relative(by_factors, method(full, **given).delta)
    expect(
        off < 1e-5,
        f"`factored` is declared {method.sides_for(given)!r}, and adapters of rank {_RANK} give another "
        f"result on their factors than multiplied out: off by {off:.2g} of its norm",
    )


FORMS: Mapping[str, Law] = {
    form.__name__: form for form in (strides, single_precision, blocks_of_rows, factors)
}
