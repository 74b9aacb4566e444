"""CART, TSV-Merge, DC-Merge, ResMerge, Iso and FR-Merging: ranks, directions, spectra and extras."""

from dataclasses import replace

import pytest
import torch

from covmerge.base.types import LinearGroup
from covmerge.methods import registry
from tests.methods.edge_cases import HETEROG, adapters, draw
from tests.methods.groups import random_rotation, random_updates

SPECTRAL = ("cart", "tsv_m", "dc_merge", "resmerge", "iso_c", "iso_cts", "free")
ONE = draw()[0]


def merge(name, updates, **parameters):
    method = registry.get(name)
    group = LinearGroup(tuple(updates), (1.0,) * len(updates))
    return method(group, **method.resolve(parameters))


@pytest.mark.parametrize("name", SPECTRAL)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 40)])
def test_tiny_dimensions(name, shape):
    updates = draw(shape, HETEROG)
    for given in [{}, {"align": True}] if name == "free" else [{}]:
        delta = merge(name, updates, **given).delta
        assert torch.isfinite(delta).all()
        assert delta.norm() < 3 * sum(HETEROG)


def test_one_expert_keeps_its_directions():
    left, _, right = torch.linalg.svd(ONE, full_matrices=False)
    sigma = torch.linalg.svdvals(ONE)
    for name in ("cart", "tsv_m"):
        assert torch.allclose(merge(name, [ONE]).delta, ONE, atol=1e-6)
    for name in ("iso_c", "iso_cts"):
        assert torch.allclose(merge(name, [ONE]).delta, sigma.mean() * left @ right, atol=1e-5)


def test_a_frozen_layer_counts_in_the_average_of_cart():
    merged = merge("cart", [ONE, torch.zeros_like(ONE)], rank_ratio=1.0, scale=0.0)
    assert torch.allclose(merged.delta, ONE / 2)


def test_identical_experts_of_tsv_give_the_truncated_expert():
    left, sigma, right = torch.linalg.svd(ONE.double(), full_matrices=False)
    truncated = left[:, :6] @ torch.diag(sigma[:6]) @ right[:6]
    assert torch.allclose(merge("tsv_m", [ONE] * 4).delta.double(), truncated, atol=1e-6)
    assert torch.allclose(merge("tsv_m", [ONE] * 4, lossless=True).delta, ONE, atol=1e-6)


@pytest.mark.parametrize("name", ["tsv_m", "dc_merge", "iso_c", "iso_cts"])
@pytest.mark.parametrize(
    "given", [{}, {"lossless": True}, {"density": 0.2}, {"common_fraction": 0.5}]
)
def test_adapters_do_not_depend_on_the_precision(name, given):
    """Published: float32 and float64 of TSV-M differ by 80–130 % on adapters."""
    given = {key: value for key, value in given.items() if key in registry.get(name).resolve({})}
    single = merge(name, adapters(), **given).delta
    # In float64 the rounding of the float32 products is full rank: the cut-off is float32's.
    double = merge(name, [u.double() for u in adapters()], rank_rtol=5e-6, **given).delta
    assert (single - double).norm() < 1e-5 * double.norm()


@pytest.mark.parametrize("name", ["tsv_m", "dc_merge", "resmerge", "iso_c", "iso_cts"])
def test_nothing_leaves_the_rows_and_columns_of_adapters(name):
    delta = merge(name, adapters()).delta
    rows = torch.linalg.svd(torch.cat(adapters()), full_matrices=False)[2][:8]
    columns = torch.linalg.svd(torch.cat(adapters(), dim=1), full_matrices=False)[0][:, :8]
    assert (delta - delta @ rows.mT @ rows).norm() < 1e-5 * delta.norm()
    assert (delta - columns @ columns.mT @ delta).norm() < 1e-5 * delta.norm()


def test_every_expert_gets_a_direction_of_tsv():
    merged = merge("tsv_m", draw((4, 40), (0.4,) * 8))
    assert merged.stats == {"unchanged": 0, "k": 1, "directions": 8, "dependent": 0}


class TestDcMerge:
    def test_experts_that_have_nothing_in_common_are_added(self):
        """Old, had the rounding of one in the directions of another a vote: half of it."""
        left, right = (random_rotation(size, size).float() for size in (24, 40))
        strong, faint = torch.zeros(24, 40), torch.zeros(24, 40)
        strong[:8, :8], faint[8:16, 8:16] = draw((8, 8), (1.0, 1e-3))
        updates = [left @ update @ right for update in (strong, faint)]
        merged = merge("dc_merge", updates, density=1.0).delta
        for update in updates:
            inside = left.T @ (merged - update) @ right.T
            own = slice(0, 8) if update is updates[0] else slice(8, 16)
            assert inside[own, own].norm() < 1e-4 * update.norm()

    def test_one_expert_alone_is_itself_with_all_entries(self):
        assert torch.allclose(merge("dc_merge", [ONE], density=1.0).delta, ONE, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_copies_come_out_divided_by_their_number(self, dtype):
        """Published: every entry is there 16 times, and which of them comes first decides."""
        left, sigma, right = torch.linalg.svd(ONE.to(dtype), full_matrices=False)
        for density, kept in ((1.0, 6), (1e-3, 1), (17 / 576, 2)):
            merged = merge("dc_merge", [ONE.to(dtype)] * 4, density=density).delta
            expected = left[:, :kept] @ torch.diag(sigma[:kept]) @ right[:kept] / 4
            assert torch.allclose(merged, expected, atol=1e-6)

    @pytest.mark.parametrize("ratio", [1.0, 3.0])
    def test_smoothing_keeps_the_sum_of_the_singular_values(self, ratio):
        merged = merge("dc_merge", [ONE], density=1.0, smoothing=ratio).delta
        spectrum = torch.linalg.svdvals(merged)
        assert torch.allclose(spectrum.sum(), torch.linalg.svdvals(ONE).sum())
        steps = spectrum.diff()
        assert torch.allclose(steps, steps.mean(), atol=1e-6)
        assert float(spectrum[0] / spectrum[-1]) == pytest.approx(ratio, rel=1e-4)

    @pytest.mark.parametrize("seed", [0, 21, 48, 51, 78, 82])
    def test_a_cut_goes_not_through_entries_that_smoothing_made_equal(self, seed):
        """Old, without room for what float32 makes of equals: as many as it happened to."""
        update = draw((12, 12), (30.0,), seed)[0]
        merged = merge("dc_merge", [update], smoothing=1.0).delta
        assert torch.allclose(torch.linalg.svdvals(merged), torch.linalg.svdvals(update).mean())

    def test_a_line_is_no_steeper_than_the_spectrum(self):
        update = torch.diag(torch.tensor([3.0, 2.9, 2.0]))
        merged = merge("dc_merge", [update], density=1.0, smoothing=5.0).delta
        assert merged.diagonal().tolist() == pytest.approx([3.16, 2.6333333, 2.1066667])

    def test_every_expert_has_a_direction(self):
        """Published: 0 for more experts than the smaller side has entries."""
        merged = merge("dc_merge", draw((4, 40), (0.4,) * 8))
        assert merged.stats == {"unchanged": 0, "k": 1, "directions": 8, "dependent": 0}
        assert merged.delta.norm() > 0.1


class TestResMerge:
    def test_residuals_keep_their_mean_norm_at_an_exponent_of_zero(self):
        updates = [ONE + noise for noise in draw(seed=5)]
        tails = [torch.linalg.svdvals(update)[1:].norm() for update in updates]
        merged = merge("resmerge", updates, head_ratio=0.0, beta_min=0.0, beta_max=0.0)
        assert merged.delta.norm() == pytest.approx(float(sum(tails)) / 4, rel=1e-5)
        assert merged.stats["agreement"] > 0.1

    @pytest.mark.parametrize("rows", [1, 24])
    def test_updates_of_one_direction_are_averaged(self, rows):
        """Published: the layer stays the base's."""
        updates = [u[:1].repeat(rows, 1) for u in draw()]
        merged = merge("resmerge", updates)
        assert torch.allclose(merged.delta, sum(updates) / 4)
        assert (merged.stats["averaged"], merged.stats["without_residual"]) == (4, 4)

    def test_an_update_of_one_direction_has_a_head_beside_the_others_residuals(self):
        """Published: rounding is a residual like any other, and shrinks the merge."""
        alone, beside = ONE.double(), 0.1 * ONE[:1].repeat(24, 1).double()
        given = {"head_ratio": 0.0}
        merged = merge("resmerge", [alone, beside], **given)
        assert torch.allclose(merged.delta, merge("resmerge", [alone], **given).delta)
        assert merged.stats["without_residual"] == 1

    def test_heads_that_cancel_correct_nothing(self):
        """Published: what rounding leaves of them, at full length."""
        left, sigma, right = torch.linalg.svd(ONE, full_matrices=False)
        tail = left[:, 1:] @ torch.diag(sigma[1:]) @ right[1:]
        updates = [tail + size * left[:, :1] @ right[:1] for size in (9.0, 9.0, -18.0)]
        with_heads = merge("resmerge", updates)
        assert with_heads.stats["head_agreement"] == pytest.approx(1 / 3, abs=1e-3)
        assert torch.equal(with_heads.delta, merge("resmerge", updates, head_ratio=0.0).delta)

    def test_the_norm_of_the_heads_part_is_at_most_their_ratio(self):
        rest = merge("resmerge", draw(), head_ratio=0.0)
        whole = merge("resmerge", draw(), head_ratio=3.0)
        part = (whole.delta - rest.delta).norm() / rest.delta.norm()
        assert float(part) == pytest.approx(3.0 * whole.stats["head_agreement"], rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "count", "fraction", "expected"),
    [
        ((24, 40), 4, 0.8, (20, 1)),  # 24 − 19 = 5, over 4: 1
        ((30, 40), 4, 0.5, (14, 4)),  # 15 / 4 = 3.75: 4
        ((20, 40), 4, 0.5, (12, 2)),  # 10 / 4 = 2.5: half to even
        ((20, 40), 8, 0.8, (12, 1)),  # 4 / 8 = 0.5: 0, raised to 1
        ((11, 40), 4, 0.0, (0, 3)),  # 11 / 4 = 2.75: 3, one direction too many
        ((24, 40), 4, 1.0, (20, 1)),
    ],
)
def test_dimensions_of_iso_cts(shape, count, fraction, expected):
    stats = merge("iso_cts", draw(shape, (0.4,) * count), common_fraction=fraction).stats
    assert (stats["common"], stats["per_task"]) == expected


def test_an_expert_inside_the_common_directions_adds_none():
    wide = torch.zeros(6, 8)
    wide[:4, :4] = torch.diag(torch.tensor([9.0, 8.0, 7.0, 6.0]))
    small = torch.zeros(6, 8)
    small[0, 0] = 1.0
    other = torch.zeros(6, 8)
    other[4:, 4:6] = torch.diag(torch.tensor([1.0, 0.5]))  # equal ones would both be kept
    stats = merge("iso_cts", [wide, small, other], common_fraction=0.5).stats
    assert (stats["rank"], stats["common"], stats["per_task"]) == (6, 3, 1)
    assert stats["directions"] == 3 + 2


def test_a_rank_tolerance_drops_weak_directions():
    update = torch.diag(torch.tensor([1.0, 0.5, 1e-3]))
    assert merge("iso_c", [update]).stats["rank"] == 3
    merged = merge("iso_c", [update], rank_rtol=1e-2)
    assert merged.delta.diagonal().tolist() == pytest.approx([0.75, 0.75, 0.0])


def test_the_spectrum_of_iso_is_flat():
    total = torch.linalg.svdvals(sum(draw()))
    assert torch.allclose(torch.linalg.svdvals(merge("iso_c", draw()).delta), total.mean())
    spectrum = torch.linalg.svdvals(merge("iso_cts", draw()).delta)
    assert torch.allclose(spectrum, spectrum.mean(), rtol=1e-4)


def test_whole_residuals_of_cart_sum_to_zero():
    method = registry.get("cart")
    group = LinearGroup(tuple(draw()), (3.0, 1.0, 1.0, 0.5))
    whole = method(group, **method.resolve({"rank_ratio": 1.0})).delta
    average = registry.get("average")(group).delta
    assert torch.allclose(whole, average, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "kept"), [(("iso_c", "iso_cts"), 1), (("tsv_m", "dc_merge", "tsv_m"), 2)], ids=str
)
def test_one_decomposition_serves_several_methods(names, kept):
    """The spectrum of the sum; triplets of each expert and their polar factors."""
    group = LinearGroup(tuple(draw()), (1.0,) * 4)
    shared = replace(group, shared={})
    for name in names:
        method = registry.get(name)
        given = method.resolve({})
        assert torch.equal(method(shared, **given).delta, method(group, **given).delta)
    assert len(shared.shared) == kept
    tsv_m = registry.get("tsv_m")
    whole = tsv_m.resolve({"lossless": True})
    assert torch.equal(tsv_m(shared, **whole).delta, tsv_m(group, **whole).delta)


def test_the_filter_of_free_keeps_high_frequencies():
    smooth, rough = torch.ones(16, 16), torch.ones(16, 16)
    rough[::2] = -1.0
    rough[:, ::2] *= -1.0
    only_rough = merge("free", [smooth, rough], filter_ratio=0.5, scale=1.0).delta
    # The highest frequency is inside the ring, which is at distance 1: counted once.
    assert torch.allclose(only_rough, rough, atol=1e-6)


def test_aligned_experts_of_free_have_the_largest_mean():
    small, large = draw(norms=(0.1, 2.0))
    aligned = merge("free", [small, large], align=True).delta
    again = merge("free", [5 * small, large], align=True).delta
    assert torch.allclose(aligned, again, atol=1e-6)
    # Published: division by zero.
    for nothing in (torch.zeros_like(large), torch.ones_like(large)):
        merged = merge("free", [nothing, large], align=True).delta
        assert torch.allclose(merged, merge("free", [large], align=True).delta, atol=1e-6)


def test_iso_cts_says_how_many_directions_tasks_have_in_common():
    update = random_updates(16, 12, 1, 2, 1.0, seed=1)[0]
    method = registry.get("iso_cts")
    group = LinearGroup((update, update), (1.0, 1.0))
    assert method(group, **method.resolve({})).stats["dependent"] > 0


def test_sigma_of_iso_cts_is_that_of_its_flat_spectrum():
    merged = merge("iso_cts", draw(), scale=1.0)
    assert merged.stats["sigma"] == pytest.approx(float(torch.linalg.svdvals(merged.delta)[0]))
