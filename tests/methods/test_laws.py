"""One suite run over every registered method: what each promises in its `Laws`, and all must do."""

import json
from dataclasses import replace

import pytest
import torch

from covmerge.methods import registry
from tests.methods.groups import group_of, permuted, random_rotation, random_updates, relative

METHODS = [pytest.param(method, id=method.name) for method in registry]
SHAPES = [(16, 12), (12, 16), (5, 30), (30, 5)]


def run(method, updates, weights=None):
    return run_group(method, group_of(method, updates, weights))


def run_group(method, group):
    return method(group, **method.resolve({})).delta


@pytest.fixture(params=SHAPES, ids=str)
def updates(request):
    return random_updates(*request.param, count=4, rank=min(request.param), spread=3.0, seed=3)


@pytest.mark.parametrize("method", METHODS)
class TestLaws:
    def test_order_of_experts(self, method, updates):
        group = group_of(method, updates)
        merged = run_group(method, group)
        reversed_ = run_group(method, permuted(group, [3, 2, 1, 0]))
        assert (relative(reversed_, merged) < 1e-8) == method.laws.order_invariant

    def test_zero_updates_give_the_base(self, method, updates):
        merged = run(method, [torch.zeros_like(update) for update in updates])
        assert not merged.any()

    @pytest.mark.parametrize("count", [1, 4])
    def test_replicas_of_one_expert(self, method, updates, count):
        factor = method.laws.replicas(method.resolve({}), count)
        merged = run(method, [updates[0]] * count)
        if factor is None:
            share = (merged * updates[0]).sum() / updates[0].square().sum()
            assert relative(merged, share * updates[0]) > 1e-4, "declare it in `replicas`"
        else:
            assert relative(merged, factor * updates[0]) < 1e-8

    @pytest.mark.parametrize("factor", [0.1, 3.0])
    def test_scaling_all_updates(self, method, updates, factor):
        scaled = run(method, [factor * update for update in updates])
        equivariant = relative(scaled, factor * run(method, updates)) < 1e-7
        assert equivariant == method.laws.scale_equivariant

    def test_rotating_all_updates(self, method, updates):
        d_out, d_in = updates[0].shape
        left, right = random_rotation(d_out, 1), random_rotation(d_in, 2)
        group = group_of(method, updates)
        measured = group.measured
        if method.data == "gram":
            measured = [replace(m, value=right @ m.value @ right.T) for m in measured]
        turned = replace(
            group,
            updates=tuple(left @ update @ right.T for update in updates),
            measured=tuple(measured),
        )
        expected = left @ run_group(method, group) @ right.T
        equivariant = relative(run_group(method, turned), expected) < 1e-7
        assert equivariant == method.laws.rotation_equivariant

    def test_weights_of_one_value_are_neutral(self, method, updates):
        weighted = run(method, updates, [1.0] * 4)
        assert relative(weighted, run(method, updates)) < 1e-12

    def test_a_weight_pulls_towards_its_expert(self, method, updates):
        towards = run(method, updates, [20.0, 1.0, 1.0, 1.0])
        cosine = torch.nn.functional.cosine_similarity
        before = cosine(run(method, updates).flatten(), updates[0].flatten(), dim=0)
        # A minimum that every expert reaches (ACTMat, WUDI, where T·d_out ≤ d_in) has no more to give.
        assert cosine(towards.flatten(), updates[0].flatten(), dim=0) >= before - 1e-12

    def test_inputs_are_not_modified(self, method, updates):
        copies = [update.clone() for update in updates]
        run(method, updates)
        assert all(map(torch.equal, updates, copies))

    def test_the_same_bytes_every_time(self, method, updates):
        assert torch.equal(run(method, updates), run(method, updates))

    def test_statistics_are_plain_json(self, method, updates):
        group = group_of(method, updates)
        json.dumps(dict(method(group, **method.resolve({})).stats), allow_nan=False)

    def test_page_is_complete(self, method, updates):
        assert method.summary.endswith(".")
        assert method.equation.startswith("W̄ =")
        assert "Departs from the paper:" in method.kernel.__doc__
        assert "Example:" in method.kernel.__doc__
        assert all(parameter.description for parameter in method.parameters)

    def test_cost_model_is_positive(self, method, updates):
        cost = method.cost(*updates[0].shape, len(updates), 4)
        assert cost.flops > 0
        assert cost.workspace >= 0
