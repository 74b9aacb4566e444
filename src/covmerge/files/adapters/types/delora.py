"""DeLoRA (arXiv:2503.18225): an update of low rank whose terms have a length of their own."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, lengths


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("A", 0)
    return {
        "A": (rank, layer.d_in),
        "B": (layer.d_out, rank),
        "lambda": (1,),
        "w_norm": (layer.d_in,),
    }


def _factors(layer: Layer) -> LowRank:
    """λ/r · B diag(1 / (‖A_i‖ ‖B_i‖)) A diag(w), w the norms of the base's columns when it was begun."""
    down, up = layer["A"], layer["B"]
    sizes = lengths(down, 1).clamp(min=1e-4).view(-1) * lengths(up, 0).clamp(min=1e-4).view(-1)
    return LowRank(up * (layer["lambda"] / len(down) / sizes), down * layer["w_norm"])


DELORA = AdapterType(
    name="DELORA",
    equation="W + λ/r·B·diag(1/(‖A_i‖·‖B_i‖))·A·diag(w)",
    ends={
        ".delora_A": "A",
        ".delora_B": "B",
        ".delora_lambda": "lambda",
        ".delora_w_norm": "w_norm",
    },
    shapes=_shapes,
    factors=_factors,
    rank=lambda layer: layer.rank("A", 0),
    fields=frozenset({"r", "rank_pattern"}),
    unused=frozenset({"delora_lambda", "lambda_pattern", "module_dropout", "init_weights"}),
)
