"""KnOTS and Core Space: what they equal, what they must not depend on, thresholds, factors."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.linalg.joint import joint_directions
from covmerge.maths.linalg.select import kth_magnitude, threshold_rank
from covmerge.maths.methods import knots as knots_module
from covmerge.maths.methods.factored import merge_factors, ranked_factors
from covmerge.maths.methods.knots import align
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from tests.methods.groups import random_rotation, random_updates, relative

WEIGHTS = (1.0, 2.0, 0.5)


def merge(name, group, **parameters):
    method = registry.get(name)
    return method(group, **method.resolve(parameters))


def adapters(ranks=(2, 3, 4), shape=(24, 40), seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return [LowRank(draw(shape[0], r), 0.1 * draw(r, shape[1])) for r in ranks]


def group_of(updates, weights=WEIGHTS, *, factors=True):
    dense = tuple(update.dense() for update in updates)
    return LinearGroup(dense, tuple(weights), factors=tuple(updates) if factors else ())


# Where the inner method turns with its updates, the space changes nothing.


@pytest.mark.parametrize("space", ["sv", "v"])
@pytest.mark.parametrize("concat", ["inputs", "outputs"])
@pytest.mark.parametrize(("inner", "scale"), [("average", 1.0), ("task_arithmetic", 0.3)])
def test_linear_methods_are_themselves_in_the_knots(space, concat, inner, scale):
    group = group_of(adapters())
    plain = merge(inner, group).delta
    assert (
        relative(
            merge("knots", group, inner=inner, scale=scale, space=space, concat=concat).delta, plain
        )
        < 1e-12
    )


@pytest.mark.parametrize("name", ["knots", "core_space"])
def test_methods_that_turn_with_their_updates_are_themselves(name):
    group = group_of(adapters())
    off = {} if name == "knots" else {"isotropize": False}
    for inner in ("average", "iso_c"):
        given = {"inner": inner, "rank_rtol": 1e-9, **off}
        plain = merge(inner, group, **({"rank_rtol": 1e-9} if inner == "iso_c" else {})).delta
        assert relative(merge(name, group, **given).delta, plain) < 1e-9
    k = 4 / 9  # of the rank of all adapters together there, of the smaller side here
    cart = merge(name, group, inner="cart", rank_ratio=k, scale=1.5, rank_rtol=1e-9, **off).delta
    assert relative(cart, merge("cart", group, rank_ratio=4 / 24, scale=1.5).delta) < 1e-9


def test_the_sum_with_a_flat_spectrum_is_iso_c():
    group = group_of(adapters())
    flat = merge("core_space", group, inner="task_arithmetic", rank_rtol=1e-9).delta
    assert relative(flat, merge("iso_c", group, rank_rtol=1e-9).delta) < 1e-10


def test_the_three_knots_differ():
    group = group_of(adapters())
    results = [
        merge("knots", group, **given).delta
        for given in (
            {},
            {"space": "v"},
            {"concat": "outputs"},
            {"space": "v", "concat": "outputs"},
        )
    ]
    results.append(merge("ties", group).delta)
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert relative(first, second) > 0.05


def test_space_of_transposed_updates_is_the_other_side():
    updates = adapters()
    mirrored = [update.mT for update in updates]
    along_outputs = merge("knots", group_of(updates), concat="outputs").delta
    assert relative(along_outputs, merge("knots", group_of(mirrored)).delta.mT) < 1e-12


# Signs of singular vectors are arbitrary, and nothing depends on them.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("knots", {}),
        ("knots", {"space": "v", "concat": "outputs"}),
        ("core_space", {"inner": "ties", "isotropize": False}),
        ("core_space", {}),
        ("ctm", {"core_rank": 4}),
        ("ctm", {"core_rank": 4, "inner": "iso_c"}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_signs_of_singular_vectors_change_nothing(monkeypatch, name, parameters, seed):
    group = group_of(adapters())
    usual = merge(name, group, **parameters).delta
    generator = torch.Generator().manual_seed(seed)

    def flipped(blocks, **ends):
        found = joint_directions(blocks, **ends)
        signs = 2 * torch.randint(2, found.sigma.shape, generator=generator) - 1
        return replace(found, left=found.left * signs)

    monkeypatch.setattr(knots_module, "joint_directions", flipped)
    monkeypatch.setattr("covmerge.maths.methods.core_space.joint_directions", flipped)
    monkeypatch.setattr("covmerge.maths.linalg.joint.joint_directions", flipped)
    assert relative(merge(name, group, **parameters).delta, usual) < 1e-12


@pytest.mark.parametrize("concat", ["inputs", "outputs"])
def test_ties_turns_with_the_side_that_is_reduced(concat):
    group = group_of(adapters())
    turn = random_rotation(24 if concat == "inputs" else 40, seed=3)

    def turned(matrix):
        return turn @ matrix if concat == "inputs" else matrix @ turn.T

    rotated = replace(group, updates=tuple(turned(update) for update in group.updates))
    given = {"concat": concat, "rank_rtol": 1e-9}
    assert (
        relative(
            merge("knots", rotated, **given).delta, turned(merge("knots", group, **given).delta)
        )
        < 1e-9
    )


# Rank, experts that say nothing, more experts than directions.


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rank_is_relative(dtype, size):
    """Published: σ > 1e-5, which leaves nothing of small updates and noise of large ones."""
    updates = tuple((size * update.dense()).to(dtype) for update in adapters())
    merged = merge("knots", LinearGroup(updates, WEIGHTS))
    assert merged.stats["components"] == 9
    assert torch.isfinite(merged.delta).all()
    assert merged.delta.any()


@pytest.mark.parametrize("name", ["knots", "core_space"])
@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1), (3, 40), (40, 3)])
def test_more_experts_than_directions(name, shape):
    updates = random_updates(*shape, 8, min(shape), 3.0, seed=4)
    for inner in ("average", "task_arithmetic", "ties", "cart", "tsv_m", "iso_c"):
        merged = merge(name, LinearGroup(tuple(updates), (1.0,) * 8), inner=inner)
        assert merged.delta.shape == shape
        assert torch.isfinite(merged.delta).all()
        assert merged.delta.any()


@pytest.mark.parametrize("inner", ["average", "task_arithmetic", "ties", "cart", "tsv_m", "iso_c"])
@pytest.mark.parametrize("name", ["knots", "core_space"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposite_experts_cancel_in_every_space(name, inner, dtype):
    update = adapters()[0].dense().to(dtype)
    merged = merge(name, LinearGroup((update, -update), (1.0, 1.0)), inner=inner).delta
    assert merged.norm() <= 1e-6 * update.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_spectrum_of_directions_that_rounding_may_have_made_is_said(dtype):
    """Of X, −X and a short update its one direction is left; of X and −X + E, near, float32 has no 2."""
    long, near, short = (
        update.dense() / update.dense().norm() for update in adapters((6, 2, 1), seed=0)
    )
    for other, directions, rounded in ((-long, 1, None), (-long + 1e-3 * near, 3, 6)):
        updates = tuple(update.to(dtype) for update in (long, other, 1e-2 * short))
        found = merge("core_space", LinearGroup(updates, (1.0,) * 3), inner="task_arithmetic")
        diagnostics = registry.get("core_space").diagnostics.from_json(found.stats)
        rounded = rounded if dtype == torch.float32 else None
        known = directions if rounded is None else 9
        assert torch.linalg.matrix_rank(found.delta.double(), rtol=1e-3) == known
        assert found.stats.get("short") == rounded
        assert diagnostics.arbitrary_result == (rounded is not None)
    plain = merge("core_space", LinearGroup(updates, (1.0,) * 3), isotropize=False)
    assert "short" not in plain.stats


@pytest.mark.parametrize("name", ["knots", "core_space"])
def test_an_adapter_that_changes_nothing_has_no_part_in_the_bases(name):
    """As PEFT starts one: B = 0, A random."""
    updates = adapters()
    idle = LowRank(torch.zeros(24, 5, dtype=torch.float64), adapters(ranks=(5,), seed=9)[0].right)
    method = registry.get(name)
    given = method.resolve({"inner": "ties", "rank_rtol": 1e-9})
    with_idle = merge_factors(method, [*updates, idle], [*WEIGHTS, 1.0], given)
    without = merge_factors(method, updates, WEIGHTS, given)
    assert with_idle.stats["unchanged"] == 1
    assert relative(with_idle.delta.dense(), without.delta.dense()) < 1e-9


# KnOTS' thresholds over all layers.


def test_the_global_pass_is_for_ties_with_a_global_trim():
    method = registry.get("knots")
    for chosen, density in [
        ({}, 0.2),
        ({"density": 0.6, "space": "v"}, 0.6),
        ({"density": 1.0}, None),
        ({"trim": "tensor"}, None),
        ({"inner": "tsv_m"}, None),
    ]:
        assert method.ranked(method.resolve(chosen)) == density


@pytest.mark.parametrize("concat", ["inputs", "outputs"])
def test_the_global_pass_counts_components(concat):
    """Its N is (rank of all adapters) · d_in a layer, not the entries of the layer."""
    method = registry.get("knots")
    given = method.resolve({"concat": concat, "rank_rtol": 1e-9})
    updates = adapters()
    found = ranked_factors(method, updates, WEIGHTS, given)
    dense = method.global_pass.vectors(group_of(updates), given)
    assert [v.shape for v in found] == [(9, 40) if concat == "inputs" else (9, 24)] * 3
    for own, other in zip(found, dense, strict=True):
        assert relative(own.abs(), other.abs()) < 1e-9


def test_thresholds_of_all_layers_are_used():
    method = registry.get("knots")
    given = method.resolve({})
    layers = [adapters(seed=seed) for seed in (1, 2)]
    layers[1] = [LowRank(5 * update.left, update.right) for update in layers[1]]
    found = [ranked_factors(method, updates, WEIGHTS, given) for updates in layers]
    whole = [torch.cat([v[t].flatten() for v in found]) for t in range(3)]
    limits = [kth_magnitude(vector, threshold_rank(0.2, len(vector))) for vector in whole]
    kept = [sum(int((v[t].abs() >= limits[t]).sum()) for v in found) for t in range(3)]
    assert kept == [int(0.2 * 2 * 9 * 40) + 1] * 3
    for updates, own in zip(layers, found, strict=True):
        merged = merge_factors(method, updates, WEIGHTS, given, limits).delta.dense()
        aligned = align(group_of(updates), space="sv", concat="inputs", rank_rtol=1e-9)
        trimmed = [v * (v.abs() >= limit) for v, limit in zip(own, limits, strict=True)]
        in_space = LinearGroup(tuple(trimmed), WEIGHTS)
        votes = merge("ties", in_space, density=1.0).delta
        signs = (aligned.components[0] * own[0]).sum(1).sign()  # of the other basis
        assert relative(merged, aligned.basis @ (signs[:, None] * votes)) < 1e-9


# Core Space's factors.


def test_how_an_update_is_factorised_matters_to_ties_alone():
    updates = adapters()
    generator = torch.Generator().manual_seed(5)
    mixed = []
    for update in updates:
        mix = torch.randn(update.rank, update.rank, generator=generator, dtype=torch.float64)
        mixed.append(LowRank(update.left @ mix, torch.linalg.solve(mix, update.right)))

    def both(**given):
        return [
            merge("core_space", group_of(u), rank_rtol=1e-9, **given).delta
            for u in (updates, mixed)
        ]

    assert relative(*both()) < 1e-9
    assert relative(*both(inner="ties")) > 0.05


def test_updates_without_factors_have_balanced_ones():
    updates = adapters()
    given = {"inner": "ties", "isotropize": False, "rank_rtol": 1e-9}
    balanced = []
    for update in updates:
        u, sigma, v = torch.linalg.svd(update.dense(), full_matrices=False)
        root = sigma[: update.rank].sqrt()
        balanced.append(LowRank(u[:, : update.rank] * root, root[:, None] * v[: update.rank]))
    multiplied_out = merge("core_space", group_of(updates, factors=False), **given).delta
    assert relative(multiplied_out, merge("core_space", group_of(balanced), **given).delta) < 1e-9


@pytest.mark.parametrize("params", [{}, {"inner": "ties"}, {"inner": "ties", "isotropize": False}])
def test_adapters_agree_with_the_reference_on_their_own_factors(params):
    group = group_of(adapters())
    limited = {"rank_rtol": 1e-9, **params}
    merged = merge("core_space", group, **limited).delta
    assert relative(merged, REFERENCES["core_space"](group, **limited)) < 1e-9


@pytest.mark.parametrize("method", ["knots", "core_space"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_layer_of_adapters(method, dtype):
    merged = covmerge.merge_layer([u.to(dtype) for u in adapters()], method)
    assert isinstance(merged, LowRank)
    assert merged.dtype == dtype
    assert merged.rank == 9


@pytest.mark.parametrize("inner", ["average", "task_arithmetic", "ties", "tsv_m", "iso_c"])
def test_the_scale_is_that_of_the_inner_method(inner):
    once, twice = (
        merge("core_space", group_of(adapters()), inner=inner, scale=scale) for scale in (1.0, 2.0)
    )
    assert relative(twice.delta, 2 * once.delta) < 1e-12
    assert once.stats["core"] == (9, 9)
