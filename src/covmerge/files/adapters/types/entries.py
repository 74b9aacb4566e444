"""Types that train only some entries of a model: biases, scales, rows, or single numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape, check_places
from covmerge.files.checkpoints.json_file import as_list, as_object

# BEFT (arXiv:2509.15974): the biases of some layers.

BEFT = AdapterType(
    name="BEFT",
    equation="W, and its bias b + the adapter's",
    ends={".beft_bias": "bias"},
    shapes=lambda layer: {"bias": (1, layer.d_out)},
    update=lambda layer: layer["bias"].view(-1, 1)[layer.rows],
    vectors=True,
    leaf="bias",
)


# (IA)³ (arXiv:2205.05638): each output, or each input of a feed-forward layer, times one number.


def _ia3_shapes(layer: Layer) -> Mapping[str, Shape]:
    window = tuple(1 for _ in layer.shape[2:])
    inputs = _of_inputs(layer)
    if window:
        return {"l": (1, layer.d_in * _groups(layer) if inputs else layer.d_out, *window)}
    return {"l": (1, layer.d_in) if inputs else (layer.d_out, 1)}


def _of_inputs(layer: Layer) -> bool:
    """Return whether inputs are scaled: of linear layers by shape, of convolutions by the configuration."""
    if len(layer.shape) == 2:
        return layer.size("l", 0) == 1
    assert layer.config is not None
    return layer.config.ends_in("feedforward_modules", layer.name)


def _groups(layer: Layer) -> int:
    """Return the number of groups of a convolution whose inputs are scaled; groups have separate inputs."""
    groups = layer.size("l", 1) // layer.d_in
    return groups if groups and layer.d_out % groups == 0 else 1


def _ia3_weight(layer: Layer) -> Tensor:
    scale = layer["l"].flatten()
    if not _of_inputs(layer):
        return layer.weight * scale[layer.rows, None]
    weight, rows = layer.weight, torch.arange(layer.d_out)[layer.rows]
    scales = scale.view(-1, layer.d_in)[rows * (len(scale) // layer.d_in) // layer.d_out]
    return (weight.view(len(weight), layer.d_in, -1) * scales[:, :, None]).view(weight.shape)


IA3 = AdapterType(
    name="IA3",
    equation="diag(l)·W and l ⊙ b, of feed-forward layers W·diag(l)",
    ends={".ia3_l": "l"},
    shapes=_ia3_shapes,
    weight=_ia3_weight,
    bias=lambda layer: layer.base_bias() * layer["l"].flatten(),
    has_bias=lambda layer: not _of_inputs(layer),
    fields=("feedforward_modules", "init_ia3_weights"),
)


# LN tuning (arXiv:2312.11420): the normalisation layers, trained whole.

LN_TUNING = AdapterType(
    name="LN_TUNING",
    equation="the adapter's weight and bias",
    ends={},
    whole={".ln_tuning_layers.weight": ".weight", ".ln_tuning_layers.bias": ".bias"},
)


# SHiRA (arXiv:2406.13175): a sparse update.


def _shira_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("weight", 0)
    return {"weight": (count,), "indices": (2, count)}


def _shira_update(layer: Layer) -> Tensor:
    rows, columns = layer["indices"].long()
    check_places(layer, rows, layer.d_out)
    check_places(layer, columns, layer.d_in)
    return _sparse(layer, rows * layer.d_in + columns, layer["weight"])


def _sparse(layer: Layer, places: Tensor, values: Tensor) -> Tensor:
    dense = torch.zeros(layer.d_out * layer.d_in, dtype=values.dtype)
    return dense.index_add_(0, places, values).view(layer.d_out, layer.d_in)


SHIRA = AdapterType(
    name="SHIRA",
    equation="W + a sparse matrix",
    ends={".shira_weight": "weight", ".shira_indices": "indices"},
    shapes=_shira_shapes,
    update=_shira_update,
    by_rows=False,
    integers=frozenset({"indices"}),
    fields=("r", "mask_type", "random_seed"),
)


# Super-Tuning (arXiv:2607.09287): a sparse update at chosen places, with or without a LoRA.


def _supertuning_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("values", 0)
    found: dict[str, Shape] = {"values": (count,), "indices": (count,)}
    if layer.option("r"):
        rank = layer.rank("down", 0)
        found |= {"down": (rank, layer.d_in), "up": (layer.d_out, rank)}
    return found


def _supertuning_update(layer: Layer) -> Tensor:
    """Return the sparse update plus α/r · B A, as a whole matrix."""
    values, places = layer["values"], layer["indices"].long()
    check_places(layer, places, layer.d_out * layer.d_in)
    found = _sparse(layer, places, values)
    if layer.option("r"):
        rank = layer.rank("down", 0)
        found.addmm_(layer["up"] * (layer.number("lora_alpha", 4) / rank), layer["down"])
    return found


SUPERTUNING = AdapterType(
    name="SUPERTUNING",
    equation="W + a sparse matrix, and α/r·B·A",
    ends={
        ".supertuning_values": "values",
        ".supertuning_indices": "indices",
        ".supertuning_lora_A.weight": "down",
        ".supertuning_lora_B.weight": "up",
    },
    shapes=_supertuning_shapes,
    update=_supertuning_update,
    by_rows=False,
    integers=frozenset({"indices"}),
    fields=(
        "r",
        "lora_alpha",
        "save_precomputed_indices",
        "sparsity",
        "select_top",
        "lora_dropout",
    ),
    refused=(
        "save_precomputed_indices",
        False,
        "and the places are those of the base's largest numbers, of which several may be equal",
    ),
)


# Trained tokens: some rows of an embedding are replaced.

TOKENS = "tokens"


def _tokens_shapes(layer: Layer) -> Mapping[str, Shape]:
    tokens = _tokens(layer)
    outside = [token for token in tokens if not 0 <= token < layer.d_out]
    if outside or len(set(tokens)) != len(tokens):
        wrong = (
            f"{outside[0]}, and the base has {layer.d_out} rows: pass the base as it was resized for the "
            "training (transformers: model.resize_token_embeddings)"
            if outside
            else "one token twice: fetch the adapter again"
        )
        layer.refuse(f"was trained at tokens of which the configuration names {wrong}")
    return {TOKENS: (len(tokens), layer.d_in)}


def _tokens(layer: Layer) -> list[int]:
    """Return the trained tokens that the configuration lists, for all modules or by names of modules."""
    given: object = layer.option("token_indices") or layer.option("trainable_token_indices")
    if lists := as_object(given):
        fits = [listed for end, listed in lists.items() if f".{layer.name}".endswith(f".{end}")]
        given = fits[0] if len(fits) == 1 else None
    found = as_list(given)
    tokens = [token for token in found if type(token) is int]
    if not tokens or len(tokens) != len(found):
        layer.refuse(
            "has trained tokens, and adapter_config.json does not say which (token_indices, or "
            "trainable_token_indices): fetch it again"
        )
    return tokens


def _tokens_weight(layer: Layer) -> Tensor:
    rows = range(*layer.rows.indices(layer.d_out))
    weight = layer.weight
    trained = layer[TOKENS].to(weight.dtype)
    inside = [(place, token) for place, token in enumerate(_tokens(layer)) if token in rows]
    if inside:
        places, tokens = zip(*inside, strict=True)
        weight[torch.tensor(tokens) - rows.start] = trained[list(places)]
    return weight


TRAINABLE_TOKENS = AdapterType(
    name="TRAINABLE_TOKENS",
    equation="W with the rows of some tokens replaced",
    ends={
        ".token_adapter.trainable_tokens_delta": TOKENS,
        ".trainable_tokens_delta": TOKENS,
    },
    shapes=_tokens_shapes,
    weight=_tokens_weight,
    keeps_ties=True,
    fields=("token_indices",),
)

TYPES = (BEFT, IA3, LN_TUNING, SHIRA, SUPERTUNING, TRAINABLE_TOKENS)
