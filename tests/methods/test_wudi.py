"""WUDI: the closed form against the published optimiser, and where the published code breaks."""

import pytest
import torch

import covmerge
from covmerge.methods import registry
from covmerge.types import LinearGroup
from tests.methods.golden_cases.common import EXPERTS, LINEAR, updates_of
from tests.methods.groups import random_updates
from tests.methods.test_guards import PUBLISHED, draw
from tests.methods.twins.data import wudi_loss


def wudi(updates, weights=None, **params):
    method = registry.get("wudi")
    weights = tuple(weights or [1.0] * len(updates))
    return method(LinearGroup(tuple(updates), weights), **method.resolve(params))


def loss(merged, updates):
    return float(wudi_loss(merged.double(), [(update.double(), 1.0) for update in updates]))


def published(case):
    """The norm that the published code returned, None for a result that is not finite."""
    text = PUBLISHED[case]["wudi"]
    return float(text.removeprefix("norm ")) if text.startswith("norm ") else None


# Loss at ΣΔ, after Adam and at the minimum; ‖Adam − minimum‖ over ‖minimum‖.
DISTANCES = {
    ("homog", "blocks.0.attn.out_proj.weight"): (0.153, 0.115, 0.0150, 0.895),
    ("homog", "blocks.0.mlp.c_fc.weight"): (0.190, 0.134, 0.00324, 0.906),
    ("homog", "blocks.0.mlp.c_proj.weight"): (0.0642, 0.0342, 0.00427, 0.743),
    ("heterog", "blocks.0.attn.out_proj.weight"): (0.0766, 0.0461, 0.00149, 0.396),
    ("heterog", "blocks.0.mlp.c_fc.weight"): (0.0192, 0.00887, 0.00138, 0.212),
    ("heterog", "blocks.0.mlp.c_proj.weight"): (0.0194, 0.00599, 0.000372, 0.261),
}


def test_all_layers_of_the_goldens_are_measured():
    assert set(DISTANCES) == {(v, name) for v in ("homog", "heterog") for name in LINEAR}
    assert len(EXPERTS) == 4


@pytest.mark.parametrize(("layer", "expected"), DISTANCES.items())
def test_how_far_adam_stops_from_the_minimum(layer, expected):
    updates = updates_of(*layer)
    adam, closed = wudi(updates, solver="adam").delta, wudi(updates).delta
    measured = (
        loss(sum(updates), updates),
        loss(adam, updates),
        loss(closed, updates),
        float((adam - closed).norm() / closed.norm()),
    )
    assert measured == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("iterations", "learning_rate"), [(300, 1e-5), (500, 1e-3)])
def test_the_closed_form_is_never_above_adam(seed, iterations, learning_rate):
    d_out, d_in, rank = [(20, 16, 16), (8, 24, 8), (24, 24, 3)][seed % 3]
    updates = random_updates(d_out, d_in, 4, rank, 10.0, seed)
    adam = wudi(updates, solver="adam", iterations=iterations, learning_rate=learning_rate).delta
    assert loss(wudi(updates).delta, updates) <= loss(adam, updates)


def test_many_steps_of_adam_reach_the_minimum():
    updates = random_updates(20, 8, 3, 8, 2.0, seed=1)
    closed = wudi(updates).delta
    adam = wudi(updates, solver="adam", iterations=5000, learning_rate=1e-3).delta
    assert (adam - closed).norm() < 1e-3 * closed.norm()


def test_wide_layers_have_no_interference_left_and_weights_change_nothing():
    updates = random_updates(4, 40, 5, 4, 10.0, seed=2)
    merged = wudi(updates)
    assert merged.stats["route"] == "dual"
    assert loss(merged.delta, updates) < 1e-12
    weighted = wudi(updates, [9.0, 1.0, 1.0, 1.0, 1.0]).delta
    assert torch.allclose(weighted, merged.delta)


@pytest.mark.parametrize("solver", ["closed", "adam"])
def test_a_weight_pulls_towards_its_expert(solver):
    updates = random_updates(24, 10, 4, 10, 3.0, seed=4)
    even = wudi(updates, solver=solver).delta
    towards = wudi(updates, [20.0, 1.0, 1.0, 1.0], solver=solver).delta
    cosine = torch.nn.functional.cosine_similarity
    first = updates[0].flatten()
    assert cosine(towards.flatten(), first, dim=0) > cosine(even.flatten(), first, dim=0)


@pytest.mark.parametrize("solver", ["closed", "adam"])
@pytest.mark.parametrize("case", ["one task has an all-zero delta", "all deltas zero"])
def test_a_zero_update_leaves_the_sums(solver, case):
    assert published(case) is None  # 0/0
    zero = torch.zeros(24, 40)
    kept = draw(norms=(0.4,) * 3) if case.startswith("one") else []
    merged = wudi([zero, *kept], solver=solver)
    assert merged.stats["unchanged"] == 1
    expected = wudi(kept, solver=solver).delta if kept else zero
    assert torch.equal(merged.delta, expected)


@pytest.mark.parametrize("solver", ["closed", "adam"])
def test_one_expert_comes_back(solver):
    update = draw(norms=(0.4,))[0]
    assert published("T=1") == pytest.approx(float(update.norm()))
    assert torch.allclose(wudi([update], solver=solver).delta, update, atol=1e-6)


def test_identical_experts_are_reproduced_where_adam_returns_nearly_the_sum():
    update = draw(norms=(0.4,))[0]
    closed, adam = wudi([update] * 4).delta, wudi([update] * 4, solver="adam", iterations=50).delta
    assert torch.allclose(closed, update, atol=1e-6)
    assert float(adam.norm()) == pytest.approx(published("identical deltas x4"), rel=2e-3)


@pytest.mark.parametrize("solver", ["closed", "adam"])
def test_opposite_experts_cancel(solver):
    update = draw(norms=(0.4,))[0]
    assert published("opposite deltas d,-d") == 0.0
    assert wudi([update, -update], solver=solver).delta.norm() < 1e-3 * update.norm()


@pytest.mark.parametrize("solver", ["closed", "adam"])
@pytest.mark.parametrize(
    ("case", "updates"),
    [
        ("normal T=4 (24,40) norm .4", draw()),
        ("norms all ~1.0 (log ~ 0), homogeneous", draw(norms=(1.0,) * 4)),
        ("norms 0.95..1.05", draw(norms=(0.95, 1.0, 1.02, 1.05))),
        ("LoRA rank 2 of 24, T=4", random_updates(24, 40, 4, 2, 1.0, 0, torch.float32)),
        ("min dim 3 heterog (ACE k=0)", draw((3, 40), norms=(0.3, 0.2, 0.1, 0.01))),
        ("min dim 3 homog", draw((3, 40))),
        ("T=8 > min dim 4", draw((4, 40), norms=(0.4,) * 8)),
        ("T=49, min dim 49 (float floor)", draw((49, 49), norms=(0.4,) * 49)),
    ],
)
def test_as_finite_as_the_published_code(solver, case, updates):
    merged = wudi(updates, solver=solver).delta
    assert published(case) is not None
    assert torch.isfinite(merged).all()
    assert 0.1 < merged.norm() < 4 * max(published(case), 1.0)


def test_half_precision_is_computed_in_float32():
    """Published: runs in bfloat16."""
    assert published("bf16 inputs") == published("normal T=4 (24,40) norm .4")
    updates = draw(dtype=torch.bfloat16)
    merged = covmerge.merge_layer(updates, "wudi", solver="adam", iterations=5)
    assert merged.dtype == torch.bfloat16
    assert torch.isfinite(merged).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("solver", ["closed", "adam"])
def test_tiny_layers(shape, solver):
    merged = wudi(draw(shape, norms=(0.4, 0.2, 0.1)), solver=solver).delta
    assert merged.shape == shape
    assert torch.isfinite(merged).all()


def test_tensors_that_are_not_matrices_stay_at_the_base():
    assert registry.get("wudi").others == "base"
