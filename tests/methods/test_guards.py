"""Where the published code breaks: covmerge must be finite, documented and sensible there.

Rows follow golden/edge_cases.json (outputs of the published code), on inputs drawn the same way.
"""

import json
from pathlib import Path

import pytest
import torch

import covmerge
from covmerge.covariance.gate import heterogeneity
from covmerge.errors import RecipeError, TensorError
from covmerge.methods import registry
from covmerge.types import LinearGroup
from tests.methods.groups import group_of

PUBLISHED = json.loads((Path(__file__).parent.parent / "golden" / "edge_cases.json").read_text())


def draw(shape=(24, 40), norms=(0.4,) * 4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    updates = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in norms]
    return [(u * n / u.norm()).to(dtype) for u, n in zip(updates, norms, strict=True)]


def data_for(name, updates):
    """Random statistics for a method that needs them."""
    measured = group_of(registry.get(name), updates).measured
    return [each.value.float() for each in measured]


def ace(updates, **params):
    method = registry.get("ace")
    return method(LinearGroup(tuple(updates), (1.0,) * len(updates)), **method.resolve(params))


@pytest.mark.parametrize("eps", [1e-2, 1e-5])
def test_a_frozen_layer_leaves_the_sums(eps):
    """Published: norm 1.3e9 (ε = 1e-2) and 1.3e6 (1e-5)."""
    column = {1e-2: "ace_1e-2", 1e-5: "ace_1e-5"}[eps]
    assert float(PUBLISHED["one task has an all-zero delta"][column].split()[1]) > 1e6
    updates = draw()
    frozen = [updates[0], torch.zeros_like(updates[0]), *updates[2:]]
    merged = ace(frozen, eps=eps)
    without = ace([updates[0], *updates[2:]], eps=eps)
    assert torch.equal(merged.delta, without.delta)
    assert merged.stats["unchanged"] == 1
    assert merged.delta.norm() < 1.0


def test_all_frozen_is_the_base():
    merged = ace([torch.zeros(4, 6)] * 3)
    assert not merged.delta.any()
    assert merged.stats["unchanged"] == 3


def test_one_expert_never_fires_the_gate():
    merged = ace(draw(norms=(1.0,)))
    assert merged.stats["gamma"] == 0.0
    assert not merged.stats["gate_fired"]


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (1, 8), (8, 1), (2, 2)])
def test_tiny_dimensions_refine_at_least_one_direction(shape):
    """Published: k = 0, mean of nothing, a tensor of NaN."""
    assert "NON-FINITE" in PUBLISHED["min dim 3 heterog (ACE k=0)"]["ace_1e-5"]
    merged = ace(draw(shape, norms=(1.2, 0.4, 0.1, 0.03)))
    assert torch.isfinite(merged.delta).all()
    if merged.stats["gate_fired"]:
        assert merged.stats["k"] >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k_stays_within_the_rank_of_adapters(dtype):
    """Published: directions beyond the rank are rounding noise, fp32 and fp64 differ by 38 %."""
    generator = torch.Generator().manual_seed(1)
    updates = []
    for norm in (1.2, 0.4, 0.1, 0.03):
        update = torch.randn(60, 2, generator=generator, dtype=torch.float64) @ torch.randn(
            2, 60, generator=generator, dtype=torch.float64
        )
        updates.append((update * norm / update.norm()).to(dtype))
    merged = ace(updates, eps=1e-5)
    assert merged.stats["gate_fired"]
    assert merged.stats["rank"] == merged.stats["k"] == 8
    exact = ace([update.double() for update in updates], eps=1e-5, rank_rtol=1e-6)
    assert (merged.delta - exact.delta).norm() < 1e-3 * exact.delta.norm()


def test_equal_norms_near_one_fire_only_the_papers_gate():
    """γ of Eq. 7 diverges where log‖Δ‖² vanishes; the scale-free statistic does not."""
    norms = (0.95, 1.0, 1.02, 1.05)
    assert heterogeneity(norms) > 0.3
    assert heterogeneity(norms, "scale_free") < 0.01
    assert ace(draw(norms=norms)).stats["gate_fired"]
    assert not ace(draw(norms=norms), gate="scale_free").stats["gate_fired"]


def test_gate_of_norms_that_are_exactly_one():
    assert heterogeneity([1.0, 1.0]) == 0.0
    assert heterogeneity([0.5, 2.0]) == float("inf")


def test_identical_experts_come_back_shrunk_by_the_prior():
    update = draw(norms=(0.4,))[0]
    merged = ace([update] * 4, eps=1e-5).delta
    assert 0.9 < merged.norm() / update.norm() < 1.0


@pytest.mark.parametrize("name", ["average", "actmat", "ace"])
def test_opposite_experts_cancel(name):
    update = draw(norms=(0.4,))[0]
    assert covmerge.merge_layer([update, -update], name).norm() < 1e-4 * update.norm()


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_named(name, value):
    updates = draw()
    updates[2][1, 3] = value
    with pytest.raises(TensorError, match="update 2 holds NaN or Inf"):
        covmerge.merge_layer(updates, name)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    updates = draw(dtype=dtype)
    data = data_for(name, updates)
    merged = covmerge.merge_layer(updates, name, data=data)
    exact = covmerge.merge_layer([update.float() for update in updates], name, data=data)
    assert merged.dtype == dtype
    assert torch.equal(merged, exact.to(dtype))


@pytest.mark.parametrize("name", registry.names())
def test_many_experts_of_a_small_layer(name):
    updates = draw((49, 49), norms=(0.4,) * 49)
    merged = covmerge.merge_layer(updates, name, data=data_for(name, updates))
    assert torch.isfinite(merged).all()
    assert 0 < merged.norm() < 20


def test_a_ridge_of_zero_climbs_the_jitter_ladder_and_reports_it():
    merged = ace(draw((4, 40), norms=(0.4, 0.4)), eps=0.0, prior=False)
    assert torch.isfinite(merged.delta).all()
    wide = ace(draw((2, 6), norms=(0.4,) * 4), eps=0.0)
    assert torch.isfinite(wide.delta).all()
    duplicate = draw((4, 40), norms=(0.4,))[0]
    singular = ace([duplicate, duplicate], eps=0.0)
    assert singular.stats["jitter"] > 0


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([], "empty"),
        ([torch.zeros(2, 3), torch.zeros(3, 2)], r"\[3, 2\].*\[2, 3\]"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).double()], "float64.*float32"),
        ([torch.zeros(2, 3, dtype=torch.int64)], "int64"),
        ([torch.zeros(2, 3, 4)], r"merges matrices.*\[2, 3, 4\]"),
    ],
)
def test_layers_that_cannot_be_merged(updates, message):
    with pytest.raises(TensorError, match=message):
        covmerge.merge_layer(updates)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epss": 1e-5}, "no parameter 'epss'. Did you mean 'eps'"),
        ({"eps": "1e-5"}, "eps = '1e-5'"),
        ({"eps": -1.0}, "eps = -1.0: .*greater than or equal to 0"),
        ({"k_frac": 0.0}, "k_frac"),
        ({"eps": float("nan")}, "finite"),
        ({"gate": "papper"}, "gate = 'papper'"),
        ({"prior": 1}, "prior = 1"),
    ],
)
def test_parameters_are_checked(params, message):
    with pytest.raises(RecipeError, match=message):
        covmerge.merge_layer([torch.zeros(2, 2)], "ace", **params)


def test_unknown_method_names_the_nearest():
    with pytest.raises(RecipeError, match="Did you mean 'actmat'"):
        covmerge.merge_layer([torch.zeros(2, 2)], "actmatt")


def test_family_defaults_are_the_papers():
    method = registry.get("ace")
    assert method.resolve({}, "gpt2")["eps"] == 4e-2
    assert method.resolve({}, "roberta-base")["eps"] == 2e-4
    assert method.resolve({}, "llama")["eps"] == 1e-5
    assert method.resolve({"eps": 0.5}, "gpt2")["eps"] == 0.5
