"""VeRA (arXiv:2310.11454): random factors that all layers share, each with scales of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("d", 0)
    found: dict[str, Shape] = {"b": (layer.d_out,), "d": (rank,)}
    if is_drawn(layer):
        return found
    found["A"] = (rank, max(layer.d_in, layer.size("A", 1)))
    found["B"] = (max(layer.d_out, layer.size("B", 0)), rank)
    return found


def is_drawn(layer: Layer) -> bool:
    """Whether the shared factors were not saved."""
    return not layer.flag("save_projection", default=True) and "A" not in layer


def _factors(layer: Layer) -> LowRank:
    """diag(b) B · diag(d) A, with the first rows and columns of the shared factors."""
    if is_drawn(layer):
        seed = layer.integer("projection_prng_key", -1)
        rank, (d_out, d_in) = layer.rank("d", 0), layer.widest
        down, up = drawn(seed, (rank, d_in), (d_out, rank))
    else:
        down, up = layer["A"], layer["B"]
    scales = layer["d"]
    left = up[: layer.d_out].to(scales.dtype) * layer["b"][:, None]
    return LowRank(left, down[:, : layer.d_in].to(scales.dtype) * scales[:, None])


@lru_cache(maxsize=1)
def drawn(seed: int, first: Shape, second: Shape) -> tuple[Tensor, Tensor]:
    """A and B of the widest layer, as PEFT draws them from its seed: Kaiming's uniform numbers."""
    generator = torch.Generator().manual_seed(seed)
    down, up = (
        torch.empty(shape).uniform_(-_bound(shape[1]), _bound(shape[1]), generator=generator)
        for shape in (first, second)
    )
    return down, up


def _bound(fan_in: int) -> float:
    return math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(fan_in))


VERA = AdapterType(
    name="VERA",
    equation="W + diag(b)·B·diag(d)·A, A and B shared, saved or drawn from the seed",
    ends={".vera_lambda_b": "b", ".vera_lambda_d": "d"},
    shared={"vera_A": "A", "vera_B": "B"},
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.rank("d", 0),
    fields=frozenset({"r", "projection_prng_key", "save_projection"}),
    unused=frozenset({"vera_dropout", "d_initial", "init_weights"}),
)
