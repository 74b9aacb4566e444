"""An expert that is one part of its base: the image encoder of CLIP, or the language model of Gemma 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, cast

from covmerge.base.text import counted
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.config_counts import TIED, language_parts
from covmerge.files.checkpoints.view import View

# A tied expert stores no head, and the base may store one: then the expert lacks it, which is an error.
_HEAD = "lm_head.weight"


def part_key(whole: Mapping[str, Any] | None, part: Mapping[str, Any] | None) -> str | None:
    """Return the key of a model's config that describes another model as its part; None: none or several.

    The key of a part of a part is that of the part, a dot and the key in it.

    Example:
        >>> encoder = {"model_type": "clip_vision_model"}
        >>> part_key({"model_type": "clip", "vision_config": encoder}, encoder)
        'vision_config'
    """
    kind = (part or {}).get("model_type")
    if whole is None or kind is None or kind == whole.get("model_type"):
        return None
    found = list(_keys(whole, kind))
    return found[0] if len(found) == 1 else None


def _keys(config: Mapping[str, Any], kind: object) -> Iterator[str]:
    """Yield the keys of the configs of a kind, inside a config and inside those in it.

    A key with a dot in it, which no model has, is left out: a dot joins the keys of a path.
    """
    inner = {k: cast("dict[str, Any]", v) for k, v in config.items() if isinstance(v, dict)}
    for key, part in inner.items():
        if "." in key:
            continue
        if part.get("model_type") == kind:
            yield key
        else:
            yield from (f"{key}.{rest}" for rest in _keys(part, kind))


def _with(config: Mapping[str, Any], key: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of a part's own config in it."""
    first, _, rest = key.partition(".")
    inner = config[first]
    return {**config, first: _with(inner, rest, part) if rest else {**inner, **part}}


class Part(View):
    """A part of a base, under the base's names and with the base's config.

    It gives the base's tensors that begin with `root`, others that it has, and a head that it ties: that of
    a language model, which is its embedding.
    """

    def __init__(
        self,
        stored: Checkpoint,
        names: Mapping[str, str],
        config: Mapping[str, Any],
        root: str,
        *,
        ties: bool,
    ) -> None:
        super().__init__(stored, names)
        self.config = config
        self._root = root
        self._ties = ties

    def gives(self, name: str) -> bool:
        of_part = name.startswith(self._root) or name in self.headers
        return of_part or (self._ties and name.endswith(_HEAD))


def as_part(checkpoint: Checkpoint, base: Checkpoint) -> Checkpoint:
    """Return an expert that is a part of its base under the base's names, and any other expert unchanged.

    An expert is a part of its base if its `model_type` is that of exactly one config inside the base's.

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
    prefix = _prefix(checkpoint, base, {name.removesuffix("_config") for name in key.split(".")})
    names = {prefix + name: name for name in checkpoint.headers}
    root = _root(names, base.headers)
    if not root:
        return checkpoint
    whole, inner = base.config or {}, checkpoint.config or {}
    config = _with(whole, key, inner)
    around: Mapping[str, Any] = whole
    *outer, last = key.split(".")
    for name in outer:
        around = around[name]
    says = TIED in inner and last in dict(language_parts(around))
    if says:
        config[TIED] = inner[TIED]
    part = Part(checkpoint, names, config, root, ties=says and inner[TIED] is True)
    theirs = sum(not part.gives(name) for name in base.headers)
    part.notes = (
        *part.notes,
        f"{checkpoint.source} is the part '{root.rstrip('.')}' of the base (its model_type is the one of "
        f"{key}): it changes nothing of the other {counted(theirs, 'tensor')}",
    )
    return part


def _prefix(expert: Checkpoint, base: Checkpoint, called: Collection[str]) -> str:
    """Return the prefix that most of the expert's names have in the base; '' if there is none, or several.

    Several prefixes may have the same names, as the two encoders of CLIP. Then shapes decide, and then
    what the base's config calls the part: Qwen2.5-Omni's `thinker` and `talker` both have a `model`.
    """
    shapes = {name: header.shape for name, header in base.headers.items()}
    found = Counter(
        ".".join(parts[:at]) + "." if at else ""
        for parts in (name.split(".") for name in shapes)
        for at in range(len(parts))
        if ".".join(parts[at:]) in expert.headers
    )
    most = max(found.values(), default=0)
    if 2 * most <= len(expert.headers):
        return ""
    of_shape = {
        prefix: sum(shapes.get(prefix + n) == header.shape for n, header in expert.headers.items())
        for prefix, count in found.items()
        if count == most
    }
    best = [prefix for prefix, count in of_shape.items() if count == max(of_shape.values())]
    if len(best) > 1:
        best = [prefix for prefix in best if not {*prefix.split(".")}.isdisjoint(called)]
    return best[0] if len(best) == 1 else ""


def _root(names: Iterable[str], base: Collection[str]) -> str:
    """Return the prefix that the base has for a part; top-level modules such as `lm_head` do not count."""
    modules = [n.split(".")[:-1] for n in names if n in base and n.count(".") > 1]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*modules, strict=False))
    return "".join(f"{level[0]}." for level in common)
