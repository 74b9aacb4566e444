"""The dispatch table: what is chosen is what costs least, and is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge import merge_layer
from covmerge.maths.linalg import auto
from covmerge.maths.linalg.pinv import largest_eigenvalue, pinv_right, solve_full_rank
from covmerge.maths.linalg.spectral import RankRule

dims = st.integers(1, 6000)


@settings(max_examples=200, deadline=None)
@given(d_out=dims, d_in=dims, count=st.integers(1, 32), itemsize=st.sampled_from([4, 8]))
def test_every_choice_names_one_of_its_routes(d_out, d_in, count, itemsize):
    for choice in auto.routes(d_out, d_in, count, itemsize, rank=8):
        assert choice.taken in choice.routes
        assert all(c.flops > 0 and c.workspace >= 0 for c in choice.routes.values())


@settings(max_examples=200, deadline=None)
@given(d_out=dims, d_in=dims, count=st.integers(1, 32))
def test_the_cheaper_system_is_chosen(d_out, d_in, count):
    choice = auto.system_choice(d_out, d_in, count, 4)
    cheaper = min(choice.routes, key=lambda name: choice.routes[name].flops)
    assert choice.taken == cheaper or (cheaper == "dual" and count * d_out >= d_in)


@pytest.mark.parametrize(
    ("shape", "count", "taken"),
    [((8, 64), 3, "dual"), ((64, 8), 3, "primal"), ((8, 64), 12, "primal")],
)
def test_the_route_is_told(shape, count, taken):
    assert auto.system_choice(*shape, count, 4).taken == taken


@pytest.mark.parametrize(("shape", "taken"), [((768, 3072), "outer"), ((3072, 768), "inner")])
def test_the_order_of_products(shape, taken):
    assert auto.cube_choice(*shape, 4).taken == taken


def spectrum(values, dtype=torch.float64):
    n = len(values)
    generator = torch.Generator().manual_seed(n)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return ((q * torch.tensor(values, dtype=torch.float64)) @ q.T).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 5, 40, 400])
def test_the_largest_eigenvalue_from_below(n):
    values = [1.0 / (i + 1) for i in range(n)]
    found = largest_eigenvalue(spectrum(values))
    assert 0.95 < found <= 1.0 + 1e-12


def test_the_largest_eigenvalue_of_nothing():
    assert largest_eigenvalue(torch.zeros(4, 4)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_rank_is_solved_without_eigenvalues(dtype):
    system = spectrum([1.0, 0.5, 0.1, 0.02], dtype)
    rows = torch.ones(2, 4, dtype=dtype)
    solved = solve_full_rank(system, rows, RankRule(1e-6))
    expected, rank = pinv_right(system, rows, RankRule(1e-6))
    assert rank == 4
    assert torch.allclose(solved, expected, rtol=1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize(
    ("values", "rtol"),
    [
        ([1.0, 0.5, 1e-9], 1e-6),  # cut off
        ([1.0, 0.5, 1.05e-3], 1e-3),  # too near the cut-off to say
        ([1.0, 0.5, 0.0], 0.0),  # singular, and nothing is to be cut off
        ([0.0, 0.0], 1e-6),
    ],
)
def test_what_the_cut_off_may_decide_is_left_to_the_eigenvalues(values, rtol):
    system = spectrum(values)
    assert (
        solve_full_rank(system, torch.ones(1, len(values), dtype=torch.float64), RankRule(rtol))
        is None
    )


def test_float32_leaves_bad_conditions_to_float64():
    values, rows = [1.0, 0.5, 1e-4], torch.ones(1, 3)
    assert solve_full_rank(spectrum(values, torch.float32), rows, RankRule(1e-6)) is None
    assert solve_full_rank(spectrum(values), rows.double(), RankRule(1e-6)) is not None


def updates(ratio, count=4, n=48):
    """Updates whose ΣΔᵀΔ has about this ratio of eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        p, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        found.append((q * torch.logspace(0, ratio / 2, n, dtype=torch.float64)) @ p.T)
    basis = torch.logspace(0, ratio / 2, n, dtype=torch.float64)
    return [update * basis for update in found]


@pytest.mark.parametrize("method", ["actmat", "wudi"])
@pytest.mark.parametrize(
    ("ratio", "solver"), [(0.0, "cholesky32"), (-4.0, "cholesky64"), (-12.0, "eigen64")]
)
def test_each_solver_gives_the_answer_of_float64(method, ratio, solver):
    from covmerge.base.types import LinearGroup
    from covmerge.methods import registry

    exact = updates(ratio)
    single = tuple(update.float() for update in exact)
    rtol = 1e-9
    found = registry.get(method)(LinearGroup(single, (1.0,) * 4), rtol=rtol)
    double = [update.double() for update in single]
    expected = merge_layer(double, method, stored=torch.float64, rtol=rtol)
    assert found.stats["solver"] == solver
    error = (found.delta.double() - expected).norm() / expected.norm()
    assert error < 2e-5
