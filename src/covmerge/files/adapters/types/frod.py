"""FRoD: the weight in coordinates that layers of one kind share, with other numbers and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, lengths

_linalg: Any = torch.linalg  # torch carries no types for it
_SHARED = ("V", "places", "size")
_NONE = 1e-12  # lengths below which PEFT takes a column for none


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("values", 0)
    square = (layer.d_in, layer.d_in)
    shapes: dict[str, Shape] = {"lengths": (layer.d_in,), "values": (count,)}
    return {**shapes, "V": square, "places": (2, count), "size": (2,)}


def _of_layer(module: str, shared: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
    """The tensors of a layer's kind, which PEFT tells by the ends of its name."""
    parts = module.split(".")
    kind = parts[-1] if len(parts) == 1 or parts[-2].isdigit() else "_".join(parts[-2:])
    if parts[-3:] == ["attention", "output", "dense"]:
        kind = "attention_output"
    return {part: shared[f"{part}.{kind}"] for part in _SHARED if f"{part}.{kind}" in shared}


def _weight(layer: Layer) -> Tensor:
    """U (diag(l) + S) Vᵀ, U the columns of W V⁻ᵀ at the length 1; whole.

    PEFT computes with U and V in the dtype of the base's file, and so rounds U to it.
    """
    shared, weight = layer["V"].double(), layer.weight
    columns = _solved(shared, weight.T.double()).T
    sizes = lengths(columns, 0)
    left = torch.where(sizes > _NONE, columns / sizes, 0.0).float().to(layer.stored).double()
    rows, others = layer["places"].long()
    inner = torch.diag(layer["lengths"].double())
    inner.index_put_((rows, others), layer["values"].double(), accumulate=True)
    return (left @ inner @ shared.T).to(weight.dtype)


def _solved(shared: Tensor, turned: Tensor) -> Tensor:
    try:
        return _linalg.solve(shared, turned)
    except RuntimeError:  # singular, as PEFT has it
        return _linalg.pinv(shared, rtol=1e-6) @ turned


FROD = AdapterType(
    name="FROD",
    equation="U·(diag(l) + S)·Vᵀ, U of W·V⁻ᵀ, S sparse, V of all layers of a kind",
    ends={".frod_lambda_l": "lengths", ".frod_lambda_s_values": "values"},
    shared={"frod_V.": "V.", "frod_s_indices.": "places.", "frod_s_size.": "size."},
    of_layer=_of_layer,
    shapes=_shapes,
    weight=_weight,
    by_rows=False,
    integers=frozenset({"places", "size"}),
    fields=frozenset({"save_projection"}),
    unused=frozenset(
        {
            *("frod_dropout", "init_weights", "progressbar", "projection_prng_key", "sparse_rate"),
            *("regularization_alpha", "runtime_offload_base_weight"),
        }
    ),
    refused={
        "save_projection": (
            False,
            "and its shared matrices are eigenvectors, whose signs are not determined",
        )
    },
)
