"""The same updates in other forms give the same result; one function a form, as in `laws`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.random import Stream
from covmerge.maths.linalg.select import kth_magnitude, threshold_rank
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.testing.groups import relative
from covmerge.maths.testing.laws import Law
from covmerge.maths.testing.subject import Case, Subject, expect

_RANK = 3  # of the adapters


def strides(subject: Subject, case: Case) -> None:
    """Matrices that are stored transposed are views with other strides."""
    strided = [update.T.contiguous().T for update in case.updates]
    off = relative(subject.merged(strided), subject.merged(case.updates))
    expect(off < 1e-7, f"updates with other strides change the result by {off:.2g} of its norm")


def single_precision(subject: Subject, case: Case) -> None:
    """Float32 gives what float64 gives, in its own dtype; so does half precision, rounded once."""
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
    """What is declared to need an element, or a row, gives the same by blocks of rows."""
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
    """Adapters merged on their factors, where that is declared exact, give what full updates give."""
    method = subject.method
    # Where rounding would hide the rank of the full updates, a cut-off shows it.
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
