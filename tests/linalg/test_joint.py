"""The directions that several matrices have together."""

import pytest
import torch

from covmerge.base.types import Rounding
from covmerge.maths.linalg.joint import joint_directions
from tests.methods.groups import random_updates, relative


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 3)])
def test_joint_directions_are_those_of_the_matrices_side_by_side(dtype, shape):
    blocks = random_updates(*shape, 3, 2, 3.0, seed=6, dtype=dtype)
    found = joint_directions(blocks, rtol=1e-5)
    u, sigma, _ = torch.linalg.svd(torch.cat(blocks, 1).double(), full_matrices=False)
    assert torch.allclose(found.sigma, sigma[:6], rtol=1e-6)
    assert relative(found.left @ found.left.T, u[:, :6] @ u[:, :6].T) < 1e-6
    assert found.left.dtype == torch.float64


def test_blocks_of_different_widths():
    blocks = [torch.eye(4)[:, :1], 2 * torch.eye(4)[:, 1:3]]
    assert joint_directions(blocks, rtol=1e-6).sigma.tolist() == pytest.approx([2.0, 2.0, 1.0])


def test_what_rounding_gave_to_a_far_smaller_block_is_no_direction_of_it():
    small = 1e-2 * torch.diag(torch.tensor([1.0, 1e-3, 0.0, 0.0, 0.0, 0.0]))
    large = 100 * torch.diag(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]))
    assert joint_directions([large, small], rtol=1e-9).left.shape == (6, 3)
    rounding = [Rounding(), Rounding(edge=1e-4, energy=1e-9)]
    assert joint_directions([large, small], rtol=1e-9, rounding=rounding).left.shape == (6, 2)
