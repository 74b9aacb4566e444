"""A checkpoint as planning sees it, and adapters over their base or over a part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import cast

import torch

from covmerge.base.text import some
from covmerge.base.types import TensorHeader
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.adapters.parts import in_layout_of
from covmerge.files.checkpoints.authors_layouts import Given
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.conversions import converted, names_in_memory
from covmerge.files.checkpoints.unwrapped import in_memory
from covmerge.files.checkpoints.view import respelled
from covmerge.files.quantised.view import is_quantised
from covmerge.files.tensors.describe import (
    ModelDescription,
    TensorInfo,
    conv1d_names,
    describe_checkpoint,
)
from covmerge.files.tensors.names import find_name
from covmerge.files.tensors.skeleton import model_type_of
from covmerge.plan.planning.operations import Operand


@dataclass(frozen=True)
class Model:
    """A checkpoint with the description of its tensors; messages name it by `str`."""

    checkpoint: Checkpoint
    description: ModelDescription
    name: str | None = None  # the expert's name; None: it is the base

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str | None = None) -> Model:
        return cls(checkpoint, describe_checkpoint(checkpoint), name)

    def __str__(self) -> str:
        who = "the base" if self.name is None else f"expert '{self.name}'"
        return f"{who} ({self.checkpoint.source})"

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        return self.checkpoint.headers

    @property
    def model_type(self) -> object:
        """Its config's key of this name; None: there is none, or no config."""
        return (self.checkpoint.config or {}).get("model_type")

    @property
    def prefixes(self) -> list[str]:
        """Prefixes that names may have or lack."""
        return [self.description.prefix] if self.description.prefix else []

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor, or of the stored factors of its update."""
        return (self.checkpoint.low_rank.get(name) or self.headers[name]).dtype

    def operand(self, source: str, name: str | None, weight: float = 1.0) -> Operand:
        """Return one of the model's tensors as an operand; an adapter's factors are read whole."""
        stored = None if name is None or name in self.checkpoint.low_rank else self.headers[name]
        rows = stored.shape[0] if stored is not None and stored.shape else None
        return Operand(source, name, rows, weight)

    def stored_bytes(self, name: str, elements: int) -> int:
        """Return the bytes read for `elements` elements of a tensor; factors are read whole."""
        if name in self.checkpoint.low_rank:
            elements = self.checkpoint.low_rank[name].elements
        else:
            elements = self.checkpoint.held(name, elements)
        return elements * self.dtype(name).itemsize


def names_in_base(base: Model, names: Collection[str]) -> dict[str, str]:
    """Return the adapter's names for the base's tensors that it changes, by the base's names."""
    renamed = {to: name for name, to in respelled(names, base.headers).items()}
    loaded = names_in_memory(names, base.checkpoint.config)  # of another version of transformers
    pieces = Counter(info.parameter for info in base.description.tensors.values())
    found: dict[str, str] = {}
    for name in base.headers:
        info = base.description.tensors[name]
        adapter_name = find_name(name, base.prefixes, names)
        if adapter_name is None and pieces[info.parameter] == 1:
            # The model's names may differ from its files' names, and PEFT uses the model's.
            adapter_name = find_name(info.parameter, base.prefixes, names)
            adapter_name = adapter_name or loaded.get(info.parameter)
        adapter_name = renamed.get(name) if adapter_name is None else adapter_name
        if adapter_name is not None:
            found[name] = adapter_name
    return found


def over_base(adapter: AdapterCheckpoint, base: Model) -> AdapterCheckpoint:
    """Return an adapter with the base's names, bound to the base's weights that it computes from."""
    if (rejoined := _rejoined(adapter, base)) is not None:
        return rejoined
    conv1d = conv1d_names(base.description)
    folders = PurePath(base.checkpoint.source).parts[-2:]  # a folder, or a file in one
    named = adapter.named_as(base.headers, conv1d, base.checkpoint.config, folders)
    names = {theirs: name for name, theirs in names_in_base(base, _held(named)).items()}
    return named.over(base.checkpoint, names, conv1d)


def model_in_memory(base: Checkpoint, adapters: Iterable[AdapterCheckpoint]) -> Checkpoint:
    """Return a base with the tensors that transformers splits on loading, if all adapters fit the parts.

    Without adapters they are split too, because a new adapter is loaded over the parts.
    """
    whole = in_memory(base)
    if whole is base or is_quantised(base):
        return base
    model, fused = Model.of(base), base.headers.keys() - whole.headers.keys()
    apart = (fused.isdisjoint(names_in_base(model, _held(adapter))) for adapter in adapters)
    return whole if all(apart) else base


def _rejoined(adapter: AdapterCheckpoint, base: Model) -> AdapterCheckpoint | None:
    """Return an adapter of tensors in other pieces than the base's, over the base's; None: it has none."""
    whole = in_memory(base.checkpoint)
    layout: Sequence[Given] = ()
    if whole is base.checkpoint or _is_beside(adapter, base, Model.of(whole)):
        whole, layout = in_layout_of(_held(adapter), adapter.folds.missing, base.checkpoint)
        if whole is base.checkpoint:
            return None
    view = Model.of(whole)
    over = over_base(adapter, view)
    names = names_in_base(view, _held(over))
    shapes, stored = ({n: h.shape for n, h in model.headers.items()} for model in (view, base))
    made, _ = converted(shapes, stored, base.checkpoint.config, layout)
    return over.rejoined(
        whole,
        names,
        {n: one for n, one in made.items() if not names.keys().isdisjoint(one.stored())},
    )


def _is_beside(adapter: AdapterCheckpoint, base: Model, view: Model) -> bool:
    """Return whether an adapter changes nothing that only a view of its base has."""
    divided = view.headers.keys() - base.headers.keys()
    return divided.isdisjoint(names_in_base(view, _held(adapter)))


def _held(adapter: AdapterCheckpoint) -> set[str]:
    return {*adapter.low_rank, *adapter.headers}


def on_part(adapter: AdapterCheckpoint, base: Model) -> AdapterCheckpoint:
    """Return an adapter that was made on a part of the base with the base's names; others unchanged.

    PEFT writes the class of the adapted model into `auto_mapping`. It tells the part if the base has one
    model of that class inside, or one of its kind. The folder that an adapter names is not opened: it is a
    stranger's path.
    """
    made_on = _class_of(adapter)
    path = None if made_on is None else _path_of(made_on, base)
    if path is None:
        return adapter
    names = _held(adapter)
    renamed = _names_in_part(names, path, base)
    beside = sorted(names - renamed.keys())
    changed = f"that and {some(beside, 3, quoted=True)}" if beside else "only that"
    note = f"{adapter.source} was made on a part of the base, '{path}' ({made_on}), and changes {changed}"
    return adapter.on_part(renamed, _stored_root(path, base), note)


def _path_of(made_on: str, base: Model) -> str | None:
    """Return the path of the base's part that is a model of a class; None: none is, or several are."""
    parts = base.description.parts
    if not parts or made_on == base.description.architecture:
        return None
    paths = [path for path, (of_class, _) in parts.items() if of_class == made_on]
    if len(paths) != 1:
        kind = model_type_of(made_on)
        if kind is None or kind == base.model_type:
            return None
        paths = [path for path, (_, of_kind) in parts.items() if of_kind == kind]
    return paths[0] if len(paths) == 1 else None


def _names_in_part(names: Iterable[str], path: str, base: Model) -> dict[str, str]:
    """Return the base's names for tensors of a part, as far as the part has them.

    The part by itself may have a prefix before its names, as `LlamaForCausalLM` has `model.`. Names that
    differ in such a prefix only are not all of the part, and are left out.
    """
    root, stored = _stored_root(path, base), {_module(name) for name in base.headers}
    parameters = {info.parameter for info in _inside(path, base)}
    found: dict[str, str] = {}
    for name in names:
        for inner in (name, name.partition(".")[2]):
            if (in_model := f"{path}.{inner}") in parameters:
                found[name] = in_model
            elif root and _module(root + inner) in stored:
                found[name] = root + inner
            else:
                continue
            break
    count = Counter(found.values())
    return {name: to for name, to in found.items() if count[to] == 1}


def parts_with(names: Collection[str], base: Model) -> list[str]:
    """Return the paths of the base's parts that have all of these tensors."""
    parts = base.description.parts
    return [path for path in parts if len(_names_in_part(names, path, base)) == len(names)]


def _class_of(adapter: AdapterCheckpoint) -> str | None:
    """Return the class of the model that was adapted, as PEFT writes it; None: no file says it."""
    mapping: object = adapter.adapter_config.get("auto_mapping")
    if not isinstance(mapping, Mapping):
        return None
    name = cast("Mapping[str, object]", mapping).get("base_model_class")
    return name if isinstance(name, str) else None


def _stored_root(path: str, base: Model) -> str:
    """Return what begins the stored names of a part; the path is that of the model in memory."""
    rests = ((i.name, i.parameter.removeprefix(f"{path}.")) for i in _inside(path, base))
    roots = Counter(name.removesuffix(rest) for name, rest in rests if name.endswith(rest))
    return roots.most_common(1)[0][0] if roots else ""


def _inside(path: str, base: Model) -> list[TensorInfo]:
    tensors = base.description.tensors.values()
    return [info for info in tensors if info.parameter.startswith(f"{path}.")]


def _module(name: str) -> str:
    return name.rpartition(".")[0]
