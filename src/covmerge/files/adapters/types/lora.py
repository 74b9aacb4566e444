"""LoRA's relatives: low-rank products with separate lengths, other starts, or a part of the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, lengths, linalg
from covmerge.files.adapters.types.lycoris import LOCON
from covmerge.files.checkpoints.json_file import as_object

# Removal of singular components of a base's weight, for the types that do this before they add an
# update.

_BLOCK = 1024  # columns at a time, so that no second tensor of the weight's size is needed


def without_components(weight: Tensor, count: int, *, smallest: bool) -> Tensor:
    """Remove a matrix's largest or smallest singular components, in place.

    The singular vectors are computed in float64 from the Gram matrix of the shorter side.
    """
    narrow: Tensor = weight.T if weight.shape[0] > weight.shape[1] else weight
    starts = range(0, narrow.shape[1], _BLOCK)
    blocks = [narrow[:, start : start + _BLOCK] for start in starts]
    gram = torch.zeros(len(narrow), len(narrow), dtype=torch.float64)
    for block in blocks:
        exact = block.double()
        gram.addmm_(exact, exact.T)
    vectors = cast("Tensor", linalg.eigh(gram)[1])
    chosen = vectors[:, :count] if smallest else vectors[:, len(narrow) - count :]
    for block in blocks:
        exact = block.double()
        block.copy_(exact.sub_(chosen @ (chosen.T @ exact)))
    return weight


# DoRA (arXiv:2402.09353): the update gives the direction of each row of the weight, a magnitude its
# length.

MAGNITUDE = "magnitude"


@cache
def with_magnitude(kind: AdapterType, *, columns: bool = False) -> AdapterType:
    """Return the type whose update gives the direction of rows, and a vector their lengths, Eq. 5.

    Args:
        kind: the type that gives the direction.
        columns: whether the lengths are of columns (one for each input), as in LyCORIS with
            wd_on_out=False. One number for the one row of a layer is of the row.
    """

    def by_columns(layer: Layer) -> bool:
        return columns and not layer.parts[MAGNITUDE].numel == 1 == layer.d_out

    def shapes(layer: Layer) -> Mapping[str, Shape]:
        length = layer.d_in if by_columns(layer) else layer.d_out
        return {**kind.shapes(layer), MAGNITUDE: layer.vector(MAGNITUDE, length)}

    def direction(layer: Layer) -> Tensor:
        if kind.weight is not None:
            return kind.weight(layer)
        if kind.update is None:
            layer.refuse(f"has a magnitude, which no {kind.name} has: fetch the adapter again")
        return layer.weight.add_(kind.update(layer))

    def weight(layer: Layer) -> Tensor:
        return _rescaled(layer, direction(layer), columns=by_columns(layer))

    return replace(
        kind,
        name=f"{kind.name} with magnitudes (DoRA)",
        equation=f"m ⊙ V / ‖V‖ by {'columns' if columns else 'rows'}, V = {kind.equation}",
        shapes=shapes,
        update=None,
        factors=None,
        weight=weight,
        by_rows=kind.by_rows and not columns,
    )


def _rescaled(layer: Layer, weight: Tensor, *, columns: bool) -> Tensor:
    if not columns:
        return weight.mul_(layer[MAGNITUDE].reshape(-1, 1)[layer.rows] / lengths(weight, 1))
    channels, before = (w.view(layer.d_out, layer.d_in, -1) for w in (weight, layer.weight))
    magnitudes = layer[MAGNITUDE].view(1, -1, 1)
    # LyCORIS 2.2.0 had means in place of lengths. Training begins at those of the base.
    of_means, of_lengths = ((magnitudes - size(before)).abs().sum() for size in (_means, _lengths))
    size = _means if of_means < of_lengths else _lengths
    return channels.mul_(magnitudes / size(channels)).view(weight.shape)


def _lengths(channels: Tensor) -> Tensor:
    return lengths(channels, 0, 2)


def _means(channels: Tensor) -> Tensor:
    return channels.mean(dim=(0, 2), keepdim=True, dtype=torch.float64).to(channels.dtype)


# PiSSA (arXiv:2404.02948) and OLoRA (arXiv:2406.01775): LoRA whose factors start as a part of the
# weight. KaSA (arXiv:2412.06071): LoRA with singular values, on a weight without its smallest components.

DIAGONAL = "diagonal"


def _pissa_shapes(layer: Layer) -> Mapping[str, Shape]:
    if len(layer.shape) != 2:
        layer.refuse("is no linear layer, and PEFT begins no other as a part of the weight")
    return LOCON.shapes(layer)


def _kasa_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("down", 0)
    if len(layer.shape) != 2 or rank >= min(layer.shape):
        layer.refuse(f"is {list(layer.shape)} in the base, of which KaSA takes {rank} away")
    return {"down": (rank, layer.d_in), "up": (layer.d_out, rank), DIAGONAL: (rank,)}


def _rank(layer: Layer) -> int:
    """Return the rank for the scale: the stored one, or the configured one if the layer limits that."""
    stored, asked = layer.size("down", 0), layer.rank("down", 0)
    return asked if stored == min(layer.shape) < asked else stored


def _without_columns(layer: Layer) -> Tensor:
    """Return W − s Q_r R_r with W = Q R; Q_r R_r is W's part in the span of its first r columns."""
    weight, rank = layer.weight, layer.size("down", 0)
    basis = linalg.qr(weight[:, :rank].double())[0].to(weight.dtype)
    return weight.addmm_(basis, basis.T @ weight, alpha=-layer.scaling(_rank(layer)))


def _begun(
    name: str,
    equation: str,
    rest: Callable[[Layer], Tensor],
    shapes: Callable[[Layer], Mapping[str, Shape]] = _pissa_shapes,
) -> AdapterType:
    """Return the type that adds s B A, or s B diag(d) A, to what is left of the weight."""

    def left(layer: Layer) -> Tensor:
        return layer.weight if layer.is_rest else rest(layer)

    def weight(layer: Layer) -> Tensor:
        scale = layer.scaling(_rank(layer))
        up = layer["up"] * (layer[DIAGONAL] * scale if DIAGONAL in layer else scale)
        return left(layer).addmm_(up, layer["down"])

    return replace(
        LOCON,
        name=name,
        equation=equation,
        shapes=shapes,
        update=None,
        weight=weight,
        rest=left,
        by_rows=False,
    )


PISSA = _begun(
    "LORA (PiSSA)",
    "W without its r largest singular components, + s·B·A",
    lambda layer: without_components(layer.weight, layer.size("down", 0), smallest=False),
)
OLORA = _begun("LORA (OLoRA)", "W − s·Q_r·R_r + s·B·A, Q and R those of W", _without_columns)
KASA = _begun(
    "LORA (KaSA)",
    "W without its r smallest singular components, + s·B·diag(d)·A",
    lambda layer: without_components(layer.weight, layer.size(DIAGONAL, 0), smallest=True),
    _kasa_shapes,
)


# OSF (arXiv:2504.07097): the smaller singular components of the weight are trained.


def _osf_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("S", 0)
    if count > min(layer.shape):
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} singular components")
    return {"U": (layer.d_out, count), "S": (count,), "V": (count, layer.d_in)}


def _osf_weight(layer: Layer) -> Tensor:
    values = layer["S"]
    weight = without_components(layer.weight, len(values), smallest=True)
    return weight.addmm_(layer["U"] * values, layer["V"])


OSF = AdapterType(
    name="OSF",
    equation="W without its smallest singular components, + U·diag(S)·V",
    ends={
        ".osf_svd_params.U_low": "U",
        ".osf_svd_params.S_low": "S",
        ".osf_svd_params.V_low": "V",
    },
    shapes=_osf_shapes,
    weight=_osf_weight,
    by_rows=False,
    fields=("effective_rank", "rank_pattern", "target_svd_config"),
)


# DEFT and PaRa: a subspace of the outputs is removed and written anew.


def _deft_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = min(layer.integer("r", 8, least=1), layer.d_out)
    if layer.option("decomposition_method", "relu") not in ("relu", "qr"):
        layer.refuse(
            f"has decomposition_method = {layer.option('decomposition_method')!r}, and relu and qr are read"
        )
    shapes: dict[str, Shape] = {"P": (layer.d_out, rank)}
    return shapes if layer.flag("para") else {**shapes, "R": (rank, layer.d_in)}


def _deft_weight(layer: Layer) -> Tensor:
    """Return W + Q (s R − Nᵀ W): "relu" has Q = P, N = relu(P), "qr" P's orthonormal columns for both."""
    stored, weight = layer["P"], layer.weight
    if layer.option("decomposition_method", "relu") == "qr":
        left = right = linalg.qr(stored)[0]
    else:
        left, right = stored, stored.relu()
    inner = -(right.T @ weight)
    if not layer.flag("para"):
        scaled = layer.option("alpha")
        inner += layer["R"] * (layer.number("alpha", 0.0) / stored.shape[1] if scaled else 1.0)
    return weight.addmm_(left, inner)


DEFT = AdapterType(
    name="DEFT",
    equation="W + Q·(s·R − Nᵀ·W), Q and N made of P",
    ends={".deft_P": "P", ".deft_R": "R"},
    shapes=_deft_shapes,
    weight=_deft_weight,
    by_rows=False,
    fields=("r", "decomposition_method", "para", "alpha", "deft_dropout", "init_scale"),
)


# BD-LoRA: LoRA with one block-diagonal factor.

_SIDES = {"down": "target_modules_bd_a", "up": "target_modules_bd_b"}


def _bdlora_blocks(layer: Layer, side: str) -> int:
    """Return a factor's number of blocks: 1 unless the configuration names a part of the layer's name."""
    given: Any = layer.option("use_bdlora")
    fields = as_object(given)
    names: object = fields.get(_SIDES[side]) or []
    count = fields.get("nblocks", 1)
    if not isinstance(names, list) or type(count) is not int or count < 1:
        layer.refuse(f"has use_bdlora = {given}, whose lists of names or nblocks are damaged")
    return count if any(str(name) in layer.name for name in cast("list[object]", names)) else 1


def _bdlora_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("down", 0)
    down, up = _bdlora_blocks(layer, "down"), _bdlora_blocks(layer, "up")
    if rank % down or layer.d_in % down or layer.d_out % up or rank % up:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which {max(down, up)} blocks of rank {rank} do not divide"
        )
    return {"down": (rank, layer.d_in // down), "up": (layer.d_out, rank // up)}


def _factor(layer: Layer, side: str) -> Tensor:
    blocks = layer[side].chunk(_bdlora_blocks(layer, side))
    return cast("Any", torch).block_diag(*blocks)


def _bdlora_factors(layer: Layer) -> LowRank:
    scale = layer.scaling(layer.rank("down", 0))
    return LowRank(_factor(layer, "up") * scale, _factor(layer, "down"))


BDLORA = AdapterType(
    name="LORA (BD-LoRA)",
    equation="W + s·B·A, one of them a diagonal of blocks",
    ends={},  # the ends are those of LoRA
    shapes=_bdlora_shapes,
    factors=_bdlora_factors,
    rank=lambda layer: layer.rank("down", 0),
)


# DeLoRA (arXiv:2503.18225): a low-rank update of normalised terms, with a trained strength λ.


def _delora_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.rank("A", 0)
    return {
        "A": (rank, layer.d_in),
        "B": (layer.d_out, rank),
        "lambda": (1,),
        "w_norm": (layer.d_in,),
    }


def _delora_factors(layer: Layer) -> LowRank:
    """Return λ/r · B diag(1 / (‖A_i‖ ‖B_i‖)) A diag(w), w the initial norms of the base's columns."""
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
    shapes=_delora_shapes,
    factors=_delora_factors,
    rank=lambda layer: layer.rank("A", 0),
    fields=("r", "rank_pattern", "delora_lambda", "lambda_pattern", "module_dropout"),
)


# GraLoRA (arXiv:2505.20355): an update of k × k blocks, each of low rank.


def _gralora_shapes(layer: Layer) -> Mapping[str, Shape]:
    parts, rank = layer.size("A", 0), layer.size("A", 2)
    if not parts or layer.d_in % parts or layer.d_out % parts or rank % parts:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which {parts} parts of rank {rank} do not divide: pass "
            "the base that the adapter was trained on"
        )
    found: dict[str, Shape] = {
        "A": (parts, layer.d_in // parts, rank),
        "B": (parts, rank, layer.d_out // parts),
    }
    if hybrid := layer.size("down", 0):
        found |= {"down": (hybrid, layer.d_in), "up": (layer.d_out, hybrid)}
    return found


def _update(layer: Layer) -> Tensor:
    """Return α/(r + h) times the blocks B_jnᵀ A_njᵀ plus a LoRA of rank h, as a whole matrix."""
    down, up = layer["A"], layer["B"]
    parts, columns, rank = down.shape
    # Block (j, n) uses the j-th part of the terms of A_n and the n-th part of the terms of B_j.
    left = up.view(parts, parts, rank // parts, -1)
    right = down.view(parts, columns, parts, rank // parts)
    blocks = up.new_empty(parts, up.shape[2], parts, columns)
    for j in range(parts):
        for n in range(parts):
            blocks[j, :, n] = left[j, n].T @ right[n, :, j].T
    total = blocks.view(layer.d_out, layer.d_in)
    hybrid = layer.size("down", 0)
    if hybrid:
        total.addmm_(layer["up"], layer["down"])
    return total.mul_(layer.number("alpha", 64) / (rank + hybrid))


GRALORA = AdapterType(
    name="GRALORA",
    equation="W + α/(r + h)·(blocks B_jn·A_nj, and a LoRA of rank h)",
    ends={
        ".gralora_A_general.weight": "down",
        ".gralora_B_general.weight": "up",
        ".gralora_A": "A",
        ".gralora_B": "B",
    },
    shapes=_gralora_shapes,
    update=_update,
    by_rows=False,
    fields=("r", "alpha", "gralora_k", "hybrid_r", "gralora_dropout"),
)


# GLoRA (arXiv:2306.07967): the weight is scaled and shifted; the bias too, and it gets a product
# with W.

_NONE = "zeros"  # PEFT's name for the stored tensor of a part that is off


def _glora_shapes(layer: Layer) -> Mapping[str, Shape]:
    matrix, inputs, bias = (layer.d_out, layer.d_in), (layer.d_in, 1), (layer.d_out,)
    sides = (("A_B", "A", matrix), ("A_B", "B", matrix), ("C", "C", inputs))
    found: dict[str, Shape] = {}
    for field, side, shape in (*sides, ("D_E", "D", bias), ("D_E", "E", bias)):
        if f"{side}.{_NONE}" in layer:
            found[f"{side}.{_NONE}"] = shape
        elif f"{side}.Xd" in layer:
            rank = layer.rank(f"{side}.Xd", 1)
            found |= {f"{side}.Xd": (shape[0], rank), f"{side}.Xu": (rank, *shape[1:])}
        else:
            constant = layer.option(f"config_{field}") == "constant"
            found[f"{side}.X"] = (1,) if constant else (shape[0], *(1 for _ in shape[1:]))
    return found


def _value(layer: Layer, side: str, rows: slice = slice(None)) -> Tensor:
    """Return (rows of) a part's value, in a shape that broadcasts to the part."""
    if f"{side}.Xd" in layer:
        return layer[f"{side}.Xd"][rows] @ layer[f"{side}.Xu"]
    value = layer[f"{side}.X"] if f"{side}.X" in layer else layer[f"{side}.{_NONE}"]
    return value if len(value) == 1 else value[rows]


def _glora_weight(layer: Layer) -> Tensor:
    weight, rows = layer.weight, layer.rows
    return weight.addcmul(weight, _value(layer, "A", rows)).add_(_value(layer, "B", rows))


def _bias(layer: Layer) -> Tensor:
    bias = layer.base_bias()
    product = (layer.weight @ _value(layer, "C")).flatten()
    return bias + bias * _value(layer, "D") + _value(layer, "E") + product


GLORA = AdapterType(
    name="GLORA",
    equation="W ⊙ (1 + A) + B, and b ⊙ (1 + D) + E + W·C",
    ends={
        f".glora_{side}.{end}": f"{side}.{end}"
        for side in "ABCDE"
        for end in ("Xd", "Xu", "X", _NONE)
    },
    shapes=_glora_shapes,
    weight=_glora_weight,
    bias=_bias,
    has_bias=lambda layer: any(f"{side}.{_NONE}" not in layer for side in "CDE"),
    adds_bias=True,
    fields=("r", "config_A_B", "config_C", "config_D_E"),
)


# HiRA (ICLR 2025): the weight times one plus a low-rank matrix, elementwise.


def _hira_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, window = layer.size("down", 0), layer.shape[2:]
    # PEFT 0.21.2 gives every part the rank r, whatever rank_pattern says.
    if rank != layer.option("r"):
        rank = layer.rank("down", 0)
    return {
        "down": (rank, layer.d_in, *window),
        "up": (layer.d_out, rank, *(1 for _ in window)),
    }


def _hira_weight(layer: Layer) -> Tensor:
    rank = layer.size("down", 0)
    up = layer["up"].reshape(layer.d_out, rank)[layer.rows]
    weight = layer.weight
    return weight.addcmul(weight, up @ layer["down"].reshape(rank, -1))


HIRA = AdapterType(
    name="HIRA",
    equation="W ⊙ (1 + B·A)",
    ends={
        ".hira_embedding_A": "table_down",
        ".hira_embedding_B": "table_up",
        ".hira_A": "down",
        ".hira_B": "up",
    },
    shapes=_hira_shapes,
    weight=_hira_weight,
    fields=("r", "rank_pattern", "hira_dropout"),
)

TYPES = (DEFT, DELORA, GLORA, GRALORA, HIRA, OSF)
