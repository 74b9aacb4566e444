"""A view of a checkpoint, often with other names; everything else is as stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Content, Kind, Quantisation, find_header
from covmerge.files.stores.hub_cache import HubModel


class View(Kind):
    """A view of a checkpoint with other names; subclasses change other things.

    `names` has the stored name of each tensor that is shown, by its new name; None: all, unchanged.
    """

    def __init__(
        self, stored: Checkpoint, names: Mapping[str, str] | None = None, *notes: str
    ) -> None:
        self._stored = stored
        self.source = stored.source
        self.config: Mapping[str, Any] | None = stored.config
        self.notes = (*stored.notes, *notes)
        self._names: Mapping[str, str] = {} if names is None else names
        self.headers: Mapping[str, TensorHeader] = stored.headers
        if names is not None:
            renamed = {name: replace(stored.headers[old], name=name) for name, old in names.items()}
            self.headers = MappingProxyType(renamed)
        quantised = stored.quantisation
        self.quantisation: Quantisation | None = quantised and replace(quantised, derived=True)
        self.untied = stored.untied
        self.is_held = stored.is_held
        self.under = stored.under
        here = {old: name for name, old in (names or {n: n for n in stored.headers}).items()}
        self.shared: Mapping[str, str] = {
            here[name]: here[first]
            for name, first in stored.shared.items()
            if name in here and first in here
        }
        self.order = stored.order

    @property
    def original(self) -> Checkpoint:
        """The checkpoint behind the view."""
        return self._stored

    @property
    def folder(self) -> Path | None:
        return self._stored.folder

    @property
    def hub(self) -> HubModel | None:
        return self._stored.hub

    def gives(self, name: str) -> bool:
        return self._stored.gives(name)

    def readme(self) -> Path | None:
        return self._stored.readme()

    def companions(self) -> Path | None:
        return self._stored.companions()

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        return self._stored.read(self._names.get(name, name), rows)

    def materialize(self) -> None:
        self._stored.materialize()

    def identity(self) -> dict[str, Json]:
        return self._stored.identity()

    def contents(self) -> Sequence[Content]:
        return self._stored.contents()

    def close(self) -> None:
        self._stored.close()


class RealParts(View):
    """A view of a checkpoint whose complex tensors get a last axis with real and imaginary part.

    These parts are merged like other numbers.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        self.headers = MappingProxyType(
            {name: _in_parts(header) for name, header in stored.headers.items()}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, self.source)
        if not header.complex:
            return self._stored.read(name, rows)
        if len(header.shape) == 1 and rows is not None:  # a single number, stored without rows
            return torch.view_as_real(self._stored.read(name))[rows.start : rows.stop]
        return torch.view_as_real(self._stored.read(name, rows))


def in_real_parts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without complex tensors; often it is unchanged. An adapter never changes.

    Example:
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> held = in_real_parts(open_checkpoint({"w": torch.tensor([1 + 2j])}))
        >>> held.headers["w"].shape, held.read("w")
        ((1, 2), tensor([[1., 2.]]))
    """
    plain = not any(header.dtype.is_complex for header in checkpoint.headers.values())
    if plain or checkpoint.is_adapter:
        return checkpoint
    return RealParts(checkpoint)


def _in_parts(header: TensorHeader) -> TensorHeader:
    if not header.dtype.is_complex:
        return header
    return replace(header, shape=(*header.shape, 2), dtype=header.dtype.to_real(), complex=True)


# Different names for the same tensor, from wrappers and older versions of libraries.

# Parts of names that wrappers of modules insert, with the library that does so.
WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_forward_module.": "Lightning",
}
_WRAPPER = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, WRAPPERS))})")
# Two names for the same parameter. The left ones are TensorFlow's, and torch's from before
# `torch.nn.utils.parametrizations`. transformers reads both.
_SPELLINGS = (
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)
# Prefixes of a language model, alone or in a model that also sees: transformers moved
# `language_model.model.`, `model.` and `visual.` to `model.language_model.` and `model.visual.`.
_HOLDERS = re.compile(r"^(?:(?:model|language_model)\.)+")


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers of modules insert.

    Example:
        >>> without_wrappers("layers.0._fsdp_wrapped_module._orig_mod.fc.weight")
        'layers.0.fc.weight'
    """
    return _WRAPPER.sub("", name)


def respelled(names: Iterable[str], base: Collection[str]) -> dict[str, str]:
    """Return the base's names for tensors that the base has under another name; others are left out.

    Two tensors never get the same name, and a name that the base has does not change.

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
    # Drop a name that another tensor has or would get too, because the choice is ambiguous.
    times = Counter(found.values())
    unchanged = set(stored) - found.keys()
    return {name: to for name, to in found.items() if times[to] == 1 and to not in unchanged}


def weight_norms(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return weights that are stored as lengths and directions, with the names of these two tensors.

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
    """Return a pair from the spelling that the base does not use to the one that it uses, or None."""
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
    """Return a name without the prefixes of a language model.

    Example:
        >>> inner_name("model.language_model.norm.weight")
        'norm.weight'
    """
    return _HOLDERS.sub("", name)


def by_inner_name(names: Collection[str]) -> dict[str, str]:
    """Return names by their inner names, without inner names that several names share.

    Example:
        >>> by_inner_name(["model.norm.weight", "model.fc.weight", "fc.weight"])
        {'norm.weight': 'model.norm.weight'}
    """
    held = Counter(inner_name(name) for name in names)
    return {inner: name for name in names if held[inner := inner_name(name)] == 1}


def differences(renamed: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the differing parts of names and of the names they are read as; each pair once.

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
