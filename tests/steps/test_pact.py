"""PACT: what is protected of the base, for whom, and from whom."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, LowRank, Rounding
from covmerge.errors import TensorError
from covmerge.maths.measures.rounding import rounding_of
from covmerge.maths.steps.compose import resolve_steps, with_steps
from covmerge.maths.testing.groups import random_updates, relative

GENERATOR = torch.Generator().manual_seed(3)
BASE = torch.randn(12, 20, generator=GENERATOR, dtype=torch.float64)
UPDATES = random_updates(12, 20, count=3, rank=12, spread=3.0, seed=0)


def prepared(updates, base=BASE, factors=(), **given):
    group = LinearGroup(tuple(updates), (1.0,) * len(updates), base=base, factors=tuple(factors))
    step = covmerge.steps.get("pact")
    return step.prepare(group, step.resolve(given))


def right(matrix, k):
    return torch.linalg.svd(matrix, full_matrices=False).Vh[:k].T


def test_the_static_form_clears_the_bases_directions():
    anchored = right(BASE, 6)
    for made, update in zip(prepared(UPDATES, core=0.5, own=0).updates, UPDATES, strict=True):
        assert (made @ anchored).norm() < 1e-13
        assert relative(made, update - update @ anchored @ anchored.T) < 1e-13


def test_of_two_experts_each_spares_what_the_other_relies_on():
    one, other = UPDATES[:2]
    found = prepared([one, other], core=0.5, own=2).updates
    rewritten = right(other, 2)
    relied = right(BASE, 6) - rewritten @ rewritten.T @ right(BASE, 6)
    assert (found[0] @ relied).norm() < 1e-13
    assert (found[0] @ rewritten).norm() > 0.1 * (one @ rewritten).norm()


def test_one_expert_stays_and_an_unchanged_one_relies_on_all():
    assert prepared(UPDATES[:1]).updates[0] is UPDATES[0]
    zero = torch.zeros_like(BASE)
    found = prepared([UPDATES[0], zero], core=0.5).updates
    anchored = right(BASE, 6)
    assert relative(found[0], UPDATES[0] - UPDATES[0] @ anchored @ anchored.T) < 1e-13
    assert not found[1].any()


@pytest.mark.parametrize("method", ["actmat", "core_space", "free", "iso_c", "tsv_m"])
def test_what_is_left_of_half_precision_is_not_taken_for_its_rounding(method):
    """Rounding is projected too. With that of the whole update, all was zero, or `core_space` crashed."""
    draw = torch.Generator().manual_seed(0)
    base = (0.05 * torch.randn(192, 192, generator=draw)).bfloat16()
    moves = [1e-4 * torch.randn(192, 192, generator=draw) for _ in range(4)]
    updates = tuple((base + move).bfloat16().float() - base.float() for move in moves)
    rounding = rounding_of(updates, [torch.bfloat16] * 4, base.float())
    known = LinearGroup(updates, (1.0,) * 4, rounding=rounding, base=base.float())
    whole = with_steps(covmerge.methods.get(method), resolve_steps(["pact"], "before"), ())
    exact = whole(replace(known, rounding=()), **whole.resolve({})).delta
    assert relative(whole(known, **whole.resolve({})).delta, exact) < 0.01


def test_the_rounding_that_a_projection_leaves():
    """Of errors of one size in all entries, by the singular values and the norm of what is left."""
    draw = torch.Generator().manual_seed(1)
    base, error = (torch.randn(100, 400, generator=draw) for _ in range(2))
    whole = Rounding(edge=30.0, energy=float(error.square().sum()), before=8.0)
    group = LinearGroup((error, torch.zeros_like(error)), (1.0, 1.0), base=base)
    found = covmerge.steps.get("pact").prepare(
        replace(group, rounding=(whole, Rounding())), {"core": 1.0, "own": 0}
    )
    left, known = found.updates[0], found.rounding[0]
    assert known.energy == pytest.approx(float(left.square().sum()), rel=0.02)
    assert known.edge == pytest.approx(float(torch.linalg.matrix_norm(left, 2)), rel=0.05)
    assert known.before == pytest.approx(6.0) and found.rounding[1] == Rounding()


def test_a_base_of_zeros_protects_nothing():
    for made, update in zip(
        prepared(UPDATES, torch.zeros_like(BASE)).updates, UPDATES, strict=True
    ):
        assert torch.equal(made, update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_projection_leaves_of_nothing_is_nothing(dtype):
    """Of layers that the protected directions fill, and of updates that lie in them."""
    tall = [update.mT.contiguous().to(dtype) for update in UPDATES]
    whole = prepared(tall, BASE.mT.contiguous().to(dtype), core=1.0, own=2)
    assert not any(made.any() for made in whole.updates)
    inside = [(update @ right(BASE, 6) @ right(BASE, 6).T).to(dtype) for update in UPDATES]
    found = prepared(inside, BASE.to(dtype), core=0.5, own=0)
    assert not any(made.any() for made in found.updates)
    # Each rewrites all that it relies on, and none is in the others' way.
    found = prepared(inside, BASE.to(dtype), core=0.5)
    for made, update in zip(found.updates, inside, strict=True):
        assert torch.equal(made, update)


def test_the_factors_follow_their_updates():
    generator = torch.Generator().manual_seed(8)
    adapters = [
        LowRank(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in ((12, 2), (2, 20))))
        for _ in range(3)
    ]  # fmt: skip
    found = prepared([one.dense() for one in adapters], factors=adapters, core=0.4, own=1)
    for made, own in zip(found.updates, found.factors, strict=True):
        assert made.any() and relative(own.dense(), made) < 1e-12


def test_a_base_of_any_size_protects_the_same():
    wanted = prepared(UPDATES, core=0.5, own=2).updates
    for size in (1e-30, 1e30):
        for made, expected in zip(
            prepared(UPDATES, size * BASE, core=0.5, own=2).updates, wanted, strict=True
        ):
            assert relative(made, expected) < 1e-9


def test_in_a_merge_of_models_and_of_layers():
    names = ("layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight")
    generator = torch.Generator().manual_seed(4)
    base = {
        name: torch.randn(shape, generator=generator)
        for name, shape in zip(names, ((24, 16), (16, 24)), strict=True)
    }
    experts = [
        {n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        for _ in range(2)
    ]
    steps = {"before": [{"pact": {"core": 0.25, "own": 1}}], "after": ["rescale"]}
    whole = covmerge.merge(base, experts, "task_arithmetic", **steps)
    for name, weights in base.items():
        updates = [expert[name] - weights for expert in experts]
        layer = covmerge.merge_layer(updates, "task_arithmetic", base=weights, **steps)
        assert relative(whole.tensors[name] - weights, layer) < 1e-5
    assert whole.stats["tensors"][names[0]]["rule"].startswith("pact + task_arithmetic + rescale")


def test_it_asks_for_the_base():
    with pytest.raises(TensorError, match="needs the base's weights: pass them as `base=`"):
        covmerge.merge_layer(UPDATES, "average", before=["pact"])
    adapter = LowRank(torch.ones(4, 1), torch.ones(1, 3))
    merged = covmerge.merge_layer(
        [adapter, adapter], "average", before=["pact"], base=torch.eye(4, 3)
    )
    assert isinstance(merged, torch.Tensor)  # the base has no basis of low rank


def test_the_base_is_not_modified():
    base = BASE.clone()
    prepared(UPDATES, base)
    assert torch.equal(base, BASE)
