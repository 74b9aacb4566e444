"""Adapters that were made on a part of their base, such as the image encoder of CLIP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from covmerge.base.text import some
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.describe import ModelDescription, TensorInfo
from covmerge.files.tensors.skeleton import model_type_of


def on_part(
    adapter: AdapterCheckpoint, base: Checkpoint, described: ModelDescription
) -> AdapterCheckpoint:
    """Return an adapter that was made on a part of the base with the base's names; others unchanged.

    PEFT writes the class of the adapted model into `auto_mapping`. It tells the part if the base has one
    model of that class inside, or one of its kind. The folder that an adapter names is not opened: it is a
    stranger's path.
    """
    made_on = _class_of(adapter)
    path = None if made_on is None else _path_of(made_on, base, described)
    if path is None:
        return adapter
    names = {*adapter.low_rank, *adapter.headers}
    renamed = _names_in_part(names, path, base, described)
    beside = sorted(names - renamed.keys())
    changed = f"that and {some(beside, 3, quoted=True)}" if beside else "only that"
    note = f"{adapter.source} was made on a part of the base, '{path}' ({made_on}), and changes {changed}"
    return adapter.on_part(renamed, _stored_root(path, described), note)


def _path_of(made_on: str, base: Checkpoint, described: ModelDescription) -> str | None:
    """Return the path of the base's part that is a model of a class; None: none is, or several are."""
    parts = described.parts
    if not parts or made_on == described.architecture:
        return None
    paths = [path for path, (of_class, _) in parts.items() if of_class == made_on]
    if len(paths) != 1:
        kind = model_type_of(made_on)
        if kind is None or kind == (base.config or {}).get("model_type"):
            return None
        paths = [path for path, (_, of_kind) in parts.items() if of_kind == kind]
    return paths[0] if len(paths) == 1 else None


def _names_in_part(
    names: Iterable[str], path: str, base: Checkpoint, described: ModelDescription
) -> dict[str, str]:
    """Return the base's names for tensors of a part, as far as the part has them.

    The part by itself may have a prefix before its names, as `LlamaForCausalLM` has `model.`. Names that
    differ in such a prefix only are not all of the part, and are left out.
    """
    root, stored = _stored_root(path, described), {_module(name) for name in base.headers}
    parameters = {info.parameter for info in _inside(path, described)}
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


def parts_with(names: Collection[str], base: Checkpoint, described: ModelDescription) -> list[str]:
    """Return the paths of the base's parts that have all of these tensors."""
    found = {path: _names_in_part(names, path, base, described) for path in described.parts}
    return [path for path, renamed in found.items() if len(renamed) == len(names)]


def _class_of(adapter: AdapterCheckpoint) -> str | None:
    """Return the class of the model that was adapted, as PEFT writes it; None: no file says it."""
    mapping: object = adapter.adapter_config.get("auto_mapping")
    if not isinstance(mapping, Mapping):
        return None
    name = cast("Mapping[str, object]", mapping).get("base_model_class")
    return name if isinstance(name, str) else None


def _stored_root(path: str, described: ModelDescription) -> str:
    """Return what begins the stored names of a part; the path is that of the model in memory."""
    rests = ((i.name, i.parameter.removeprefix(f"{path}.")) for i in _inside(path, described))
    roots = Counter(name.removesuffix(rest) for name, rest in rests if name.endswith(rest))
    return roots.most_common(1)[0][0] if roots else ""


def _inside(path: str, described: ModelDescription) -> list[TensorInfo]:
    return [i for i in described.tensors.values() if i.parameter.startswith(f"{path}.")]


def _module(name: str) -> str:
    return name.rpartition(".")[0]
