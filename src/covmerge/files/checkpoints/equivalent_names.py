"""Names that stand for the same tensor: what wrappers and older versions of a library call it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

# Modules that wrap others in place, and what writes them.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
}
_WRAPPER = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, WRAPPERS))})")
# Two names for the same parameter. The left ones are TensorFlow's, and torch's before
# `torch.nn.utils.parametrizations`; transformers reads either.
_SPELLINGS = (
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)
# What holds a language model, with or without the model that also sees: transformers moved
# `language_model.model.`, `model.` and `visual.` to `model.language_model.` and `model.visual.`.
_HOLDERS = re.compile(r"^(?:(?:model|language_model)\.)+")


def without_wrappers(name: str) -> str:
    """Return a name without what modules that wrap others in place put into it.

    Example:
        >>> without_wrappers("layers.0._fsdp_wrapped_module._orig_mod.fc.weight")
        'layers.0.fc.weight'
    """
    return _WRAPPER.sub("", name)


def respelled(names: Iterable[str], base: Collection[str]) -> dict[str, str]:
    """Return what a base calls tensors that it has under another name; the rest is left out.

    Two tensors never get one name, and a name that the base has stays.

    Args:
        names: of a checkpoint's tensors.
        base: the base's names.

    Example:
        >>> respelled(["language_model.model.norm.weight"], ["model.language_model.norm.weight"])
        {'language_model.model.norm.weight': 'model.language_model.norm.weight'}
        >>> respelled(["bert.LayerNorm.gamma"], ["LayerNorm.weight"])
        {'bert.LayerNorm.gamma': 'bert.LayerNorm.weight'}
    """
    stored, known = list(names), set(base)
    if not known:
        return {}
    spellings = [way for pair in _SPELLINGS if (way := _towards(pair, known)) is not None]
    by_inner = by_inner_name(known)
    found: dict[str, str] = {}
    for name in stored:
        if name in known:
            continue
        spelled = _spelled(name, spellings)
        target = spelled if spelled in known else by_inner.get(inner_name(spelled), spelled)
        if target != name:
            found[name] = target
    # A tensor of this name, or two that would get it: which is meant, nothing says.
    times = Counter(found.values())
    unchanged = set(stored) - found.keys()
    return {name: to for name, to in found.items() if times[to] == 1 and to not in unchanged}


def weight_norms(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the weights of which there are lengths and directions, with the names of these.

    Example:
        >>> weight_norms(["conv.weight_v", "conv.weight_g"])
        {'conv.weight': ('conv.weight_g', 'conv.weight_v')}
    """
    return {
        f"{module}.weight": (name, module + direction)
        for length, direction in zip(_SPELLINGS[2], _SPELLINGS[3], strict=True)
        for name in names
        if (module := name.removesuffix(length)) != name and module + direction in names
    }


def _towards(pair: tuple[str, str], base: Collection[str]) -> tuple[str, str] | None:
    """Return a pair from what the base does not use to what it uses."""
    old, new = (any(name.endswith(spelling) for name in base) for spelling in pair)
    if old == new:
        return None
    return pair if new else (pair[1], pair[0])


def _spelled(name: str, spellings: Iterable[tuple[str, str]]) -> str:
    for theirs, ours in spellings:
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def inner_name(name: str) -> str:
    """Return a name without what holds a language model.

    Example:
        >>> inner_name("model.language_model.norm.weight")
        'norm.weight'
    """
    return _HOLDERS.sub("", name)


def by_inner_name(names: Collection[str]) -> dict[str, str]:
    """Return names by their inner ones, without those that are not the only one.

    Example:
        >>> by_inner_name(["model.norm.weight", "model.fc.weight", "fc.weight"])
        {'norm.weight': 'model.norm.weight'}
    """
    held = Counter(inner_name(name) for name in names)
    return {inner: name for name in names if held[inner := inner_name(name)] == 1}


def differences(renamed: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what differs between names and those that they are read as, each pair once.

    Example:
        >>> differences({"model.fc.weight": "fc.weight", "x.LayerNorm.beta": "x.LayerNorm.bias"})
        [('model', ''), ('beta', 'bias')]
    """
    return list(dict.fromkeys(_difference(*pair) for pair in renamed.items()))


def _difference(name: str, other: str) -> tuple[str, str]:
    one, two = name.split("."), other.split(".")
    while one and two and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
    while one and two and one[0] == two[0]:
        one, two = one[1:], two[1:]
    return ".".join(one), ".".join(two)
