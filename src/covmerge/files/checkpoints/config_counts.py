"""Numbers of layers and tokens in config.json: reading them and changing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

TIED = "tie_word_embeddings"
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_NESTED = ("text_config", "llm_config", "language_config", "decoder")


def layer_count(config: Mapping[str, Any] | None) -> int | None:
    """Return the number of layers in a config, or None if it has none.

    Example:
        >>> layer_count({"n_layer": 12}), layer_count({"text_config": {"num_hidden_layers": 4}})
        (12, 4)
    """
    return _first(config, _COUNTS)


def restacked(config: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Return the config of a model whose layers are layers of this model, in another order or number.

    Lists with an entry for each layer, such as `layer_types`, are rearranged too. `order` has the number of
    the old layer for each layer of the new model.

    Example:
        >>> restacked({"n_layer": 2, "layer_types": ["full", "sliding"]}, [0, 1, 1])
        {'n_layer': 3, 'layer_types': ['full', 'sliding', 'sliding']}
    """
    count = layer_count(config)

    def change(_: str, part: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(part)
        for name, value in part.items():
            if name in _COUNTS and value == count:
                new[name] = len(order)
            elif "layer" in name and isinstance(value, list):
                listed = cast("list[Any]", value)
                if len(listed) == count:
                    new[name] = [listed[index] for index in order]
        return new

    return with_parts(config, change)


def language_parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a config under "", and each config in it that may be a language model's, under its key."""
    yield "", config
    for key in _NESTED:
        if isinstance(config.get(key), Mapping):
            yield key, config[key]


def with_parts(
    config: Mapping[str, Any], change: Callable[[str, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a config with each of its `language_parts` changed, given with its key."""
    found = change("", config)
    return found | {key: change(key, part) for key, part in language_parts(config) if key}


_SIZE = "vocab_size"
_SPECIAL = ("_token_id", "_token_ids")


def vocabulary_size(config: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of the token embedding in a config, or None if it has none.

    Example:
        >>> vocabulary_size({"vocab_size": 32000}), vocabulary_size({"text_config": {"vocab_size": 8}})
        (32000, 8)
    """
    return _first(config, (_SIZE,))


def _first(config: Mapping[str, Any] | None, keys: Sequence[str]) -> int | None:
    """Return the first whole number under one of some keys, in a config or a part of it."""
    found = (part.get(key) for _, part in language_parts(config or {}) for key in keys)
    return next((int(number) for number in found if isinstance(number, int)), None)


def with_vocabulary(
    config: Mapping[str, Any], size: int, special: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config, or a generation_config.json, changed to another vocabulary of `size` rows.

    `special` is the config of the model whose tokens these are. The numbers of special tokens come from it,
    and those that it does not have are removed. None: they stay.

    Example:
        >>> with_vocabulary({"vocab_size": 8, "eos_token_id": 2}, 10, {"eos_token_id": [3, 9]})
        {'vocab_size': 10, 'eos_token_id': [3, 9]}
    """
    old = vocabulary_size(config)
    others = None if special is None else dict(language_parts(special))

    def change(key: str, part: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(part)
        if new.get(_SIZE) == old and old is not None:
            new[_SIZE] = size
        if others is not None:
            other = others.get(key, others[""])
            new = {name: value for name, value in new.items() if not name.endswith(_SPECIAL)}
            new |= {name: value for name, value in other.items() if name.endswith(_SPECIAL)}
        return new

    return with_parts(config, change)
