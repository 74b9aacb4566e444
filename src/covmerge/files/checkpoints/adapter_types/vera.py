"""VeRA (arXiv:2310.11454): random factors that all layers share, each with scales of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.checkpoints.adapter_types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("d", 0)
    found: dict[str, Shape] = {"b": (layer.d_out,), "d": (rank,)}
    if _is_drawn(layer):
        return found
    found["A"] = (rank, max(layer.d_in, layer.size("A", 1)))
    found["B"] = (max(layer.d_out, layer.size("B", 0)), rank)
    return found


def _is_drawn(layer: Layer) -> bool:
    return not layer.flag("save_projection", default=True) and "A" not in layer


def _factors(layer: Layer) -> LowRank:
    """diag(b) B · diag(d) A, with the first rows and columns of the shared factors."""
    if _is_drawn(layer):
        seed = layer.integer("projection_prng_key", -1)
        down, up = _drawn(seed, layer.rank("d", 0), *layer.widest)
    else:
        down, up = layer["A"], layer["B"]
    scales = layer["d"]
    left = up[: layer.d_out].to(scales.dtype) * layer["b"][:, None]
    return LowRank(left, down[:, : layer.d_in].to(scales.dtype) * scales[:, None])


@lru_cache(maxsize=1)
def _drawn(seed: int, rank: int, d_out: int, d_in: int) -> tuple[Tensor, Tensor]:
    """The factors of the widest layer, as PEFT draws them from its seed: Kaiming's uniform numbers."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.empty(rank, d_in).uniform_(-_bound(d_in), _bound(d_in), generator=generator)
    up = torch.empty(d_out, rank).uniform_(-_bound(rank), _bound(rank), generator=generator)
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
