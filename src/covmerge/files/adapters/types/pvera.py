"""PVeRA (arXiv:2512.07703): VeRA whose inner numbers are drawn in training, and are their means after."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape
from covmerge.files.adapters.types.vera import drawn, is_drawn


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("d", 0)
    found: dict[str, Shape] = {"b": (layer.d_out,), "d": (2 * rank,)}
    if is_drawn(layer):
        return found
    found["A"] = (2 * rank, max(layer.d_in, layer.size("A", 1)))
    found["B"] = (max(layer.d_out, layer.size("B", 0)), rank)
    return found


def _factors(layer: Layer) -> LowRank:
    """diag(b) B · diag(d) A of the first r rows, which are the means."""
    rank = layer.rank("d", 0)
    if is_drawn(layer):
        seed, (d_out, d_in) = layer.integer("projection_prng_key", 0), layer.widest
        down, up = drawn(seed, (2 * rank, d_in), (d_out, rank))
    else:
        down, up = layer["A"], layer["B"]
    scales = layer["d"][:rank]
    left = up[: layer.d_out].to(scales.dtype) * layer["b"][:, None]
    return LowRank(left, down[:rank, : layer.d_in].to(scales.dtype) * scales[:, None])


PVERA = AdapterType(
    name="PVERA",
    equation="W + diag(b)·B·diag(d)·A of the means, A and B shared, saved or drawn from the seed",
    ends={".pvera_lambda_b": "b", ".pvera_lambda_d": "d"},
    shared={"pvera_A": "A", "pvera_B": "B"},
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.rank("d", 0),
    fields=frozenset({"r", "projection_prng_key", "save_projection", "sample_at_inference"}),
    unused=frozenset({"pvera_dropout", "d_initial", "generator_seed", "init_weights"}),
    refused={
        "sample_at_inference": (True, "so that each output is drawn anew, about that of the means")
    },
)
