"""Retention as a quadratic form beside its definition, typed in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covmerge.base.types import LowRank
from covmerge.maths.measures.retention import retention
from covmerge.maths.measures.sums import quadratics


def kept(form, expert, weights):
    """What a weighted sum keeps of an expert s, 2 (Q_s w)_s − wᵀ Q_s w, as the page computes it."""
    image = form @ weights
    return float(2.0 * image[expert] - weights @ image)


def drawn(generator, shape, scale):
    return scale * torch.randn(*shape, generator=generator)


def low_rank(generator, shape, rank, scale):
    return LowRank(
        drawn(generator, (shape[0], rank), scale), drawn(generator, (rank, shape[1]), 1.0)
    )


def plain(update):
    if isinstance(update, LowRank):
        return update.left.double() @ update.right.double()
    return update.double()


def size(update):
    """‖Δ‖, or what its factors could have given: where they cancel, digits are lost."""
    if isinstance(update, LowRank):
        return float(update.left.double().norm() * update.right.double().norm())
    return float(update.double().norm())


def reference(updates, expert):
    """Tr[Δ_t Ĉ_s Δ_uᵀ] / Tr[Δ_s Ĉ_s Δ_sᵀ], entry by entry."""
    exact = [plain(update) for update in updates]
    inputs = exact[expert].mT @ exact[expert]
    whole = torch.trace(exact[expert] @ inputs @ exact[expert].mT)
    return [[float(torch.trace(a @ inputs @ b.mT) / whole) for b in exact] for a in exact]


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.sampled_from(["dense", "low"]), min_size=1, max_size=4),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e12]),
    st.integers(0, 2**20),
)
def test_every_entry(d_out, d_in, kinds, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    updates = [
        drawn(generator, (d_out, d_in), scale)
        if kind == "dense"
        else low_rank(generator, (d_out, d_in), 2, scale)
        for kind in kinds
    ]
    for expert, found in enumerate(quadratics(updates, len(updates))):
        exact = torch.tensor(reference(updates, expert), dtype=torch.float64)
        assert found.dtype == torch.float64
        assert found[expert, expert] == 1.0
        torch.testing.assert_close(found, found.mT)
        # An entry is off by rounding of what its updates could have given at most.
        sizes = torch.tensor([size(update) for update in updates], dtype=torch.float64)
        whole = (plain(updates[expert]) @ plain(updates[expert]).mT).norm() ** 2
        bound = 1e-5 * torch.outer(sizes, sizes) * sizes[expert] ** 2 / whole
        lost = bound[expert, expert]  # of what all are divided by
        assert ((found - exact).abs() <= bound + lost * exact.abs()).all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**20))
def test_what_a_sum_keeps_is_what_retention_says_of_it(d_out, d_in, seed):
    generator = torch.Generator().manual_seed(seed)
    updates = [drawn(generator, (d_out, d_in), 0.1 * 3**t) for t in range(3)]
    weights = torch.randn(3, generator=generator, dtype=torch.float64)
    merged = sum(float(w) * u for w, u in zip(weights, updates, strict=True))
    for expert, form in enumerate(quadratics(updates, 3)):
        expected = retention(merged, updates[expert])
        assert kept(form, expert, weights) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_column_may_be_of_no_expert_and_an_expert_may_have_no_update():
    one, merged = torch.ones(2, 3), torch.full((2, 3), 0.5)
    first, second = quadratics([one, torch.zeros(2, 3), merged], 2)
    assert second is None
    assert kept(first, 0, torch.tensor([0.0, 0.0, 1.0]).double()) == pytest.approx(0.75)
    assert kept(first, 0, torch.tensor([1.0, 5.0, 0.0]).double()) == pytest.approx(1.0)


def test_an_adapter_without_terms_is_no_update():
    assert quadratics([LowRank(torch.ones(2, 0), torch.ones(0, 3))], 1) == [None]
