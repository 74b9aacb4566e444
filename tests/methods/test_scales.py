"""Finite updates of any size, in any place: a finite merge of the same digits, or an error by name."""

import math

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, LowRank
from covmerge.errors import RecipeError, TensorError
from covmerge.maths.linalg.lapack import exponent_of, norm
from covmerge.methods import registry
from tests.methods.edge_cases import draw
from tests.methods.groups import group_of, random_updates, relative

# A weight holds an update to its own digits only: methods that see weights promise nothing here.
METHODS = [pytest.param(m, id=m.name) for m in registry if m.sees == "updates"]
SHAPES = [(12, 12), (6, 20), (20, 6), (1, 9), (9, 1), (1, 1)]
# Powers of two: the scaled updates have the digits of the others.
SINGLE = [2.0**e for e in (-100, -60, -30, 33, 60, 100)]
DOUBLE = [2.0**e for e in (-500, -200, 200, 500)]
NORMS = (0.8, 0.5, 1.1)


def merge(method, updates, **parameters):
    group = group_of(method, [u.dense() if isinstance(u, LowRank) else u for u in updates])
    data = [measured.value for measured in group.expert_statistics]
    merged = covmerge.merge_layer(updates, method.name, data=data, **parameters)
    if isinstance(merged, LowRank):  # multiplied out where the product cannot leave the dtype
        return merged.to(torch.float64).dense()
    return merged.double()


def scaled_or_refused(method, updates, factor, merged_as=lambda update: update):
    """The merge of scaled updates is the scaled merge; without that law, finite or refused."""
    try:
        merged = merge(method, [merged_as(update * factor) for update in updates])
    except TensorError as error:
        assert not method.laws.scale_equivariant
        assert f"method '{method.name}'" in str(error)
        return
    assert torch.isfinite(merged).all()
    if method.laws.scale_equivariant:
        expected = merge(method, [merged_as(update) for update in updates])
        assert relative(merged / factor, expected) < 1e-4


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "factors"), [(torch.float32, SINGLE), (torch.float64, DOUBLE)], ids=["32", "64"]
)
def test_any_scale(method, dtype, factors):
    for shape in SHAPES:
        for factor in factors:
            scaled_or_refused(method, draw(shape, NORMS, dtype=dtype), factor)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lopsided", [1.0, 2.0**66, 2.0**-66])
def test_factors_of_any_scale(method, lopsided):
    def factors(update):
        left, sigma, right = torch.linalg.svd(update.double(), full_matrices=False)
        root = sigma.sqrt()
        parts = LowRank(left * root * lopsided, right * root[:, None] / lopsided)
        return parts.to(torch.float32)

    for shape in ((12, 12), (6, 20), (9, 1)):
        for factor in (2.0**-40, 1.0, 2.0**40):
            scaled_or_refused(method, draw(shape, NORMS), factor, factors)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", [-66, 66])
def test_experts_that_differ_by_twenty_orders(method, exponent):
    """Old: WUDI raised RuntimeError or ZeroDivisionError, ACTMat LinAlgError."""
    first, second, third = draw((8, 12), NORMS)
    updates = [first, second * 2.0**exponent, third]
    try:
        single = merge(method, updates)
        double = merge(method, [update.double() for update in updates])
    except TensorError as error:
        assert f"method '{method.name}'" in str(error)
        assert not method.laws.scale_equivariant
        return
    assert relative(single, double) < 1e-3


@pytest.mark.parametrize(("name", "factor"), [("actmat", 1e10), ("wudi", 1e18), ("iso_cts", 1e25)])
def test_those_that_failed(name, factor):
    updates = draw((12, 12), NORMS)
    merged = covmerge.merge_layer([update * factor for update in updates], name)
    assert relative(merged / factor, covmerge.merge_layer(updates, name).double()) < 1e-4


def test_usual_updates_keep_their_bits():
    """Nothing is scaled there, and where it is, by factors that change no digit."""
    updates = draw((12, 12), NORMS)
    for name in ("actmat", "wudi", "tsv_m", "iso_c", "iso_cts", "cart", "free", "core_space"):
        method = registry.get(name)
        group = group_of(method, updates)
        given = method.resolve({})
        assert torch.equal(method(group, **given).delta, method.kernel(group, **given).delta)
        # An even power, whose square root is one too.
        large = group_of(method, [update * 2.0**40 for update in updates])
        assert torch.equal(method(large, **given).delta, method(group, **given).delta * 2.0**40)


def test_lengths_in_the_statistics_are_those_of_the_updates():
    updates = draw((12, 12), NORMS)
    method = registry.get("iso_c")
    stats = [
        method(LinearGroup(tuple(u * s for u in updates), (1.0,) * 3), **method.resolve({})).stats
        for s in (1.0, 2.0**80)
    ]
    assert stats[1] == {**stats[0], "sigma": stats[0]["sigma"] * 2.0**80}


def test_steps_of_adam_are_not_scaled():
    wudi = registry.get("wudi")
    given = wudi.resolve({"solver": "adam", "learning_rate": 1e-3})
    group = LinearGroup(tuple(u * 2.0**30 for u in draw((5, 5), NORMS)), (1.0,) * 3)
    assert not wudi.scales_with(given)
    assert torch.equal(wudi(group, **given).delta, wudi.kernel(group, **given).delta)


def test_what_does_not_scale_is_refused_by_name():
    message = (
        r"method 'ace' fails \(OverflowError\) on finite updates of norms 8e\+24, 5e\+24 .*"
        "multiply them by one factor.*`average`"
    )
    with pytest.raises(TensorError, match=message):
        covmerge.merge_layer(draw((9, 1), (8e24, 5e24)), "ace")


def test_a_result_beyond_the_dtype_is_refused_by_name():
    with pytest.raises(TensorError, match=r"overflows torch.float16.*update.float\(\)"):
        covmerge.merge_layer([torch.full((2, 2), 6e4).half()] * 4, "task_arithmetic")
    with pytest.raises(TensorError, match="'task_arithmetic' gives NaN or Inf"):
        covmerge.merge_layer([torch.full((2, 2), 3e38)] * 4, "task_arithmetic", scale=1.0)
    with pytest.raises(TensorError, match="'task_arithmetic' overflows"):
        covmerge.merge_layer([torch.ones(2, 2)] * 2, "task_arithmetic", scale=1e300)
    large = LowRank(torch.full((2, 1), 1e30), torch.full((1, 2), 1e30))
    with pytest.raises(TensorError, match=r"update 1: left · right overflows torch\.float32"):
        covmerge.merge_layer([large.zero(), large], "ties")


def test_data_and_weights_that_are_not_finite():
    update, data = torch.ones(2, 2), torch.eye(2)
    with pytest.raises(TensorError, match="data 1 holds NaN"):
        covmerge.merge_layer([update, update], "regmean", data=[data, data * math.nan])
    with pytest.raises(RecipeError, match="finite number"):
        covmerge.merge_layer([update], "average", weights=[math.inf])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_any_size(dtype):
    for exponent in (-120, -60, 0, 60, 120):
        vector = torch.tensor([3.0, 4.0], dtype=dtype) * 2.0**exponent
        assert norm(vector) == pytest.approx(5.0 * 2.0**exponent, rel=1e-6)
    assert norm(torch.zeros(3, dtype=dtype)) == 0.0
    least = torch.tensor([0.0, -1.0, 0.0], dtype=dtype) * torch.finfo(dtype).smallest_normal / 4
    assert norm(least) == -float(least.min())
    assert norm(torch.zeros(0, dtype=dtype)) == 0.0
    assert math.isnan(norm(torch.tensor([1.0, math.nan], dtype=dtype)))
    assert exponent_of([torch.zeros(0), torch.zeros(2)]) == 0
    assert exponent_of([torch.zeros(2), torch.full((2,), 2.0**-50)]) == -49  # zeros have no size


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_updates_changes_nothing(method):
    """Old: DARE's and DELLA's masks belonged to places in the list."""
    updates = random_updates(12, 9, 4, 9, 3.0, seed=4)
    updates.append(updates[1].clone())
    weights = [1.0, 2.0, 1.0, 0.5, 0.7]
    data = [measured.value for measured in group_of(method, updates).expert_statistics]
    order = [4, 2, 0, 3, 1]

    def merged(places):
        return covmerge.merge_layer(
            [updates[t] for t in places],
            method.name,
            weights=[weights[t] for t in places],
            data=[data[t] for t in places] if data else None,
        )

    assert relative(merged(order), merged(range(5))) < 1e-8


@pytest.mark.parametrize("name", [m.name for m in registry if m.seeded and m.sees == "updates"])
def test_random_numbers_belong_to_an_update(name):
    one, other = random_updates(30, 30, 2, 30, 1.0, seed=4)
    merged = covmerge.merge_layer([one, other], name)
    # Of either dtype and of any power of two, and copies have masks of their own.
    assert relative(covmerge.merge_layer([one.float(), other.float()], name), merged) < 1e-6
    assert torch.equal(covmerge.merge_layer([one * 4, other * 4], name), merged * 4)
    assert relative(covmerge.merge_layer([one, one], name), one) > 0.1
    alone, twice = (covmerge.merge_layer([one] * count, name) != 0 for count in (1, 2))
    assert twice.sum() > alone.sum()


def test_the_engine_names_the_tensor_that_cannot_be_merged():
    base = {"fc.weight": torch.zeros(9, 1)}
    experts = [{"fc.weight": update} for update in draw((9, 1), (8e24, 5e24))]
    with pytest.raises(TensorError, match=r"'fc.weight': method 'ace' fails .* norms 8e\+24"):
        covmerge.merge(base=base, experts=experts, method="ace")
    for name in ("actmat", "wudi", "iso_cts"):
        covmerge.merge(base=base, experts=experts, method=name)
