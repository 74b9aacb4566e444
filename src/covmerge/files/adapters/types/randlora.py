"""RandLoRA (arXiv:2502.00987): a sum of random updates of low rank that all layers share, scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape
from covmerge.files.adapters.types.vera import is_drawn


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, bases = layer.rank("lambda", 0), layer.size("lambda", 1)
    least, most = sorted((layer.d_out, layer.d_in))
    found: dict[str, Shape] = {"lambda": (rank, bases), "gamma": (bases, least)}
    if is_drawn(layer):
        return found
    return {
        **found,
        "A": (rank, 1, max(least, layer.size("A", 2))),
        "B": (max(most, layer.size("B", 0)), max(bases, layer.size("B", 1)), rank),
    }


def _shared(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    if not is_drawn(layer):
        return layer["A"], layer["B"]
    seed, sizes = layer.integer("projection_prng_key", 0), tuple(sorted(layer.widest))
    ternary = 0.0
    if layer.flag("sparse"):
        ternary = 3.0
    if layer.flag("very_sparse"):
        ternary = math.sqrt(sizes[0])
    return _drawn(seed, rank, sizes, ternary)


@lru_cache(maxsize=1)
def _drawn(seed: int, rank: int, sizes: tuple[int, ...], ternary: float) -> tuple[Tensor, Tensor]:
    """A and B of the widest layer, as PEFT draws them from its seed, of standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    bases = -(-sizes[0] // rank)
    if ternary:
        numbers = (torch.rand(rank, 1, sizes[0], generator=generator),)
        numbers += (torch.rand(sizes[1], bases, rank, generator=generator),)
        edge = 1 / (2 * ternary)
        down, up = ((drawn > 1 - edge).float() - (drawn < edge).float() for drawn in numbers)
    else:
        down = _uniform((rank, 1, sizes[0]), generator)
        parts = [_uniform((sizes[1], 1, rank), generator) for _ in range(bases)]
        up = torch.cat(parts, dim=1)
    return (down / down.std()).float(), (up / up.std()).float()


def _uniform(shape: Shape, generator: torch.Generator) -> Tensor:
    """Kaiming's uniform numbers with a = √5, in bfloat16, as every PEFT draws them that has it."""
    bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(prod(shape[1:])))
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)


def _update(layer: Layer) -> Tensor:
    """α/r · Σ B_n · Λ_n A Γ_n, A at the narrower side; the wanted rows."""
    scales, gammas = layer["lambda"], layer["gamma"]
    rank, bases = scales.shape
    narrow = min(layer.d_out, layer.d_in)
    shared = _shared(layer, rank)
    first = (scales[:, :, None] * shared[0][:, :, :narrow] * gammas).flatten(0, 1)
    # PEFT multiplies what is ordered by (rank, base) with what is ordered by (base, rank).
    wide = shared[1][: max(layer.d_out, layer.d_in), :bases].flatten(1).to(first.dtype)
    scale = layer.number("randlora_alpha", 640) / rank
    if narrow == layer.d_in:
        return (wide[layer.rows] * scale) @ first
    return (first.T[layer.rows] * scale) @ wide.T


RANDLORA = AdapterType(
    name="RANDLORA",
    equation="W + α/r·Σ B_n·Λ_n·A·Γ_n, A and B shared, saved or drawn from the seed",
    ends={
        ".randlora_lambda": "lambda",
        ".randlora_gamma": "gamma",
        ".randlora_A": "A",
        ".randlora_B": "B",
    },
    shared={"randlora_A": "A", "randlora_B": "B"},
    shapes=_shapes,
    update=_update,
    fields=frozenset(
        {
            *("r", "randlora_alpha", "save_projection", "projection_prng_key"),
            *("sparse", "very_sparse"),
        }
    ),
    unused=frozenset({"randlora_dropout", "init_weights"}),
)
