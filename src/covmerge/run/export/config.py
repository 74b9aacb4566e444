"""The output's configs: the base's own bytes, unless they would be wrong about weights or vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import PurePath
from typing import Any, cast

import torch

from covmerge.files.checkpoints.config_counts import restacked
from covmerge.files.checkpoints.folder import CONFIG, MLX
from covmerge.files.checkpoints.json_file import parse_object
from covmerge.files.quantised.view import QUANTISATION
from covmerge.files.stores.store import WritableFile, WritableStore
from covmerge.files.tensors.shown import untied_config
from covmerge.plan.vocabulary.files import TokenizerFiles

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, older ones the second


def rewrite_config(
    content: bytes,
    dtype: torch.dtype | None = None,
    origin: str = "config.json",
    layers: Sequence[int] | None = None,
    *,
    plain: bool = False,
    quantisation: Mapping[str, Any] | None = None,
    tokens: TokenizerFiles | None = None,
    untied: bool = False,
    other: Mapping[str, Any] | None = None,
) -> bytes:
    r"""Return `content` with every dtype it states set to `dtype`; the same bytes if none differs.

    The configs nested in that of a composite model (`text_config`, ...) state dtypes as well. A
    config that states none stays as it is: transformers then goes by the weights.

    Args:
        content: the base's config.json, or generation_config.json.
        dtype: of the output's weights; None if they keep the base's.
        origin: the file's path, for errors.
        layers: of the base, that the output is stacked of; None if it has the base's.
        plain: the base is quantised, and read as plain.
        quantisation: the format that the output's weights are packed in; None: they are plain.
        tokens: what the configs say of the output's tokenizer; None if it is the base's.
        untied: the base ties tensors that the output stores one by one.
        other: what the config says of the output, where this is of another architecture.

    Raises:
        CheckpointError: `content` is not a JSON object.

    Example:
        >>> rewrite_config(b'{"a": 1, "dtype": "float32"}', torch.bfloat16, "config.json")
        b'{\n  "a": 1,\n  "dtype": "bfloat16"\n}\n'
    """
    if (
        dtype is None
        and layers is None
        and tokens is None
        and other is None
        and not (plain or quantisation or untied)
    ):
        return content
    stored = parse_object(content, origin)
    config = deepcopy(stored if other is None else dict(other))
    if layers is not None:
        config = restacked(config, layers)
    if tokens is not None:
        config = tokens.configured(PurePath(origin).name, config)
    if untied:
        config = untied_config(config)
    if plain:
        for key in (QUANTISATION, MLX):
            config.pop(key, None)
    if quantisation is not None:
        config[QUANTISATION] = {**quantisation}
    for part in () if dtype is None else _parts(config):
        for key in _DTYPE_KEYS:
            wanted = str(dtype).removeprefix("torch.")
            if isinstance(part.get(key), str) and part[key] != wanted:
                part[key] = wanted
    return content if config == stored else (json.dumps(config, indent=2) + "\n").encode()


def write_config(
    store: WritableStore,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write the config of a base that has no file of it.

    Args:
        store: of the output.
        config: the base's.
        dtype: of the output's weights; None if they keep the base's.
        quantisation: the format that they are packed in; None: they are plain.

    Raises:
        ResourceError: the disk is full.
    """
    text = json.dumps(config, indent=2) + "\n"
    content = rewrite_config(text.encode(), dtype, store.where(CONFIG), quantisation=quantisation)
    WritableFile(store, CONFIG).put(content)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and the model configs nested in it."""
    yield config
    for key, value in config.items():
        # A quantisation's dtypes are not those of the stored weights.
        if key.endswith("_config") and key != QUANTISATION and isinstance(value, dict):
            yield from _parts(cast("dict[str, Any]", value))
