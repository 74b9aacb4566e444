"""Every measure beside its definition, typed in float64."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covmerge.base.types import LowRank
from covmerge.maths.linalg.spectral import RankRule
from covmerge.maths.measures.retention import energy_gram, retention
from covmerge.maths.measures.rounding import Lost, lost_when_stored, rounding_of
from covmerge.maths.measures.spectrum import leading, spectrum_of
from covmerge.maths.measures.sums import sums_from_json, sums_of


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1e-6, 1.0, 1e4]))
def test_sums(count, rows, columns, scale):
    base = draw(rows, columns)
    updates = [draw(rows, columns, seed=1 + t, scale=scale) for t in range(count)]
    updates[0][0] = 0.0
    found = sums_of(base, updates)
    exact = [update.double() for update in updates]
    weights = [(base + update).double() for update in updates]
    assert found.norms == pytest.approx([float(u.norm()) for u in exact], rel=1e-5)
    assert found.base_norm == pytest.approx(float(base.double().norm()), rel=1e-6)
    cosines = [
        float((base.double() * w).sum() / (base.double().norm() * w.norm())) for w in weights
    ]
    # Sums of float32 products: where W_t is far smaller than W_0 and Δ_t, digits cancel.
    assert found.cosines_with_base == pytest.approx(cosines, abs=1e-4)
    assert found.untouched == pytest.approx([float((u == 0).double().mean()) for u in exact])
    for i, j in combinations(range(count), 2):
        a, b = exact[i], exact[j]
        size = float(a.norm() * b.norm())
        assert found.cosines[i][j] == pytest.approx(
            float((a * b).sum()) / size if size else 0.0, abs=1e-5
        )
        both = (a != 0) & (b != 0)
        apart = both & (a.sign() != b.sign())
        share = int(apart.sum()) / int(both.sum()) if both.any() else 0.0
        assert found.sign_conflict[i][j] == pytest.approx(share)
    for t, (update, whole) in enumerate(zip(exact, weights, strict=True)):
        if not float(update.norm()):
            continue
        for lost, value in (
            (found.rounding_of_updates[t], update),
            (found.rounding_of_weights[t], whole),
        ):
            rounded = value.float().to(torch.bfloat16).double()
            expected = float((rounded - value).norm() / update.norm())
            assert lost == pytest.approx(expected, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sums_of_what_float32_cannot_square(size):
    base, updates = draw(30, 20, scale=size), [draw(30, 20, seed=t, scale=size) for t in (1, 2)]
    usual = sums_of(base / size, [update / size for update in updates])
    found = sums_of(base, updates)
    assert found.norms == pytest.approx([size * norm for norm in usual.norms], rel=1e-5)
    assert found.base_norm == pytest.approx(size * usual.base_norm, rel=1e-5)
    assert found.cosines[0][1] == pytest.approx(usual.cosines[0][1], abs=1e-5)
    assert found.cosines_with_base == pytest.approx(usual.cosines_with_base, abs=1e-5)
    assert found.rounding_of_updates == pytest.approx(usual.rounding_of_updates, rel=0.2)


def test_sums_add_up_over_rows_and_come_back_from_json():
    base, updates = draw(300, 500), [draw(300, 500, seed=s) for s in (1, 2, 3)]
    whole = sums_of(base, updates)
    parts = [
        sums_of(base[rows], [u[rows] for u in updates]) for rows in (slice(90), slice(90, 300))
    ]
    together = sums_from_json((parts[0] + parts[1]).as_json())
    assert together.elements == whole.elements
    for name in ("norms", "cosines", "sign_conflict", "untouched", "rounding_of_weights"):
        assert torch.tensor(getattr(together, name)) == pytest.approx(
            torch.tensor(getattr(whole, name)), rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (7, 7)])
def test_spectrum(shape):
    update = draw(*shape, scale=1e-3)
    found = spectrum_of(update)
    sigma = torch.linalg.svdvals(update.double())
    assert found.sigma.tolist() == pytest.approx(sigma.tolist(), rel=1e-4)
    shares = sigma / sigma.sum()
    assert found.effective_rank == pytest.approx(
        math.exp(-float((shares * shares.log()).sum())), 1e-4
    )
    assert found.stable_rank == pytest.approx(float(sigma.square().sum() / sigma[0] ** 2), rel=1e-4)
    k = leading(min(shape))
    energy = float(sigma[:k].square().sum() / sigma.square().sum())
    assert found.top_energy == pytest.approx(energy, rel=1e-4)
    right = torch.linalg.svd(update.double(), full_matrices=False)[2][:k]
    assert (found.inputs.double() @ right.mT).abs().det() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_adapter_has_the_spectrum_of_its_product(shape):
    adapter = LowRank(draw(shape[0], 3), draw(3, shape[1], seed=1))
    by_factors, by_product = spectrum_of(adapter), spectrum_of(adapter.dense())
    assert by_factors.sigma.tolist() == pytest.approx(by_product.sigma[:3].tolist(), rel=1e-4)
    assert by_factors.rank(1e-3) == by_product.rank(1e-3) == 3
    assert by_factors.overlap(by_product) == pytest.approx(1.0, abs=1e-4)


def test_overlap_is_one_for_the_same_inputs_and_chance_for_others():
    one, other = draw(60, 400), draw(60, 400, seed=1)
    assert spectrum_of(one).overlap(spectrum_of(draw(60, 60, seed=2) @ one)) < 0.9
    assert spectrum_of(one).overlap(spectrum_of(3 * one)) == pytest.approx(1.0, abs=1e-4)
    assert spectrum_of(one).overlap(spectrum_of(other)) < 0.05
    assert spectrum_of(one).overlap(spectrum_of(torch.zeros(60, 400))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_the_weights_does_not_count_as_rank(dtype):
    base = draw(128, 192, scale=0.05).to(dtype)
    thin = 0.1 * draw(128, 4) @ draw(4, 192, seed=1) * 0.05
    expert = (base.float() + thin).to(dtype)
    update = expert.float() - base.float()
    (error,) = rounding_of([update], [dtype], base.float())
    sigma = spectrum_of(update).sigma
    assert spectrum_of(update).rank(error.edge) == 4
    assert RankRule(1e-7, error).rank(sigma, update.shape)[0] == 4
    # What rounding did is known here: the energy to a few per cent, the edge from above.
    rounded = update - thin
    assert error.energy == pytest.approx(float(rounded.square().sum()), rel=0.1)
    assert 1.0 < error.edge / float(spectrum_of(rounded).sigma[0]) < 2.5


def test_a_spectrum_that_goes_on_below_the_edge_keeps_its_rank():
    base = draw(128, 192, scale=0.05).to(torch.bfloat16)
    whole = draw(128, 192, seed=1, scale=1e-3)
    update = (base.float() + whole).to(torch.bfloat16).float() - base.float()
    (error,) = rounding_of([update], [torch.bfloat16], base.float())
    sigma = spectrum_of(update).sigma
    assert float(sigma[-1]) < error.edge
    assert RankRule(1e-6, error).rank(sigma, update.shape)[0] == 128


def test_entries_that_did_not_change_have_no_rounding_of_their_own():
    base = draw(64, 64)
    whole = draw(64, 64, seed=1, scale=1e-9)
    part = whole * (torch.arange(64) % 4 == 0)
    errors = rounding_of([whole, part, whole], [torch.bfloat16, torch.bfloat16, None], base)
    assert errors[1].edge / errors[0].edge == pytest.approx(0.5, rel=1e-6)
    assert errors[1].energy / errors[0].energy == pytest.approx(0.25, rel=0.1)
    assert errors[2].edge == errors[2].energy == 0.0


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_retention(shape, scale):
    update, merged = draw(*shape, scale=scale), draw(*shape, seed=1, scale=scale)
    d, w = update.double(), merged.double()
    covariance = d.mT @ d
    error = w - d
    expected = 1 - float(torch.trace(error @ covariance @ error.mT)) / float(
        torch.trace(d @ covariance @ d.mT)
    )
    assert retention(merged, update) == pytest.approx(expected, rel=1e-4)
    assert retention(merged, update, energy_gram(update)) == pytest.approx(expected, rel=1e-4)


def test_retention_of_the_expert_of_nothing_and_of_other_inputs():
    update = draw(6, 9)
    assert retention(update, update) == pytest.approx(1.0)
    assert retention(torch.zeros_like(update), update) == pytest.approx(0.0, abs=1e-6)
    # What another expert does to inputs that this one has none of costs it nothing.
    _, _, inputs = torch.linalg.svd(update, full_matrices=True)
    elsewhere = draw(6, 3, seed=2) @ inputs[6:]
    assert retention(update + 100 * elsewhere, update) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("size", [3e-5, 3e-4, 3e-3, 3e-1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_update_lost_when_it_was_stored(size, dtype):
    """Rows without a change among those that were trained, and weights of many sizes."""
    base = (draw(300, 200) * 4.0 ** draw(300, 200, seed=1)).to(dtype).double()
    update = draw(300, 200, seed=2, scale=size).double()
    update[:100] = 0.0
    stored = (base + update).to(dtype).double() - base
    found = lost_when_stored(stored.float(), base.float(), dtype)
    lost, moved = (float(d.square().sum()) for d in (stored - update, update))
    assert found.energy == pytest.approx(lost, rel=0.25)
    assert found.whole == pytest.approx(max(moved, float(stored.square().sum())), rel=0.25)
    assert lost_when_stored(0 * stored, base, dtype).share == 0.0


def test_what_tensors_of_other_shapes_lost():
    base, update = draw(4096).bfloat16().float(), draw(4096, seed=1, scale=1e-3)
    stored = (base + update).bfloat16().float() - base
    whole = lost_when_stored(stored, base, torch.bfloat16)
    assert whole.energy > 0.0
    assert lost_when_stored(stored[None], base[None], torch.bfloat16) == whole
    assert whole.energy == pytest.approx(float((stored - update).square().sum()), rel=0.25)
    cube, own = stored.reshape(16, 16, 16), base.reshape(16, 16, 16)
    assert lost_when_stored(cube, own, torch.bfloat16) == whole
    one = torch.tensor(1.0)
    for none in (0 * one, torch.empty(0), torch.empty(0, 8), torch.empty(8, 0)):
        assert lost_when_stored(none, none + 1.0, torch.bfloat16) == Lost()


def test_a_weight_of_zero_has_no_rounding():
    """It is stored as it is: a pruned expert's weights are exact."""
    base = torch.full((8, 8), 0.02)
    update = base.clone()
    update[:4] = -base[:4]
    (found,), half = rounding_of([update], [torch.bfloat16], base), update[4:]
    assert found.energy == pytest.approx(rounding_of([half], [torch.bfloat16], base[4:])[0].energy)
