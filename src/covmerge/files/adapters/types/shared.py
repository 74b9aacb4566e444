"""Types whose layers share tensors and have only a few numbers of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor

from covmerge.base.types import LowRank, TensorHeader
from covmerge.files.adapters.types.layer import (
    AdapterType,
    Layer,
    Shape,
    check_places,
    lengths,
    linalg,
)

# VeRA (arXiv:2310.11454): all layers share random factors, and each layer has its own scales.


def _vera_shapes(layer: Layer, inner: int = 1) -> Mapping[str, Shape]:
    rank = layer.rank("d", 0)
    found: dict[str, Shape] = {"b": (layer.d_out,), "d": (inner * rank,)}
    if is_drawn(layer):
        return found
    found["A"] = (inner * rank, max(layer.d_in, layer.size("A", 1)))
    found["B"] = (max(layer.d_out, layer.size("B", 0)), rank)
    return found


def is_drawn(layer: Layer) -> bool:
    """Return whether the shared factors were not saved, so that they must be drawn from the seed."""
    return not layer.flag("save_projection", default=True) and "A" not in layer


def _vera_factors(layer: Layer, inner: int = 1, seed: int = -1) -> LowRank:
    """Return diag(b) B · diag(d) A, using the first rows of the shared B and the first columns of A.

    A has `inner` rows for each rank, of which the first r are used. `seed` stands for a config without one.
    """
    rank = layer.rank("d", 0)
    if is_drawn(layer):
        d_out, d_in = layer.widest
        known = layer.integer("projection_prng_key", seed)
        down, up = drawn(known, (inner * rank, d_in), (d_out, rank))
    else:
        down, up = layer["A"], layer["B"]
    scales = layer["d"][:rank]
    left = up[: layer.d_out].to(scales.dtype) * layer["b"][:, None]
    return LowRank(left, down[:rank, : layer.d_in].to(scales.dtype) * scales[:, None])


@lru_cache(maxsize=1)
def drawn(seed: int, first: Shape, second: Shape) -> tuple[Tensor, Tensor]:
    """Return A and B of the widest layer as PEFT draws them from its seed, Kaiming-uniform."""
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
    shapes=_vera_shapes,
    factors=_vera_factors,
    rank=lambda layer: layer.rank("d", 0),
    fields=("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial"),
)


# PVeRA (arXiv:2512.07703): VeRA whose inner numbers are random in training; afterwards their means
# are used. They are the first half of the rows, and the variances are the second.


PVERA = AdapterType(
    name="PVERA",
    equation="W + diag(b)·B·diag(d)·A of the means, A and B shared, saved or drawn from the seed",
    ends={".pvera_lambda_b": "b", ".pvera_lambda_d": "d"},
    shared={"pvera_A": "A", "pvera_B": "B"},
    shapes=partial(_vera_shapes, inner=2),
    factors=partial(_vera_factors, inner=2, seed=0),
    rank=lambda layer: layer.rank("d", 0),
    fields=(
        *("r", "projection_prng_key", "save_projection", "sample_at_inference", "pvera_dropout"),
        *("d_initial", "generator_seed"),
    ),
    refused=(
        "sample_at_inference",
        True,
        "so that each output is drawn anew, about that of the means",
    ),
)


# RandLoRA (arXiv:2502.00987): a scaled sum of random low-rank updates that all layers share.


def _randlora_shapes(layer: Layer) -> Mapping[str, Shape]:
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
    return _randlora_drawn(seed, rank, sizes, ternary)


@lru_cache(maxsize=1)
def _randlora_drawn(
    seed: int, rank: int, sizes: tuple[int, ...], ternary: float
) -> tuple[Tensor, Tensor]:
    """Return A and B of the widest layer as PEFT draws them from its seed, with standard deviation 1."""
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
    """Return Kaiming-uniform numbers with a = √5, in bfloat16, as in every PEFT that has RandLoRA."""
    bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(prod(shape[1:])))
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)


def _update(layer: Layer) -> Tensor:
    """Return the wanted rows of α/r · Σ B_n · Λ_n A Γ_n; A is on the narrower side."""
    scales, gammas = layer["lambda"], layer["gamma"]
    rank, bases = scales.shape
    narrow = min(layer.d_out, layer.d_in)
    shared = _shared(layer, rank)
    first = (scales[:, :, None] * shared[0][:, :, :narrow] * gammas).flatten(0, 1)
    # As in PEFT, the orders differ: columns of `wide` are ordered by (base, rank), rows of `first`
    # by (rank, base).
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
    shapes=_randlora_shapes,
    update=_update,
    fields=(
        *("r", "randlora_alpha", "save_projection", "projection_prng_key", "sparse"),
        *("very_sparse", "randlora_dropout"),
    ),
)


# VB-LoRA (arXiv:2405.15179): factors of LoRA composed of vectors from one bank.


def _vblora_shapes(layer: Layer) -> Mapping[str, Shape]:
    count, length = layer.size("bank", 0), layer.size("bank", 1)
    if not length or layer.d_in % length or layer.d_out % length:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which vectors of {length} do not divide: pass the base "
            "that the adapter was trained on"
        )
    topk = layer.integer("topk", 2, 1)
    rank = _rank(layer)
    down, up = (rank, layer.d_in // length), (layer.d_out // length, rank)
    found: dict[str, Shape] = {"bank": (count, length)}
    for side, tiles in (("A", down), ("B", up)):
        if f"{side}_indices" in layer:
            found |= {f"{side}_indices": (*tiles, topk), f"{side}_weights": (*tiles, topk - 1)}
        else:
            found[side] = (*tiles, count)
    return found


def _rank(layer: Layer) -> int:
    return layer.size("A", 0) or layer.size("A_indices", 0)


def _vblora_factors(layer: Layer) -> LowRank:
    rank = _rank(layer)
    down = _vectors(layer, "A").reshape(rank, layer.d_in)
    up = _vectors(layer, "B").transpose(1, 2).reshape(layer.d_out, rank)
    return LowRank(up, down)


def _vectors(layer: Layer, side: str) -> Tensor:
    """Return sums of the k vectors with the largest logits, weighted by the softmax of these logits."""
    bank, topk = layer["bank"], layer.integer("topk", 2, 1)
    if f"{side}_indices" in layer:
        indices, weights = layer[f"{side}_indices"].long(), layer[f"{side}_weights"]
        weights = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], dim=-1)
    else:
        if topk > len(bank):
            layer.refuse(
                f"is put together of {topk} vectors of a bank of {len(bank)}: correct topk"
            )
        logits, indices = layer[side].topk(topk, dim=-1)
        weights = logits.softmax(dim=-1)
    check_places(layer, indices, len(bank))
    total = bank.new_zeros(*indices.shape[:-1], bank.shape[1])
    for i in range(indices.shape[-1]):
        total += weights[..., i, None].to(bank.dtype) * bank[indices[..., i]]
    return total


_PARTS = {"": "", "_topk_indices": "_indices", "_topk_weights": "_weights"}
VBLORA = AdapterType(
    name="VBLORA",
    equation="W + B·A, both of the bank's vectors with the largest logits",
    ends={f".vblora_logits_{s}{end}": f"{s}{p}" for s in "AB" for end, p in _PARTS.items()},
    shared={"vblora_vector_bank": "bank"},
    shapes=_vblora_shapes,
    factors=_vblora_factors,
    rank=_rank,
    integers=frozenset({"A_indices", "B_indices"}),
    fields=(
        *("r", "topk", "num_vectors", "vector_length", "save_only_topk_weights", "vblora_dropout"),
        *("init_vector_bank_bound", "init_logits_std"),
    ),
)


# Uni-LoRA (arXiv:2506.00799): factors of LoRA whose numbers all come from one vector, scaled.


def _unilora_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("A_indices", 0)
    down, up = (rank, layer.d_in), (layer.d_out, rank)
    numbers = (layer.integer("theta_d_length", 256, least=1),)
    return {"theta": numbers, "A_indices": down, "A": down, "B_indices": up, "B": up}


def _unilora_factors(layer: Layer) -> LowRank:
    theta = layer["theta"]
    return LowRank(_side(layer, theta, "B"), _side(layer, theta, "A"))


def _side(layer: Layer, theta: Tensor, side: str) -> Tensor:
    places = layer[f"{side}_indices"].long()
    check_places(layer, places, len(theta))
    return theta[places] * layer[side]


UNILORA = AdapterType(
    name="UNILORA",
    equation="W + B·A, the numbers of both those of one vector at saved places, scaled",
    ends={
        ".unilora_indices_A": "A_indices",
        ".unilora_indices_B": "B_indices",
        ".unilora_scales_A": "A",
        ".unilora_scales_B": "B",
    },
    shared={"unilora_theta_d": "theta"},
    shapes=_unilora_shapes,
    factors=_unilora_factors,
    rank=lambda layer: layer.rank("A_indices", 0),
    integers=frozenset({"A_indices", "B_indices"}),
    fields=(
        *("r", "theta_d_length", "save_indices", "proj_seed", "init_theta_d_bound"),
        *("unilora_dropout",),
    ),
    refused=(
        "save_indices",
        False,
        "and the places are drawn for the layers in the order of the model's modules, not saved",
    ),
)


# TinyLoRA (arXiv:2602.04118): a few numbers that mix random matrices between frozen factors.


def _tinylora_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, count = layer.size("A", 0), layer.integer("u", 64, least=1)
    vectors: dict[str, Shape] = {part: (count,) for part in layer.parts if part.startswith("v.")}
    square = (count, rank, rank)
    return {"A": (rank, layer.d_in), "B": (layer.d_out, rank), "P": square, **vectors}


def _tinylora_factors(layer: Layer) -> LowRank:
    mixed = torch.einsum("i,ijk->jk", layer[f"v.{_group(layer)}"], layer["P"])
    return LowRank(layer["B"] @ mixed, layer["A"])


def _group(layer: Layer) -> int:
    """Return the number of the layer's vector; layers share vectors in the order of the model's modules."""
    tying = layer.number("weight_tying", 0.0)
    groups = max(1, round(layer.count * (1 - tying)))
    if any(f"v.{number}" not in layer for number in range(groups)):
        layer.refuse(f"is one of {layer.count} that share {groups} vectors, and fewer are stored")
    return 0 if groups == 1 else min(_place(layer) // max(1, layer.count // groups), groups - 1)


def _place(layer: Layer) -> int:
    """Return the layer's number among all layers, found by the seed of its random matrices."""
    stored = layer["P"]
    seed, std = layer.integer("projection_seed", 42), stored.shape[1] ** -0.5
    for number in range(layer.count):
        generator = torch.Generator().manual_seed(seed + number)
        drawn = torch.normal(0.0, std, stored.shape, generator=generator).to(stored.dtype)
        if torch.allclose(drawn, stored, rtol=1e-2, atol=1e-2):
            return number
    layer.refuse(
        "has random matrices that torch does not draw here from any layer's seed, so that its vector is "
        "not known: merge it into its base with PEFT (model.merge_and_unload()), save the model, and merge "
        "full models"
    )


TINYLORA = AdapterType(
    name="TINYLORA",
    equation="W + B·(Σ v_i·P_i)·A, A, B and P saved, v by the layer's place",
    ends={".tinylora_A": "A", ".tinylora_B": "B", ".tinylora_P": "P"},
    shared={"tinylora_v.": "v."},
    shapes=_tinylora_shapes,
    factors=_tinylora_factors,
    rank=lambda layer: layer.size("A", 0),
    fields=(
        *("r", "u", "weight_tying", "projection_seed", "save_projection", "tinylora_dropout"),
        *("init_v_bound",),
    ),
    refused=(
        "save_projection",
        False,
        "so that nothing tells a layer's place among the model's modules, which its vector goes by",
    ),
)


# FRoD: the weight in a basis that layers of one kind share, with new diagonal and sparse coefficients.

_SHARED = ("V", "places", "size")
_NONE = 1e-12  # PEFT treats shorter columns as zero


def _frod_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("values", 0)
    own: dict[str, Shape] = {"lengths": (layer.d_in,), "values": (count,)}
    return {**own, "V": (layer.d_in, layer.d_in), "places": (2, count), "size": (2,)}


def _of_layer(module: str, shared: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
    """Return the shared tensors of a layer's kind; PEFT tells the kind by the end of the layer's name."""
    parts = module.split(".")
    kind = parts[-1] if len(parts) == 1 or parts[-2].isdigit() else "_".join(parts[-2:])
    if parts[-3:] == ["attention", "output", "dense"]:
        kind = "attention_output"
    return {part: shared[f"{part}.{kind}"] for part in _SHARED if f"{part}.{kind}" in shared}


def _weight(layer: Layer) -> Tensor:
    """Return U (diag(l) + S) Vᵀ, a whole matrix; U has the columns of W V⁻ᵀ scaled to length 1.

    PEFT computes with U and V in the dtype of the base's file, so U is rounded to that dtype.
    """
    shared, weight = layer["V"].double(), layer.weight
    turned = weight.T.double()
    try:
        columns = linalg.solve(shared, turned).T
    except RuntimeError:  # singular; PEFT does the same
        columns = (linalg.pinv(shared, rtol=1e-6) @ turned).T
    sizes = lengths(columns, 0)
    left = torch.where(sizes > _NONE, columns / sizes, 0.0).float().to(layer.stored).double()
    rows, others = layer["places"].long()
    inner = torch.diag(layer["lengths"].double())
    inner.index_put_((rows, others), layer["values"].double(), accumulate=True)
    return (left @ inner @ shared.T).to(weight.dtype)


FROD = AdapterType(
    name="FROD",
    equation="U·(diag(l) + S)·Vᵀ, U of W·V⁻ᵀ, S sparse, V of all layers of a kind",
    ends={".frod_lambda_l": "lengths", ".frod_lambda_s_values": "values"},
    shared={"frod_V.": "V.", "frod_s_indices.": "places.", "frod_s_size.": "size."},
    of_layer=_of_layer,
    shapes=_frod_shapes,
    weight=_weight,
    by_rows=False,
    integers=frozenset({"places", "size"}),
    fields=(
        *("save_projection", "frod_dropout", "progressbar", "projection_prng_key", "sparse_rate"),
        *("regularization_alpha", "runtime_offload_base_weight"),
    ),
    refused=(
        "save_projection",
        False,
        "and its shared matrices are eigenvectors, whose signs are not determined",
    ),
)

TYPES = (FROD, PVERA, RANDLORA, TINYLORA, UNILORA, VBLORA, VERA)
