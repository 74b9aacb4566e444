"""The output's configs: the base's bytes, changed only if wrong about weights or vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

import torch

from covmerge.files.checkpoints.config_counts import restacked
from covmerge.files.checkpoints.folder import CONFIG, MLX
from covmerge.files.checkpoints.json_file import parse_object
from covmerge.files.quantised.view import QUANTISATION
from covmerge.files.stores.local import LocalFolder
from covmerge.files.tensors.shown import untied_config
from covmerge.plan.vocabulary.files import TokenizerFiles

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, older ones the second


@dataclass(frozen=True)
class ConfigChanges:
    r"""The differences of the output's configs from the base's.

    Attributes:
        dtype: dtype of the output's weights; None if they keep the base's.
        layers: the base's layers that the output is stacked from; None if it has the layers of the base.
        plain: whether the base is quantised, and read dequantised.
        quantisation: the quantised format of the output's weights; None if they are not quantised.
        tokens: the output's tokenizer; None if it is the base's.
        untied: whether the output stores tensors one by one that the base ties.
        other: the output's config if its architecture is not the base's, else None.

    Example:
        >>> ConfigChanges(torch.bfloat16).made_to(b'{"a": 1, "dtype": "float32"}', "config.json")
        b'{\n  "a": 1,\n  "dtype": "bfloat16"\n}\n'
    """

    dtype: torch.dtype | None = None
    layers: Sequence[int] | None = None
    plain: bool = False
    quantisation: Mapping[str, Any] | None = None
    tokens: TokenizerFiles | None = None
    untied: bool = False
    other: Mapping[str, Any] | None = None

    def made_to(self, content: bytes, origin: str) -> bytes:
        """Return a config of the base with the changes made; the same bytes if nothing changes.

        The dtype is changed in nested configs (`text_config`, ...) too. A config without a dtype gets
        none: transformers then uses the dtype of the weights. The name of the file, at the end of `origin`,
        decides how token settings change.

        Raises:
            CheckpointError: `content` is not a JSON object.
        """
        if self == NO_CHANGES:
            return content
        stored = parse_object(content, origin)
        config = deepcopy(stored if self.other is None else dict(self.other))
        if self.layers is not None:
            config = restacked(config, self.layers)
        if self.tokens is not None:
            config = self.tokens.configured(PurePath(origin).name, config)
        if self.untied:
            config = untied_config(config)
        if self.plain:
            for key in (QUANTISATION, MLX):
                config.pop(key, None)
        if self.quantisation is not None:
            config[QUANTISATION] = {**self.quantisation}
        for part in () if self.dtype is None else _parts(config):
            for key in _DTYPE_KEYS:
                wanted = str(self.dtype).removeprefix("torch.")
                if isinstance(part.get(key), str) and part[key] != wanted:
                    part[key] = wanted
        return content if config == stored else (json.dumps(config, indent=2) + "\n").encode()


NO_CHANGES = ConfigChanges()


def write_config(store: LocalFolder, config: Mapping[str, Any], changes: ConfigChanges) -> None:
    """Write config.json for a base that has no such file."""
    text = json.dumps(config, indent=2) + "\n"
    content = changes.made_to(text.encode(), store.where(CONFIG))
    store.put(CONFIG, content)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config and the model configs nested in it."""
    yield config
    for key, value in config.items():
        # The dtypes in a quantisation's config are not those of the stored weights.
        if key.endswith("_config") and key != QUANTISATION and isinstance(value, dict):
            yield from _parts(cast("dict[str, Any]", value))
