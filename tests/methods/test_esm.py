"""ESM: principal directions of what updates add to the outputs."""

from dataclasses import replace

import pytest
import torch

from covmerge.base.types import LinearGroup, Measured
from covmerge.methods import registry
from tests.methods.groups import group_of, permuted, random_updates, relative

ESM = registry.get("esm")
PLAIN = {"power": 0.0, "scale": 1.0}


def merge(group, **parameters):
    return ESM(group, **ESM.resolve(parameters))


def on_inputs(updates, rows, dtype=torch.float64):
    """A group whose experts have seen the rows `(n, d_in)`, each its own."""
    data = tuple(Measured((z.T @ z / len(z)).to(dtype), len(z), 1.0) for z in rows)
    return LinearGroup(
        tuple(u.to(dtype) for u in updates), (1.0,) * len(updates), expert_statistics=data
    )


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_expert_is_flattened_along_the_principal_directions_of_its_outputs():
    update, rows = draw(6, 9), draw(4, 9, seed=1)
    outputs = torch.linalg.svd(rows @ update.T, full_matrices=False)[2]  # as published, by rows
    own = outputs @ update
    left, sigma, right = torch.linalg.svd(own, full_matrices=False)
    # Of 4 inputs there are 4 directions, and 6 columns might have been.
    expected = outputs.T @ left @ right * sigma.mean()
    merged = merge(on_inputs([update], [rows]), **PLAIN, energy_power=0.0)
    assert relative(merged.delta, expected) < 1e-8
    assert (merged.stats["k"], merged.stats["directions"]) == (6, 4)


def test_few_inputs_in_float32_give_no_more_directions_than_they_are():
    """Published: as many as there are outputs, of energies that are rounding."""
    updates = random_updates(24, 32, 2, 24, 1.0, seed=3)
    rows = [draw(5, 32, seed=t) for t in range(2)]
    single = merge(on_inputs(updates, rows, torch.float32), **PLAIN)
    assert single.stats["directions"] == 10
    double = merge(on_inputs(updates, rows), **PLAIN)
    assert relative(single.delta, double.delta) < 1e-3


def test_every_expert_has_a_direction():
    """Published: the layer silently becomes 0 for more experts than outputs."""
    group = group_of(ESM, random_updates(4, 40, 8, 4, 1.0, seed=0))
    merged = merge(group, **PLAIN)
    assert (merged.stats["k"], merged.stats["directions"]) == (1, 8)
    assert merged.delta.norm() > 0.1


@pytest.mark.parametrize("parameters", [{}, PLAIN])
def test_an_expert_whose_data_did_not_reach_the_layer_leaves_it(parameters):
    group = group_of(ESM, random_updates(12, 16, 3, 12, 3.0, seed=1))
    own = group.expert_statistics
    deaf = replace(own[1], value=torch.zeros_like(own[1].value))
    merged = merge(replace(group, expert_statistics=(own[0], deaf, own[2])), **parameters)
    assert torch.equal(merged.delta, merge(permuted(group, [0, 2]), **parameters).delta)
    assert merged.stats["unheard"] == 1
    assert not merge(replace(group, expert_statistics=(deaf,) * 3), **parameters).delta.any()


def test_inputs_that_an_update_does_not_answer_give_it_no_direction():
    update, other = draw(5, 8), draw(5, 8, seed=1)
    nothing = torch.linalg.svd(update)[2][5:]  # inputs that it maps to zero, but for rounding
    group = on_inputs([update, other], [nothing, draw(20, 8, seed=2)])
    merged = merge(group, **PLAIN)
    assert merged.stats["directions"] == 2 == merged.stats["k"]
    assert relative(merged.delta, merged.delta @ torch.linalg.pinv(other) @ other) < 1e-10


def test_large_experts_outweigh_small_ones_by_the_cube_of_their_norms():
    """What the page says: `power` makes a layer of unlike norms many times as long as they are."""
    group = group_of(ESM, random_updates(24, 32, 4, 24, 30.0, seed=2))
    total = sum(float(update.norm()) for update in group.updates)
    assert merge(group).delta.norm() > 3 * total > 3 * merge(group, **PLAIN).delta.norm()
