"""Equal singular values at a cut: all are kept, since which of their directions come first is arbitrary."""

import pytest
import torch

import covmerge
from covmerge.maths.linalg.joint import joint_directions
from covmerge.maths.linalg.spectral import RankRule, leading_directions, truncated_svd
from covmerge.methods import registry
from tests.methods.groups import group_of, random_rotation, relative

SIGMA = torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.2, 0.0, 0.0, 0.0], dtype=torch.float64)
CUTS = [
    ("cart", {"rank_ratio": 0.3}),
    ("cart", {"rank_ratio": 0.1}),
    ("tsv_m", {}),
    ("resmerge", {}),
    ("resmerge", {"head_rank": 3}),
    ("iso_cts", {}),
    ("iso_cts", {"common_fraction": 0.3}),
    # A flat spectrum counts what rounding leaves where experts cancel: not a matter of cuts.
    ("core_space", {"isotropize": False}),
    ("core_space", {"inner": "cart", "rank_ratio": 0.3, "isotropize": False}),
    ("ctm", {"core_rank": 3, "inner": "task_arithmetic"}),
    ("ctm", {"core_rank": 3, "inner": "tsv_m"}),
    ("knots", {"inner": "tsv_m", "space": "v"}),
]


def turned(sigma, seed):
    return (
        random_rotation(len(sigma), seed) @ torch.diag(sigma) @ random_rotation(len(sigma), -seed)
    )


KINDS = {
    "orthogonal": [0.3 * random_rotation(10, seed) for seed in (1, 2, 3)],
    "alike": [turned(SIGMA, seed) for seed in (1, 2, 3)],
    "identical": [turned(SIGMA, 1)] * 3,
    "opposite and one": [turned(SIGMA, 1), -turned(SIGMA, 1), turned(SIGMA, 2)],
    "axes": [torch.eye(10, dtype=torch.float64), torch.eye(10, dtype=torch.float64).flip(0)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("k", "kept"), [(0, 0), (1, 1), (2, 2), (3, 5), (4, 5), (5, 5), (6, 6), (7, 7), (9, 7)]
)
def test_all_equals_or_none(k, kept, dtype):
    matrix = turned(SIGMA, 4).to(dtype)
    top = truncated_svd(matrix, k, RankRule(1e-5))
    assert len(top.right) == len(top.leading) == top.left.shape[1] == kept
    assert len(truncated_svd(matrix, k, RankRule(1e-5), equals=False).right) == min(k, 7)
    assert leading_directions(matrix, k, rtol=1e-5).k == kept
    # Zeros are no equals: beyond the rank, k is what was asked for.
    assert len(truncated_svd(matrix, 8, RankRule(0.0)).right) <= 8


@pytest.mark.parametrize("name_params", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_goes_through_equals(kind, name_params):
    """Old: float32 and float64 differed by as much as the result, and so did a turned merge."""
    name, params = name_params
    method, updates = registry.get(name), KINDS[kind]
    given = method.resolve(params)
    merged = method(group_of(method, updates), **given).delta
    single = method(group_of(method, [update.float() for update in updates]), **given).delta
    assert relative(single, merged) < 1e-4
    left, right = random_rotation(10, 8), random_rotation(10, 9)
    again = method(group_of(method, [left @ u @ right.T for u in updates]), **given).delta
    if name != "knots":
        assert relative(again, left @ merged @ right.T) < 1e-6


def test_directions_that_ties_depends_on_are_counted():
    """KnOTS, Core Space with TIES and DC-Merge look at entries along them; equals have no order."""
    stats = {}
    for kind in ("orthogonal", "alike"):
        for name, params in (("knots", {}), ("core_space", {"inner": "ties"}), ("ctm", {})):
            method = registry.get(name)
            given = method.resolve(params)
            stats[kind, name] = method(group_of(method, KINDS[kind]), **given).stats
    assert stats["orthogonal", "knots"]["arbitrary"] == 10
    assert stats["orthogonal", "core_space"]["arbitrary"] == 20
    assert stats["orthogonal", "ctm"]["arbitrary"] == 20
    assert "arbitrary" not in stats["alike", "knots"]
    dc_merge = registry.get("dc_merge")
    for kind, count in (("orthogonal", 30), ("alike", 9)):
        merged = dc_merge(group_of(dc_merge, KINDS[kind]), **dc_merge.resolve({}))
        assert merged.stats["arbitrary"] == count
    assert joint_directions([torch.diag(SIGMA[:6])], rtol=1e-6).arbitrary == 3


def test_small_updates_keep_their_directions():
    """Old: 0.71 between float32 and float64 for core_space, 0.03 to 0.5 for knots."""
    generator = torch.Generator().manual_seed(0)

    def low_rank(norm, rank):
        left = torch.randn(24, rank, generator=generator, dtype=torch.float64)
        update = left @ torch.randn(rank, 30, generator=generator, dtype=torch.float64)
        return update * (norm / update.norm())

    for rank in (2, 24):
        for norms in ((1e3, 1.0, 1e-6), (1e3, 1e3, 1e-6), (0.8, 5e8, 1.1)):
            updates = [low_rank(norm, rank) for norm in norms]
            for name, params in (
                ("core_space", {}),
                ("core_space", {"inner": "ties"}),
                ("ctm", {"core_rank": 3}),
                ("ctm", {"core_rank": 3, "strength": 0.0, "inner": "tsv_m"}),
                ("ctm", {"inner": "iso_c"}),
                ("knots", {}),
                ("knots", {"space": "v"}),
                ("knots", {"concat": "outputs"}),
            ):
                single = covmerge.merge_layer([u.float() for u in updates], name, **params)
                assert relative(single, covmerge.merge_layer(updates, name, **params)) < 1e-5
