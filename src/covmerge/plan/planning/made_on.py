"""Adapters that were made on a part of their base, such as the image encoder of CLIP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.describe import ModelDescription, TensorInfo
from covmerge.files.tensors.skeleton import model_type_of


def on_part(
    adapter: AdapterCheckpoint, base: Checkpoint, described: ModelDescription
) -> AdapterCheckpoint:
    """Return an adapter that was made on a part of the base with the base's names; others unchanged.

    PEFT writes the class of the adapted model into `auto_mapping`. It tells the part if the base has one
    model of that class inside. The folder that an adapter names is not opened: it is a stranger's path.
    """
    parts = described.parts
    made_on = _made_on(adapter) if parts else None
    if made_on is None:
        return adapter
    name, kind = made_on
    if kind == (base.config or {}).get("model_type"):
        return adapter
    paths = [path for path, part in parts.items() if part[1] == kind]
    of_class = [path for path in paths if parts[path][0] == name]
    path = next(iter(of_class if len(of_class) == 1 else paths), "")
    if len(paths) != 1 and len(of_class) != 1:
        return adapter
    renamed = _names_in_part({*adapter.low_rank, *adapter.headers}, path, base, described)
    note = (
        f"{adapter.source} was made on a part of the base, '{path}' ({name}), and changes only that"
    )
    return adapter.on_part(renamed, _stored_root(path, described), note)


def _names_in_part(
    names: Iterable[str], path: str, base: Checkpoint, described: ModelDescription
) -> dict[str, str]:
    """Return the base's names for tensors of a part, as far as the part has them.

    The part by itself may have a prefix before its names, as `LlamaForCausalLM` has `model.`.
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
    return found


def parts_with(names: Collection[str], base: Checkpoint, described: ModelDescription) -> list[str]:
    """Return the paths of the base's parts that have all of these tensors."""
    found = {path: _names_in_part(names, path, base, described) for path in described.parts}
    return [path for path, renamed in found.items() if len(renamed) == len(names)]


def _made_on(adapter: AdapterCheckpoint) -> tuple[str, str] | None:
    """Return the class of the model that was adapted, and its model_type; None where no file says it."""
    mapping: object = adapter.adapter_config.get("auto_mapping")
    name: object = None
    if isinstance(mapping, Mapping):
        name = cast("Mapping[str, object]", mapping).get("base_model_class")
    if isinstance(name, str) and (kind := model_type_of(name)) is not None:
        return name, kind
    return None


def _stored_root(path: str, described: ModelDescription) -> str:
    """Return what begins the stored names of a part; the path is that of the model in memory."""
    rests = ((i.name, i.parameter.removeprefix(f"{path}.")) for i in _inside(path, described))
    roots = Counter(name.removesuffix(rest) for name, rest in rests if name.endswith(rest))
    return roots.most_common(1)[0][0] if roots else ""


def _inside(path: str, described: ModelDescription) -> list[TensorInfo]:
    return [i for i in described.tensors.values() if i.parameter.startswith(f"{path}.")]


def _module(name: str) -> str:
    return name.rpartition(".")[0]
