"""Trained tokens: some rows of an embedding, replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

TOKENS = "tokens"


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    tokens = _tokens(layer)
    outside = [token for token in tokens if not 0 <= token < layer.d_out]
    if outside or len(set(tokens)) != len(tokens):
        wrong = (
            f"{outside[0]}, and the base has {layer.d_out} rows" if outside else "one token twice"
        )
        layer.refuse(f"was trained at tokens of which the configuration names {wrong}")
    return {TOKENS: (len(tokens), layer.d_in)}


def _tokens(layer: Layer) -> list[int]:
    """What the configuration says: a list, or lists by names of modules."""
    given: object = layer.option("token_indices") or layer.option("trainable_token_indices")
    if isinstance(given, dict):
        lists = cast("dict[str, object]", given)
        fits = [listed for end, listed in lists.items() if f".{layer.name}".endswith(f".{end}")]
        given = fits[0] if len(fits) == 1 else None
    found = cast("list[object]", given if isinstance(given, list) else [])
    tokens = [token for token in found if type(token) is int]
    if not tokens or len(tokens) != len(found):
        layer.refuse(
            "has trained tokens, and adapter_config.json does not say which (token_indices, or "
            "trainable_token_indices): fetch it again"
        )
    return tokens


def _weight(layer: Layer) -> Tensor:
    """The base's rows with the trained ones in their places."""
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
    shapes=_shapes,
    weight=_weight,
    keeps_ties=True,
    fields=frozenset({"token_indices"}),
    unused=frozenset({"init_weights"}),
)
