"""What config.json says of a model's vocabulary: how many rows it has, and which tokens are special."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covmerge.files.checkpoints.layer_count import language_parts

_SIZE = "vocab_size"
_SPECIAL = ("_token_id", "_token_ids")


def vocabulary_size(config: Mapping[str, Any] | None) -> int | None:
    """Return how many rows a config says its token embedding has; None where it does not say.

    Example:
        >>> vocabulary_size({"vocab_size": 32000}), vocabulary_size({"text_config": {"vocab_size": 8}})
        (32000, 8)
    """
    for _, part in language_parts(config or {}):
        if isinstance(part.get(_SIZE), int):
            return int(part[_SIZE])
    return None


def with_vocabulary(
    config: Mapping[str, Any], size: int, special: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config with another vocabulary.

    Args:
        config: of a model; or its generation_config.json, which says no size.
        size: rows of the token embedding.
        special: the config of the model whose tokens these are, which then says the numbers of special
            ones: those that it does not have are left out. None: they stay.

    Example:
        >>> with_vocabulary({"vocab_size": 8, "eos_token_id": 2}, 10, {"eos_token_id": [3, 9]})
        {'vocab_size': 10, 'eos_token_id': [3, 9]}
    """
    old = vocabulary_size(config)
    others = None if special is None else dict(language_parts(special))
    found = dict(config)
    for key, part in list(language_parts(config)):
        own = dict(part)
        if own.get(_SIZE) == old and old is not None:
            own[_SIZE] = size
        if others is not None:
            other = others.get(key, others[""])
            own = {name: value for name, value in own.items() if not name.endswith(_SPECIAL)}
            own |= {name: value for name, value in other.items() if name.endswith(_SPECIAL)}
        if key:
            found[key] = own
        else:
            found = own
    return found
