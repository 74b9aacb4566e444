"""One suite run over every registered method: what each promises in its `Laws`, and all must do."""

import pytest
import torch

from covmerge.methods import registry
from covmerge.types import LinearGroup
from tests.methods.test_twins import random_updates, relative

METHODS = [pytest.param(method, id=method.name) for method in registry]
SHAPES = [(16, 12), (12, 16), (5, 30), (30, 5)]


def run(method, updates, weights=None, **given):
    group = LinearGroup(tuple(updates), tuple(weights or [1.0] * len(updates)))
    return method(group, **method.resolve(given)).delta


@pytest.fixture(params=SHAPES, ids=str)
def updates(request):
    return random_updates(*request.param, count=4, rank=min(request.param), spread=3.0, seed=3)


@pytest.mark.parametrize("method", METHODS)
class TestLaws:
    def test_order_of_experts(self, method, updates):
        merged, reversed_ = run(method, updates), run(method, updates[::-1])
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

    def test_weights_of_one_value_are_neutral(self, method, updates):
        weighted = run(method, updates, [1.0] * 4)
        assert relative(weighted, run(method, updates)) < 1e-12

    def test_a_weight_pulls_towards_its_expert(self, method, updates):
        towards = run(method, updates, [20.0, 1.0, 1.0, 1.0])
        cosine = torch.nn.functional.cosine_similarity
        before = cosine(run(method, updates).flatten(), updates[0].flatten(), dim=0)
        assert cosine(towards.flatten(), updates[0].flatten(), dim=0) > before

    def test_inputs_are_not_modified(self, method, updates):
        copies = [update.clone() for update in updates]
        run(method, updates)
        assert all(map(torch.equal, updates, copies))

    def test_the_same_bytes_every_time(self, method, updates):
        assert torch.equal(run(method, updates), run(method, updates))

    def test_statistics_are_plain_json(self, method, updates):
        import json

        group = LinearGroup(tuple(updates), (1.0,) * 4)
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
