"""WUDI: the closed form against the published optimiser."""

import pytest
import torch

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.data import wudi_loss
from covmerge.methods import registry
from tests.methods.edge_cases import IDENTICAL, PUBLISHED, draw
from tests.methods.golden_cases.common import EXPERTS, LINEAR, updates_of
from tests.methods.groups import random_updates


def wudi(updates, weights=None, **params):
    method = registry.get("wudi")
    weights = tuple(weights or [1.0] * len(updates))
    return method(LinearGroup(tuple(updates), weights), **method.resolve(params))


def loss(merged, updates):
    return float(wudi_loss(merged.double(), [(update.double(), 1.0) for update in updates]))


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


def test_adam_stays_at_one_expert():
    update = draw(norms=(0.4,))[0]
    alone = wudi([update], solver="adam")
    assert torch.allclose(alone.delta, update, atol=1e-6)
    assert alone.stats["route"] == "dual"


def test_identical_experts_of_adam_give_nearly_their_sum_as_published():
    update = draw(norms=(0.4,))[0]
    merged = wudi([update] * 4, solver="adam", iterations=50).delta
    published = float(PUBLISHED[IDENTICAL]["wudi"].removeprefix("norm "))
    assert float(merged.norm()) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("solver", ["closed", "adam"])
def test_tiny_layers(shape, solver):
    merged = wudi(draw(shape, norms=(0.4, 0.2, 0.1)), solver=solver).delta
    assert merged.shape == shape
    assert torch.isfinite(merged).all()


def test_tensors_that_are_not_matrices_stay_at_the_base():
    assert registry.get("wudi").others == "base"


def test_directions_within_what_rounding_gave_are_cut_off():
    update = torch.diag(torch.tensor([1.0, 0.5, 0.05]))
    for edge, rank, solver in ((0.0, 3, "cholesky32"), (0.1, 2, "eigen64")):
        rounding = (Rounding(edge, 3 * edge**2),) * 2
        group = LinearGroup((update, update), (1.0, 1.0), rounding=rounding)
        stats = registry.get("wudi")(group).stats
        assert (stats["rank"], stats["solver"]) == (rank, solver)
