"""What is to become of an update, where that is not the update itself: ℓ in Σ ℓRC."""

import pytest
import torch

from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.mixed import solve_mixed
from covmerge.maths.covariance.normal import normal_equations
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.methods.closed_form import solve_ridge

LENGTHS = (0.3, 1.0, 2.0)


def covariances(d_out, d_in, strong, dtype):
    """Three experts; `strong`: each has one direction of its own that has most of the energy."""
    draw = torch.Generator().manual_seed(0)
    updates = [torch.randn(d_out, d_in, generator=draw, dtype=torch.float64) for _ in LENGTHS]
    for update in updates:
        ends = (torch.randn(size, generator=draw, dtype=torch.float64) for size in (d_out, d_in))
        update += strong * torch.outer(*ends)
    return [
        Covariance(u, scale=1.0 / norm(u) ** 2, ridge=0.1 / d_in, length=own)
        for u, own in zip((u.to(dtype) for u in updates), LENGTHS, strict=True)
    ]


def expected(found):
    roots = [own.update.double() for own in found]
    d_in = roots[0].shape[1]
    eye = torch.eye(d_in, dtype=torch.float64)
    c = [own.scale * r.T @ r + own.ridge * eye for own, r in zip(found, roots, strict=True)]
    numerator = sum(own.length * r @ m for own, r, m in zip(found, roots, c, strict=True))
    return torch.linalg.solve(sum(c), numerator, left=False)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (8, 200)])  # the last by the dual system
def test_by_the_normal_equations(shape):
    found = covariances(*shape, 0.0, torch.float64)
    torch.testing.assert_close(solve_ridge(normal_equations(found))[0], expected(found))


@pytest.mark.parametrize("strong", [0.0, 30.0])  # with leading inputs of float64 and without
def test_in_two_precisions(strong):
    found = covariances(320, 256, strong, torch.float32)
    solved = solve_mixed(found, energy=3.0, floor=1e-9)
    assert solved is not None
    wanted = expected(found)
    assert float((solved - wanted).norm() / wanted.norm()) < 2e-5
