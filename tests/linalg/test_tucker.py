"""Tucker-2: bases of few directions that hold most of several matrices."""

import pytest
import torch

from covmerge.maths.linalg.joint import joint_directions, tucker2
from tests.methods.groups import random_updates, relative

SHAPES = [(20, 20), (12, 40), (40, 12), (1, 9), (9, 1)]


def held(blocks, left, right):
    kept = sum(float((left.mT @ block @ right).square().sum()) for block in blocks)
    return kept / sum(float(block.square().sum()) for block in blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_bases_are_orthonormal_and_hold_what_they_say(shape, count, rank):
    blocks = random_updates(*shape, count, min(shape), 3.0, seed=1)
    found = tucker2(blocks, rank, rtol=1e-12)
    for basis, side in zip((found.left.left, found.right.left), shape, strict=True):
        k = basis.shape[1]
        assert k <= min(rank, side)
        assert relative(basis.mT @ basis, torch.eye(k, dtype=torch.float64)) < 1e-12
    assert found.energy == pytest.approx(held(blocks, found.left.left, found.right.left))
    if rank >= max(shape):
        assert found.energy == pytest.approx(1.0)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_of_one_matrix_they_are_its_singular_vectors(shape):
    (block,) = random_updates(*shape, 1, min(shape), 1.0, seed=2)
    found = tucker2([block], 3, rtol=1e-12)
    sigma = torch.linalg.svdvals(block)
    assert relative(found.left.sigma, sigma[:3]) < 1e-12
    assert relative(found.right.sigma, sigma[:3]) < 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_they_hold_more_than_the_leading_directions_side_by_side(seed):
    """HOOI only ever adds to what HOSVD holds, and ends where neither basis can be bettered."""
    blocks = random_updates(16, 24, 4, 3, 3.0, seed=seed)
    found = tucker2(blocks, 4, rtol=1e-12)
    first = [
        joint_directions(each, rtol=1e-12).first(4).left
        for each in (blocks, [block.mT for block in blocks])
    ]
    assert found.energy > held(blocks, *first) + 1e-4
    again = joint_directions([block @ found.right.left for block in blocks], rtol=1e-12).first(4)
    assert held(blocks, again.left, found.right.left) < found.energy + 1e-5


def test_equals_of_the_last_are_kept():
    blocks = [torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.5], dtype=torch.float64))] * 2
    found = tucker2(blocks, 2, rtol=1e-12)
    assert found.left.left.shape == found.right.left.shape == (4, 3)


def test_a_matrix_that_is_small_beside_another_has_directions_too():
    large = torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    small = 1e-12 * torch.diag(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    found = tucker2([large.float(), small.float()], 3, rtol=1e-6)
    assert found.left.left.shape == found.right.left.shape == (3, 2)
