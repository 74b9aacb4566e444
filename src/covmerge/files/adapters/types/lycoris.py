"""Types of files without a configuration, as LyCORIS and ComfyUI write them; PEFT has some of these too."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import (
    ALPHA,
    AdapterType,
    Layer,
    Shape,
    alpha_of,
    cayley,
    linalg,
)

# LoHa (arXiv:2108.06098): the elementwise product of two low-rank updates.


def _loha_shapes(layer: Layer) -> Mapping[str, Shape]:
    found: dict[str, Shape] = alpha_of(layer)
    if "t1" in layer or "t2" in layer:
        rank = layer.rank("t1", 0)
        left, right, core = (rank, layer.d_out), (rank, layer.d_in), (rank, rank, *cores(layer))
        found |= {"t1": core, "t2": core}
    else:
        rank = layer.rank("w1_b", 0)
        left, right = (layer.d_out, rank), (rank, layer.columns)
    return {**found, "w1_a": left, "w1_b": right, "w2_a": left, "w2_b": right}


def cores(layer: Layer) -> Shape:
    """Return the window of a Tucker core; PEFT adds an axis of length 1 to a window of one axis."""
    window = layer.shape[2:]
    return (*window, 1) if len(window) == 1 and layer.config is not None else window


def tucker(core: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return Σ core_ij · left_i ⊗ right_j, `(rows, d_in, window)`, with the window as one axis."""
    flat = core.reshape(*core.shape[:2], -1)
    return torch.einsum("ijk,ip,jq->pqk", flat, left, right)


def _loha_update(layer: Layer) -> Tensor:
    product = _half(layer, "1").mul_(_half(layer, "2"))
    return product.mul_(layer.scaling(layer.rank("w1_b", 0)))


def _half(layer: Layer, side: str) -> Tensor:
    left, right = layer[f"w{side}_a"], layer[f"w{side}_b"]
    if f"t{side}" not in layer:
        return left[layer.rows] @ right
    return tucker(layer[f"t{side}"], left[:, layer.rows], right).flatten(1)


def _loha_matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    left, right = parts.get("w1_a", ()), parts.get("w1_b", ())
    if len(left) != 2 or len(right) != 2:
        return None
    core = parts.get("t1")
    return (left[0], right[1]) if core is None else (left[1], right[1] * prod(core[2:]))


LOHA = AdapterType(
    name="LOHA",
    equation="W + s·(w1_a·w1_b) ⊙ (w2_a·w2_b)",
    ends={f".hada_{name}": name for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    marks=frozenset({"w1_a"}),
    shapes=_loha_shapes,
    update=_loha_update,
    matrix=_loha_matrix,
    alpha="alpha",
    fields=(
        *("r", "alpha", "rank_pattern", "alpha_pattern"),
        *("rank_dropout", "module_dropout", "use_effective_conv2d"),
    ),
)


# LoRA with more than a product: with a Tucker core (LoCon), or as the direction of DoRA.

MIDDLE = "mid"
OF_GROUPS = (
    "is a convolution with groups, whose update is no kernel of such a convolution (PEFT does not merge it "
    "either): train without that layer, or remove its tensors from a copy of the adapter, and it from "
    "target_modules"
)


def is_grouped(rank: int, up: Shape) -> bool:
    """Return whether B belongs to a convolution with groups, each of which uses a part of the terms."""
    return len(up) > 2 and 0 < up[1] < rank and rank % up[1] == 0


def _locon_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank, window = layer.size("down", 0), layer.shape[2:]
    ones = tuple(1 for _ in window)
    if "up" in layer and is_grouped(rank, layer.parts["up"].shape):
        layer.refuse(OF_GROUPS)
    found = {"up": (layer.d_out, rank, *ones), **alpha_of(layer)}
    if MIDDLE in layer:
        return {**found, "down": (rank, layer.d_in, *ones), MIDDLE: (rank, rank, *window)}
    return {**found, "down": (rank, layer.d_in, *window)}


def _locon_update(layer: Layer) -> Tensor:
    """Return the wanted rows of s B A, or of this product with a core between B and A."""
    rank = layer.size("down", 0)
    up = layer["up"].reshape(layer.d_out, rank)[layer.rows] * layer.scaling(rank)
    down = layer["down"].reshape(rank, -1)
    if MIDDLE in layer:
        return tucker(layer[MIDDLE], up.T, down).flatten(1)
    return up @ down


def _locon_matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    up, down = parts.get("up", ()), parts.get("down", ())
    if len(up) < 2 or len(down) < 2:
        return None
    return up[0], prod(down[1:]) * prod(parts.get(MIDDLE, ())[2:])


LOCON = AdapterType(
    name="LoCon",
    equation="W + s·B·(core)·A",
    ends={".lora_mid.weight": MIDDLE},  # and the ends of LoRA
    marks=frozenset({MIDDLE}),
    shapes=_locon_shapes,
    update=_locon_update,
    matrix=_locon_matrix,
)


# LoKr (arXiv:2309.14859): the Kronecker product of two small matrices, each of which may be a product.

_PARTS = ("w1_a", "w1_b", "w1", "w2_a", "w2_b", "w2", "t2")


def _lokr_shapes(layer: Layer) -> Mapping[str, Shape]:
    rows, columns = _outer(layer)
    if not rows or not columns or layer.d_out % rows or layer.d_in % columns:
        layer.refuse(
            f"is {list(layer.shape)} in the base, and its LoKr has blocks of {rows} x {columns}: pass the "
            "base that the adapter was trained on, or fetch the adapter again"
        )
    inner = (layer.d_out // rows, layer.d_in // columns)
    window = layer.shape[2:]
    found: dict[str, Shape] = alpha_of(layer)
    if "kron_w1" in layer:
        found["kron_w1"] = (rows, columns)
    else:
        rank = layer.size("kron_w1_b", 0)
        found |= {"kron_w1_a": (rows, rank), "kron_w1_b": (rank, columns)}
    if "kron_w2" in layer:
        return {**found, "kron_w2": (*inner, *window)}
    rank = layer.size("kron_w2_b", 0)
    if "kron_t2" in layer:
        found |= {"kron_w2_a": (rank, inner[0]), "kron_w2_b": (rank, inner[1])}
        return {**found, "kron_t2": (rank, rank, *cores(layer))}
    return {**found, "kron_w2_a": (inner[0], rank), "kron_w2_b": (rank, inner[1] * prod(window))}


def _outer(layer: Layer) -> tuple[int, int]:
    """Return the numbers of rows and columns of the first matrix."""
    if "kron_w1" in layer:
        return layer.size("kron_w1", 0), layer.size("kron_w1", 1)
    return layer.size("kron_w1_a", 0), layer.size("kron_w1_b", 1)


def _scale(layer: Layer) -> float:
    """Return alpha / r; LyCORIS's files, without configuration, have 1 if neither matrix is a product."""
    if layer.is_older(LOKR):
        return 1.0
    if layer.config is not None:
        return layer.scaling(layer.config.rank(layer.name))
    rank = layer.size("kron_w2_b", 0) or layer.size("kron_w1_b", 0)
    return layer.scaling(rank) if rank else 1.0


def _lokr_update(layer: Layer) -> Tensor:
    first = layer["kron_w1"] if "kron_w1" in layer else layer["kron_w1_a"] @ layer["kron_w1_b"]
    second = _second(layer)
    if layer.config is not None and second.dim() == 3:
        # PEFT aligns the axes of a 1-d convolution from the right: (1, a, c) with (b, d, k).
        return torch.kron(first[None], second).reshape(layer.d_out, -1)[layer.rows] * _scale(layer)
    rows = torch.arange(layer.d_out)[layer.rows]
    left = (first * _scale(layer))[rows // len(second)]
    right = second.flatten(1)[rows % len(second)]
    return (left[:, :, None] * right[:, None, :]).flatten(1)


def _second(layer: Layer) -> Tensor:
    if "kron_w2" in layer:
        return layer["kron_w2"]
    if "kron_t2" in layer:
        return tucker(layer["kron_t2"], layer["kron_w2_a"], layer["kron_w2_b"]).flatten(1)
    return layer["kron_w2_a"] @ layer["kron_w2_b"]


def _lokr_matrix(parts: Mapping[str, Shape]) -> tuple[int, int] | None:
    left, right = parts.get("kron_w1_a", (0,)), parts.get("kron_w1_b", (0, 0))
    first = parts.get("kron_w1") or (*left[:1], *right[1:])
    second = parts.get("kron_w2")
    if second is None:
        left, right = parts.get("kron_w2_a", ()), parts.get("kron_w2_b", ())
        core = parts.get("kron_t2")
        if len(left) != 2 or len(right) != 2:
            return None
        second = (left[0], right[1]) if core is None else (left[1], right[1] * prod(core[2:]))
    if len(first) != 2 or len(second) < 2:
        return None
    return first[0] * second[0], first[1] * prod(second[1:])


LOKR = AdapterType(
    name="LOKR",
    equation="W + s·w1 ⊗ w2",
    ends={f".lokr_{name}": f"kron_{name}" for name in _PARTS},
    marks=frozenset(f"kron_{name}" for name in _PARTS),
    shapes=_lokr_shapes,
    update=_lokr_update,
    matrix=_lokr_matrix,
    alpha="alpha",
    older=(
        "rank_dropout_scale",
        "before 0.14 left alpha out, and newer ones multiply by alpha / r",
    ),
    fields=(
        *("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout"),
        *("use_effective_conv2d", "rank_dropout_scale", "decompose_both", "decompose_factor"),
    ),
)


# GLoRA of LyCORIS's files: a low-rank update, and another one that multiplies the weight.


def _glora_is_older(layer: Layer) -> bool:
    """Return whether LyCORIS 1 or 2 wrote the layer: they applied the factors of number 1 first."""
    return (layer.size("a1", 0), layer.size("b1", 0)) != (layer.d_in, layer.d_out)


def _glora_names(layer: Layer) -> tuple[str, str, str, str]:
    return ("a2", "a1", "b2", "b1") if _glora_is_older(layer) else ("a1", "a2", "b1", "b2")


def _lycoris_glora_shapes(layer: Layer) -> Mapping[str, Shape]:
    if "bm" in layer:
        layer.refuse("has a core (bm.weight), which LyCORIS writes for no layer that needs one")
    a_up, a_down, b_up, b_down = _glora_names(layer)
    rank, window = layer.size(a_down, 0), layer.shape[2:]
    ones = tuple(1 for _ in window)
    return {
        a_up: (layer.d_in, rank, *ones),
        a_down: (rank, layer.d_in, *ones),
        b_up: (layer.d_out, rank, *ones),
        b_down: (rank, layer.d_in, *window),
        **alpha_of(layer),
    }


def _lycoris_glora_weight(layer: Layer) -> Tensor:
    """Return the wanted rows of W + s (W A₁ A₂ + B₁ B₂); LyCORIS 1 and 2 computed with s²."""
    a_up, a_down, b_up, b_down = _glora_names(layer)
    weight, scale = layer.weight, layer.scaling(layer.size(a_down, 0))
    inner, outer = layer[a_up].flatten(1), layer[a_down].flatten(1)
    channels = weight.view(len(weight), layer.d_in, -1)
    turned = torch.einsum("oik,ir,rj->ojk", channels, inner, outer).reshape(weight.shape)
    left = layer[b_up].flatten(1)[layer.rows]
    turned.addmm_(left, layer[b_down].flatten(1))
    return weight.add_(turned, alpha=scale**2 if _glora_is_older(layer) else scale)


LYCORIS_GLORA = AdapterType(
    name="GLoRA (`a1`, `a2`, `b1`, `b2`)",
    equation="W + s·(W·A₁·A₂ + B₁·B₂)",
    ends={f".{part}.weight": part for part in ("a1", "a2", "b1", "b2", "bm")},
    marks=frozenset({"a1", "b1"}),
    shapes=_lycoris_glora_shapes,
    weight=_lycoris_glora_weight,
)


# (IA)³ of LyCORIS's files: each output or each input is multiplied by 1 plus a number.

ON_INPUT, SCALES = "on input", "scales"


def _lycoris_ia3_shapes(layer: Layer) -> Mapping[str, Shape]:
    length = layer.d_in if _of_inputs(layer) else layer.d_out
    return {ON_INPUT: layer.vector(ON_INPUT, 1), SCALES: layer.vector(SCALES, length)}


def _of_inputs(layer: Layer) -> bool:
    if ON_INPUT not in layer or layer.parts[ON_INPUT].numel != 1:
        layer.refuse("has no one number `on_input`, which says what its scales are of")
    return bool(layer[ON_INPUT].item())


def _lycoris_ia3_weight(layer: Layer) -> Tensor:
    """Return the wanted rows of diag(1 + w) W or W diag(1 + w); the bias does not change."""
    scale = layer[SCALES].flatten() + 1
    weight = layer.weight
    if not _of_inputs(layer):
        return weight.mul_(scale[layer.rows, None])
    return weight.view(len(weight), layer.d_in, -1).mul_(scale[:, None]).view(weight.shape)


LYCORIS_IA3 = AdapterType(
    name="(IA)³ (`weight`, `on_input`)",
    equation="diag(1 + w)·W, or W·diag(1 + w)",
    ends={".on_input": ON_INPUT},
    marks=frozenset({ON_INPUT}),
    beside={".weight": SCALES},
    shapes=_lycoris_ia3_shapes,
    weight=_lycoris_ia3_weight,
    flags=frozenset({ON_INPUT}),
)


# OFT and BOFT of Kohya's and LyCORIS's files: the layer's outputs are rotated in blocks and scaled.

_WHOLE = "rotations"  # LyCORIS up to 2.1 stored R itself


def _lycoris_oft_shapes(layer: Layer) -> Mapping[str, Shape]:
    part = _WHOLE if _WHOLE in layer else "blocks"
    stored = layer.parts[part].shape
    size = stored[-1] if stored else 0
    count = layer.d_out // size if size else 0
    if len(stored) not in (3, 4) or count * size != layer.d_out:
        layer.refuse(f"has {layer.d_out} outputs, which its blocks {list(stored)} do not divide")
    if len(stored) == 4 and (size % 2 or layer.d_out % (2 ** (stored[0] - 1) * size)):
        layer.refuse(f"has {layer.d_out} outputs, of which {list(stored)} is no butterfly")
    found: dict[str, Shape] = {part: (*stored[:-3], count, size, size), **alpha_of(layer)}
    if "rescale" in layer:
        found["rescale"] = layer.vector("rescale", layer.d_out)
    return found


def _lycoris_oft_weight(layer: Layer) -> Tensor:
    """Return Rᵀ W by blocks of rows, or the result of a butterfly of such steps with R; a whole matrix."""
    weight = layer.weight
    rotations = _rotations(layer).to(weight.dtype)
    if rotations.dim() == 3:
        weight = _turned(rotations.mT, weight)
    else:
        for step, blocks in enumerate(rotations):
            weight = _butterfly(blocks, weight, 2**step * blocks.shape[-1] // 2)
    return weight.mul_(layer["rescale"].reshape(-1, 1)) if "rescale" in layer else weight


def _rotations(layer: Layer) -> Tensor:
    """Return (I + Q)(I − Q)⁻¹ for Q = X − Xᵀ, its norm limited to alpha · d_out.

    Without alpha, or with alpha 0, there is no limit.
    """
    if _WHOLE in layer:
        return layer[_WHOLE]
    stored = layer["blocks"].double()
    skew = stored - stored.mT
    limit = float(layer[ALPHA]) * layer.d_out if ALPHA in layer else 0.0
    norm = float(linalg.vector_norm(skew)) + 1e-8
    return cayley(-skew * (limit / norm if 0 < limit < norm else 1.0))


def _turned(blocks: Tensor, rows: Tensor) -> Tensor:
    return torch.bmm(blocks, rows.view(len(blocks), -1, rows.shape[1])).view(rows.shape)


def _butterfly(blocks: Tensor, rows: Tensor, stride: int) -> Tensor:
    """Return the rows after rotating blocks of pairs of rows that are `stride` apart."""
    pairs = rows.view(-1, 2, stride, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    turned = _turned(blocks, pairs).view(-1, stride, 2, rows.shape[1])
    return turned.transpose(1, 2).reshape(rows.shape)


LYCORIS_OFT = AdapterType(
    name="OFT, BOFT (`oft_blocks`, `oft_diag`, `rescale`)",
    equation="s ⊙ blockdiag(R)ᵀ·W, or a butterfly of blocks; R of skew matrices by the Cayley transform",
    ends={".oft_blocks": "blocks", ".oft_diag": _WHOLE, ".rescale": "rescale"},
    marks=frozenset({"blocks", _WHOLE}),
    shapes=_lycoris_oft_shapes,
    weight=_lycoris_oft_weight,
    by_rows=False,
)


# Differences of whole tensors, as LyCORIS ("full", "norm") and ComfyUI write them.

DIFFERENCE, OF_BIAS = "difference", "difference of bias"


def _diff_matrix(parts: Mapping[str, Shape]) -> tuple[int, int]:
    shape = parts[DIFFERENCE]
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


DIFF = AdapterType(
    name="full, norm (`diff`, `diff_b`, `w_norm`, `b_norm`)",
    equation="W + D, of weights and of biases",
    ends={
        ".diff": DIFFERENCE,
        ".w_norm": DIFFERENCE,
        ".diff_b": OF_BIAS,
        ".b_norm": OF_BIAS,
    },
    marks=frozenset({DIFFERENCE}),
    shapes=lambda layer: {DIFFERENCE: layer.shape},
    update=lambda layer: layer[DIFFERENCE].reshape(layer.d_out, -1)[layer.rows],
    matrix=_diff_matrix,
    vectors=True,
)

TYPES = (LOHA, LOKR)  # the types that PEFT has too
OF_FILES = (LOCON, LOHA, LOKR, LYCORIS_OFT, LYCORIS_IA3, LYCORIS_GLORA, DIFF)
