"""An expert that is one part of its base: the image encoder of CLIP, or the language model of Gemma 3."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from typing import Any, cast

from covmerge.base.text import counted
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.view import View


def part_key(whole: Mapping[str, Any] | None, part: Mapping[str, Any] | None) -> str | None:
    """Return the key of a model's config that describes another model as its part; None: none or several.

    Example:
        >>> encoder = {"model_type": "clip_vision_model"}
        >>> part_key({"model_type": "clip", "vision_config": encoder}, encoder)
        'vision_config'
    """
    kind = (part or {}).get("model_type")
    if whole is None or kind is None or kind == whole.get("model_type"):
        return None
    inner = {k: cast("dict[str, Any]", v) for k, v in whole.items() if isinstance(v, dict)}
    found = [key for key, config in inner.items() if config.get("model_type") == kind]
    return found[0] if len(found) == 1 else None


class Part(View):
    """A part of a base, under the base's names and with the base's config.

    It gives the tensors of the base that begin with `root`, and the others that it has.
    """

    def __init__(
        self, stored: Checkpoint, names: Mapping[str, str], config: Mapping[str, Any], root: str
    ) -> None:
        super().__init__(stored, names)
        self.config = config
        self._root = root

    def gives(self, name: str) -> bool:
        return name.startswith(self._root) or name in self.headers


def as_part(checkpoint: Checkpoint, base: Checkpoint) -> Checkpoint:
    """Return an expert as the part of its base that it is; any other expert stays as it is.

    The configs say so: the expert's `model_type` is that of one config inside the base's.

    Args:
        checkpoint: the expert, under the base's names as far as these are known.
        base: the base.

    Example:
        >>> import torch
        >>> from covmerge.files.checkpoints.memory import MemoryCheckpoint
        >>> config = {"model_type": "clip", "vision_config": {"model_type": "clip_vision_model"}}
        >>> base = MemoryCheckpoint({"vision_model.layers.0.fc.weight": torch.ones(2, 2)}, config)
        >>> encoder = {"layers.0.fc.weight": torch.ones(2, 2)}
        >>> part = as_part(MemoryCheckpoint(encoder, {"model_type": "clip_vision_model"}), base)
        >>> list(part.headers), part.gives("text_model.layers.0.fc.weight")
        (['vision_model.layers.0.fc.weight'], False)
    """
    key = part_key(base.config, checkpoint.config)
    if key is None:
        return checkpoint
    prefix = _prefix(checkpoint, base)
    names = {prefix + name: name for name in checkpoint.headers}
    root = _root(names, base.headers)
    if not root:
        return checkpoint
    whole, inner = base.config or {}, checkpoint.config or {}
    part = Part(checkpoint, names, {**whole, key: {**whole[key], **inner}}, root)
    theirs = sum(not part.gives(name) for name in base.headers)
    part.notes = (
        *part.notes,
        f"{checkpoint.source} is the part '{root.rstrip('.')}' of the base (its model_type is the one of "
        f"{key}): it changes nothing of the other {counted(theirs, 'tensor')}",
    )
    return part


def _prefix(expert: Checkpoint, base: Checkpoint) -> str:
    """Return what the base has before every name of the expert, with the same shapes; '' if nothing."""
    stored = {name: header.shape for name, header in base.headers.items()}
    first = next(iter(expert.headers), "")
    if not first or not stored.keys().isdisjoint(expert.headers):
        return ""
    prefixes = [name.removesuffix(first) for name in stored if name.endswith(f".{first}")]
    found = [
        prefix
        for prefix in prefixes
        if all(stored.get(prefix + n) == header.shape for n, header in expert.headers.items())
    ]
    return found[0] if len(found) == 1 else ""


def _root(names: Iterable[str], base: Collection[str]) -> str:
    """Return what begins the base's names of a part; a head by itself, such as `lm_head`, is beside it."""
    modules = [n.split(".")[:-1] for n in names if n in base and n.count(".") > 1]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*modules, strict=False))
    return "".join(f"{level[0]}." for level in common)
