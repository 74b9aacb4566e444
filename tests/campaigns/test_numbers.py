"""A short run of the campaign of numbers, the same every time, and what it has found."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, Merged
from covmerge.errors import TensorError
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.reference import REFERENCES, STEP_REFERENCES
from covmerge.methods import registry
from covmerge.steps import registry as steps
from tests.campaigns import exact, numbers
from tests.campaigns.agreement import look
from tests.campaigns.layers import Layer, subjects
from tests.methods.groups import group_of, random_updates, relative


def test_methods_keep_to_their_equations():
    names = subjects()
    outcomes = numbers.run(names, 7, first=0, count=5, seconds=600.0)
    assert sum(own.counts.total() for own in outcomes.values()) == 5 * len(names)
    assert not any(own.failures for own in outcomes.values()), numbers.table(outcomes)


def test_closed_forms_keep_to_theirs_where_float64_does_not_reach():
    counts = exact.run(7, first=0, count=40, seconds=600.0)
    assert not any(own["failed"] for own in counts.values()), exact.table(counts)


def test_a_choice_that_is_left_out_changes_no_other():
    layer = next(one for one in (Layer("average", 0, n) for n in range(99)) if one.scale != 1.0)
    plain = replace(layer, without=frozenset({"scale"}))
    assert plain.scale == 1.0
    assert plain.shape == layer.shape
    assert relative(plain.updates[0] * layer.scale, layer.updates[0].double()) < 1e-2


def test_a_fault_is_found_and_made_smaller(monkeypatch):
    monkeypatch.setitem(REFERENCES, "average", lambda group: 1.01 * sum(group.updates).double())
    layer = Layer("average", 0, 0)
    assert look(layer).kind == "off"
    small = numbers.smallest(layer, "off")
    assert len(small.updates) == 1 and small.shape == (4, 4) and small.dtype == torch.float64


@pytest.mark.parametrize("name", ["nuslerp", "slerp", "multislerp", "karcher"])
def test_spheres_of_any_size(name):
    """Squares of the weights left float32: angles were those of vectors without a length."""
    method = registry.get(name)
    updates = random_updates(6, 5, 1 if name == "slerp" else 2, 5, 1.0, seed=1)
    group = group_of(method, [2.0**91 * update for update in updates])
    base = 2.0**90 * group.base.float()
    group = replace(
        group, base=base, models=tuple(base + update.float() for update in group.tensors)
    )
    merged = method(group, **method.resolve({})).weights
    assert relative(merged, REFERENCES[name](group)) < 1e-5


def test_a_length_that_no_number_holds_is_refused():
    assert lengths(torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0]]), axis=1).tolist() == (
        pytest.approx([5e30, 5e-30, 0.0])
    )
    with pytest.raises(OverflowError, match="a length beyond"):
        lengths(torch.full((4,), 3e38))
    base = torch.full((2, 2), 3e38)
    with pytest.raises(TensorError, match="method 'slerp' fails"):
        covmerge.merge_layer([-base / 2], "slerp", base=base)


def test_calibration_beside_a_huge_expert_keeps_its_digits():
    """What is left was a difference of numbers a million times as large."""
    one, other = random_updates(5, 5, 2, 5, 1.0, seed=3, dtype=torch.float32)
    group = LinearGroup((1e6 * one, one + 0.01 * other), (1.0, 1.0))
    svc = steps.get("svc")
    mean = registry.get("average")(group).delta
    found = svc.finish(group, Merged(mean), svc.resolve({})).delta
    assert relative(found, STEP_REFERENCES["svc"](group, mean)) < 1e-5


def test_small_variances_choose_entries_too():
    """Squares of updates of 1e-27 are none in float32, and no entry was kept."""
    sce = registry.get("sce")
    updates = [2.0**-90 * u for u in random_updates(6, 5, 3, 5, 1.0, seed=2, dtype=torch.float32)]
    base = torch.zeros(6, 5)
    group = LinearGroup((), (1.0,) * 3, base=base, models=tuple(updates))
    merged = sce(group, **sce.resolve({"select_topk": 0.4})).weights
    assert relative(merged, REFERENCES["sce"](group, select_topk=0.4)) < 1e-5


def test_the_reference_of_consensus_has_all_digits_of_its_scale():
    updates = random_updates(4, 4, 2, 4, 1.0, seed=0)
    consensus = registry.get("consensus")
    group = group_of(consensus, updates)
    merged = consensus(group, **consensus.resolve({})).delta
    assert relative(merged, REFERENCES["consensus"](group)) < 1e-15


def test_opposite_updates_of_float64_whose_spectrum_is_long():
    """In a Gram matrix of them the last directions are rounding, and each has the weight of both."""
    one = random_updates(6, 31, 1, 6, 1.0, seed=0, dtype=torch.float64)[0]
    left, _, right = torch.linalg.svd(one, full_matrices=False)
    one = (left * torch.logspace(0, -8, 6, dtype=torch.float64)) @ right
    group = LinearGroup((one, -one), (0.5, 1.0))
    found = registry.get("auto")(group).delta
    assert relative(found, REFERENCES["auto"](group)) < 1e-10
    assert relative(found, -one / 3.0) < 1e-10
