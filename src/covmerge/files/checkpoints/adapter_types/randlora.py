"""RandLoRA (arXiv:2502.00987): a sum of random updates of low rank that all layers share, scaled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from covmerge.files.checkpoints.adapter_types.layer import AdapterType, Layer, Shape


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    if "A" not in layer:
        layer.refuse(
            "has its scales alone, and the random factors were not saved (save_projection: false): merge "
            "it into its base with PEFT (model.merge_and_unload()), save the model, and merge full models"
        )
    rank, bases = layer.rank("lambda", 0), layer.size("lambda", 1)
    least, most = sorted((layer.d_out, layer.d_in))
    return {
        "lambda": (rank, bases),
        "gamma": (bases, least),
        "A": (rank, 1, max(least, layer.size("A", 2))),
        "B": (max(most, layer.size("B", 0)), max(bases, layer.size("B", 1)), rank),
    }


def _update(layer: Layer) -> Tensor:
    """α/r · Σ B_n · Λ_n A Γ_n, A at the narrower side; the wanted rows."""
    scales, gammas = layer["lambda"], layer["gamma"]
    rank, bases = scales.shape
    narrow = min(layer.d_out, layer.d_in)
    first = (scales[:, :, None] * layer["A"][:, :, :narrow] * gammas).flatten(0, 1)
    # PEFT multiplies what is ordered by (rank, base) with what is ordered by (base, rank).
    wide = layer["B"][: max(layer.d_out, layer.d_in), :bases].flatten(1)
    scale = layer.number("randlora_alpha", 640) / rank
    if narrow == layer.d_in:
        return (wide[layer.rows] * scale) @ first
    return (first.T[layer.rows] * scale) @ wide.T


RANDLORA = AdapterType(
    name="RANDLORA",
    equation="W + α/r·Σ B_n·Λ_n·A·Γ_n, A and B shared and saved",
    ends={
        ".randlora_lambda": "lambda",
        ".randlora_gamma": "gamma",
        ".randlora_A": "A",
        ".randlora_B": "B",
    },
    shared={"randlora_A": "A", "randlora_B": "B"},
    shapes=_shapes,
    update=_update,
    fields=frozenset({"r", "randlora_alpha", "save_projection"}),
    unused=frozenset(
        {"projection_prng_key", "sparse", "very_sparse", "randlora_dropout", "init_weights"}
    ),
)
