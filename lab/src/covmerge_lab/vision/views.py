"""Pictures shown another way each time: turned, nearer or farther, to a side."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from covmerge_lab.vision.canvas import SIDE


def moved(
    pictures: Tensor, generator: torch.Generator, *, most: float, padding: str = "border"
) -> Tensor:
    """Return `(n, channels, SIDE, SIDE)` of pictures of any size.

    Args:
        pictures: `(n, channels, height, width)`, as floating-point numbers.
        generator: of what is done to each.
        most: how far they move, as a share of half the picture; they turn and grow as much.
        padding: what lies outside them, as `grid_sample` has it.
    """

    def draw(*shape: int) -> Tensor:
        return most * (2 * torch.rand((len(pictures), *shape), generator=generator) - 1)

    angle, scale = draw() * math.pi / 2, (1 + draw())[:, None, None]
    turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), dim=-1)
    matrix = torch.cat((scale * turn.reshape(-1, 2, 2), draw(2, 1)), dim=-1)
    grid = affine_grid(matrix, [*pictures.shape[:2], SIDE, SIDE], align_corners=False)
    return grid_sample(pictures, grid, padding_mode=padding, align_corners=False)
