"""Least squares from float32 products: float64's answer, or none."""

from functools import lru_cache
from math import inf

import pytest
import torch

from covmerge import merge_layer
from covmerge.base.types import LinearGroup
from covmerge.maths.covariance import mixed
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.mixed import solve_mixed
from covmerge.maths.linalg import auto
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.reference import REFERENCES

TALL, WIDE = (160, 128), (120, 144)
I = torch.arange(1.0, 129.0, dtype=torch.float64)  # noqa: E741
FULL = {
    "flat": I**0,
    "slow": I**-0.5,
    "trained": 1 / I,
    "knee": I**-2 + 1e-2,
    "one": torch.where(I == 1, 30.0, 0.03),
    "clusters": torch.where(I <= 4, 30.0, torch.where(I <= 60, 1.0, 0.2)),
}
DEFICIENT = {
    "low": torch.where(I <= 10, 1.0, 0.0),
    "low and rounding": torch.where(I <= 10, 1.0, 1e-7),
    "steep": I**-4,
}


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(auto, "_PASSES", 0.0)


@lru_cache
def directions(n, k, count, seed):
    """Orthonormal columns `(n, k)`, `count` times."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, n, k, generator=draw, dtype=torch.float64)
    return list(torch.linalg.qr(drawn)[0])


def updates(sigma, shape, count=8, seed=0):
    """Updates of these singular values, in directions of their own."""
    k = min(*shape, len(sigma))
    sides = (directions(n, k, count, seed + n) for n in shape)
    found = [(left * sigma[:k]) @ right.mT for left, right in zip(*sides, strict=True)]
    return [(update / update.norm()).float() for update in found]


def solved(deltas, floor=1e-12):
    """The answer, if there is one, and that of the definition in float64."""
    ridge = 0.1 / deltas[0].shape[1]
    covariances = [Covariance(d, scale=1 / norm(d) ** 2, ridge=ridge) for d in deltas]
    found = solve_mixed(covariances, energy=float(len(deltas)), floor=floor)
    exact = [d.double() for d in deltas]
    own = [d.mT @ d / norm(d) ** 2 + ridge * torch.eye(d.shape[1]).double() for d in exact]
    numerator = sum(d @ c for d, c in zip(exact, own, strict=True))
    return found, torch.linalg.solve(sum(own), numerator, left=False)


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=str)
@pytest.mark.parametrize("kind", DEFICIENT)
def test_where_directions_may_be_missing_there_is_no_answer(kind, shape):
    assert solved(updates(DEFICIENT[kind], shape))[0] is None


@pytest.mark.parametrize("null", ["input", "direction"])
@pytest.mark.parametrize("leading", [False, True])
def test_one_missing_direction_is_seen(null, leading):
    deltas = updates(FULL["trained" if leading else "flat"], TALL)
    vector = torch.zeros(128, dtype=torch.float64)
    vector[-1] = 1.0
    if null == "direction":
        vector = torch.randn(128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        vector /= vector.norm()
    without = torch.eye(128, dtype=torch.float64) - torch.outer(vector, vector)
    assert solved(deltas)[0] is not None
    assert solved([(d.double() @ without).float() for d in deltas])[0] is None


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=str)
@pytest.mark.parametrize("kind", FULL)
def test_the_answer_is_that_of_float64(kind, shape):
    found, expected = solved(updates(FULL[kind], shape))
    assert found is not None and found.dtype == torch.float64
    assert off(found, expected) < 1.5 * mixed._OFF


def test_inputs_of_other_sizes():
    sizes = torch.ones(128).index_fill_(0, torch.tensor([3, 100]), 300.0)
    found, expected = solved([d * sizes for d in updates(FULL["flat"], TALL)])
    assert found is not None and off(found, expected) < 1.5 * mixed._OFF


def test_what_experts_share_and_copies():
    deltas = updates(FULL["trained"], TALL)
    for group in ([d + deltas[0] for d in deltas], [deltas[0]] * 8):
        found, expected = solved(group)
        assert found is None or off(found, expected) < 1.5 * mixed._OFF


def test_without_what_is_kept_apart_the_answer_is_refused(monkeypatch):
    deltas = updates(FULL["one"], TALL)
    assert solved(deltas)[0] is not None
    monkeypatch.setattr(mixed, "_APART", 1e9)
    assert solved(deltas)[0] is None


def test_the_distance_is_measured(monkeypatch):
    told = []
    measure = mixed._System.off
    monkeypatch.setattr(mixed._System, "off", lambda *a: told.append(measure(*a)) or told[-1])
    monkeypatch.setattr(mixed, "_OFF", 1.0)
    for kind in ("slow", "trained", "knee"):
        found, expected = solved(updates(FULL[kind], TALL))
        assert 0.5 < told[-1] / off(found, expected) < 2.0


@pytest.mark.parametrize("size", [1e25, 1e-30])
def test_what_leaves_float32_has_no_answer(size):
    deltas = [size * d for d in updates(FULL["flat"], TALL)]
    found, expected = solved(deltas)
    assert found is None or off(found, expected) < mixed._OFF


def test_opposite_experts_have_no_answer():
    (update,) = updates(FULL["flat"], TALL, 1)
    assert solved([update, -update] * 4)[0] is None


def test_an_answer_of_zero_is_left_to_float64():
    """Nothing can be said of its error in parts of itself."""
    system = mixed._System.of(torch.eye(4), None, ridge=0.1, mean=1.0, least=0.5, floor=0.0)
    covariances = [Covariance(sign * torch.eye(4), ridge=0.1) for sign in (1, -1)]
    assert system.off(torch.zeros(4, 4, dtype=torch.float64), covariances) == inf


def test_an_eigenvalue_below_the_floor():
    deltas = updates(FULL["flat"], TALL)
    assert solved(deltas, floor=1e-3)[0] is not None
    assert solved(deltas, floor=1.0)[0] is None


def test_float64_is_left_alone():
    covariances = [Covariance(torch.ones(160, 128, dtype=torch.float64), ridge=1.0)]
    assert solve_mixed(covariances, energy=1.0, floor=0.0) is None


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("shape", [TALL, WIDE], ids=str)
@pytest.mark.parametrize("kind", ["flat", "trained", "knee", "one", "low"])
def test_auto_is_that_of_the_reference(kind, shape, inputs):
    deltas = updates({**FULL, **DEFICIENT}[kind], shape)
    c0 = None
    if inputs:
        draw = torch.Generator().manual_seed(2)
        z = torch.randn(300, shape[1], generator=draw) / torch.arange(1.0, shape[1] + 1).sqrt()
        c0 = z.mT @ z
    found = merge_layer(deltas, "auto", base_inputs=c0)
    reference = REFERENCES["auto"](LinearGroup(tuple(deltas), (1.0,) * len(deltas), base_inputs=c0))
    assert off(found.double(), reference) < 3e-4


def test_copies_of_an_expert_give_it_back():
    (update,) = updates(FULL["trained"], TALL, 1)
    assert off(merge_layer([update] * 4, "auto"), update) < 1e-4


def test_rows_are_split_a_few_at_a_time(monkeypatch):
    """Old tests had no update of more rows than are split at once."""
    deltas = updates(FULL["one"], TALL)
    whole, exact = solved(deltas)
    monkeypatch.setattr(mixed, "_AT_ONCE", 7 * TALL[1])
    parts, _ = solved(deltas)
    assert off(parts, exact) < 2e-5
    assert off(parts, whole) < 1e-6
    monkeypatch.setattr(mixed, "_AT_ONCE", 1)  # a row at least
    assert off(solved(deltas)[0], whole) < 1e-6


def test_one_covariance_alone_is_its_own_answer():
    (delta,) = updates(FULL["slow"], TALL, count=1)
    assert off(solved([delta])[0], delta.double()) < 2e-5


def test_lengths_are_those_of_the_part_along_the_axes_too():
    """Experts that share their large directions, and turn them elsewhere: sEEᵀY is not small then."""
    draw = torch.Generator().manual_seed(3)
    shared = torch.linalg.qr(torch.randn(TALL[1], 2, generator=draw).double())[0]
    deltas = []
    for own in updates(FULL["flat"], TALL, count=4):
        image = own.double() @ torch.randn(TALL[1], 2, generator=draw).double()
        deltas.append((own.double() + 3.0 * image @ shared.mT / image.norm()).float())
    lengths, ridge = (0.2, 1.0, 2.0, 5.0), 0.1 / TALL[1]
    given = [
        Covariance(d, scale=1 / norm(d) ** 2, ridge=ridge, length=own)
        for d, own in zip(deltas, lengths, strict=True)
    ]
    found = solve_mixed(given, energy=4.0, floor=1e-12)
    eye = torch.eye(TALL[1]).double()
    own = [d.double().mT @ d.double() / norm(d) ** 2 + ridge * eye for d in deltas]
    numerator = sum(b * d.double() @ c for b, d, c in zip(lengths, deltas, own, strict=True))
    assert off(found, torch.linalg.solve(sum(own), numerator, left=False)) < 1e-6


def system_of(own, across, *, least, floor, gram=None):
    """One axis, the first, apart from a rest of ones."""
    axes = torch.zeros(8, 1, dtype=torch.float64)
    axes[0] = 1.0
    leading = mixed._Leading(
        axes, torch.tensor([[own]]).double(), across, torch.zeros(8, 1).double(), []
    )
    rest = torch.eye(8)
    rest[0, 0] = 0.0
    return mixed._System.of(
        rest if gram is None else gram, leading, ridge=0.1, mean=1.0, least=least, floor=floor
    )


def test_what_the_axes_mix_with_the_rest_is_in_the_bound_of_the_whole():
    """λ ≥ least / (1 + ‖N‖)², N the rest's part along the axes: here ‖N‖ is 0.5."""
    across = torch.zeros(1, 8, dtype=torch.float64)
    across[0, 3] = 50.0
    rest = torch.eye(8)
    rest[0, 0], rest[3, 3] = 0.0, 26.0
    for share, possible in ((0.99, True), (1.01, False)):
        found = system_of(100.0, across, least=0.01, floor=share * 0.01 / 1.5**2, gram=rest.clone())
        assert (found is not None) is possible


def test_an_axis_below_what_float32_tells_from_zero_is_none():
    across = torch.zeros(1, 8, dtype=torch.float64)
    assert system_of(0.02, across, least=0.01, floor=1e-9) is not None
    assert system_of(0.005, across, least=0.01, floor=1e-9) is None


@pytest.mark.parametrize("energy", [0.0, inf, float("nan")])
def test_an_energy_that_tells_nothing_gives_no_answer(energy):
    deltas = updates(FULL["flat"], TALL)
    ridge = 0.1 / TALL[1]
    covariances = [Covariance(d, scale=1 / norm(d) ** 2, ridge=ridge) for d in deltas]
    assert solve_mixed(covariances, energy=energy, floor=1e-12) is None


@pytest.mark.parametrize("times", [2.0**-20, 2.0**20])
def test_the_size_of_updates_does_not_decide_whether_there_is_an_answer(times):
    for kind, answer in ((FULL["slow"], True), (DEFICIENT["low"], False)):
        found, _ = solved([times * update for update in updates(kind, TALL)])
        assert (found is not None) == answer


def test_the_margin_of_what_float32_tells_from_zero():
    """A third of it is too little, and three times as much is enough."""
    least = 128**0.5 * torch.finfo(torch.float32).eps * 16.0 / 128
    for share, answer in ((0.3, False), (3.0, True)):
        sigma = torch.ones(128, dtype=torch.float64)
        sigma[-1] = (share * least * 127) ** 0.5
        found, _ = solved(updates(sigma, TALL, count=1))
        assert (found is not None) == answer
