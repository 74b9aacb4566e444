"""ACE's gate, rank and ridge at their limits, and arguments that are refused.

Where published code breaks, of every method: test_edge_cases.py.
"""

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup
from covmerge.errors import RecipeError, TensorError
from covmerge.maths.covariance.estimate import heterogeneity
from covmerge.methods import registry
from tests.methods.edge_cases import PUBLISHED, TINY_HETEROG, draw


def ace(updates, **params):
    method = registry.get("ace")
    return method(LinearGroup(tuple(updates), (1.0,) * len(updates)), **method.resolve(params))


def test_one_expert_never_fires_the_gate():
    merged = ace(draw(norms=(1.0,)))
    assert merged.stats["gamma"] == 0.0
    assert not merged.stats["gate_fired"]


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (1, 8), (8, 1), (2, 2)])
def test_tiny_dimensions_refine_at_least_one_direction(shape):
    """Published: k = 0, mean of nothing, a tensor of NaN."""
    assert "NON-FINITE" in PUBLISHED[TINY_HETEROG]["ace_1e-5"]
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
        ([torch.zeros(2, 3, 4)] * 2, r"merges matrices.*\[2, 3, 4\]"),
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
