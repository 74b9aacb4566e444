"""Modules of a sentence-transformers model in separate folders, some of which have weights.

`modules.json` names the folders of modules; a router's config names the folders of its own modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import cast

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.base.types import Module
from covmerge.files.checkpoints.base import WeightFile
from covmerge.files.checkpoints.json_file import as_object, parse_object
from covmerge.files.stores.hub import COMPANIONS
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.store import Store, StoredFile, child

MODULES = "modules.json"
WEIGHTS = (  # files of weights of a module, in the order in which they are looked for
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

_ROUTERS = ("router_config.json", "config.json")  # the second name is that of older releases
# Classes of sentence-transformers 6.2 whose modules always have weights.
_WITH_WEIGHTS = frozenset(
    {"Dense", "LSTM", "CNN", "LayerNorm", "WeightedLayerPooling", "WordWeights", "WordEmbeddings"}
    | {"StaticEmbedding", "SparseStaticEmbedding", "SparseAutoEncoder", "CLIPModel"}
    | {"Transformer", "MLMTransformer"}
)
_IGNORED = (".md", ".py", ".gitattributes", ".gitignore")
_MOST_BYTES = 1_000_000
_MOST_VALUES = 10_000
_MOST_MODULES = 200
_DEEPEST = 4


@dataclass(frozen=True)
class Folder:
    """The folder of one module."""

    path: str  # path in the model's folder, with `/` between the parts
    kind: str  # the name of its class
    store: Store
    names: frozenset[str]  # of its files


class ModuleWeights(WeightFile):
    """A module's file of weights, whose tensors are shown under the whole model's names."""

    def __init__(self, read: WeightFile, module: Module) -> None:
        self._read = read
        self._names = {f"{module.prefix}{name}": name for name in read.headers}
        self.notes = read.notes
        self.settings = read.settings
        self.headers = MappingProxyType(
            {
                name: replace(read.headers[stored_name], name=name, module=module)
                for name, stored_name in self._names.items()
            }
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        return self._read.read(self._names[name], rows)

    def close(self) -> None:
        self._read.close()


def module_folders(store: Store, names: Collection[str]) -> list[Folder]:
    """Return the existing folders of a model's modules, except the model's own folder.

    Raises:
        CheckpointError: a module's path leads out of the folder, or there are far too many modules.
    """
    if MODULES not in names:
        return []
    found: dict[str, Folder] = {}
    for path, kind in _modules_in(store):
        for folder in _with_inner(store, path, kind, _DEEPEST):
            found.setdefault(folder.path, folder)
            if len(found) > _MOST_MODULES:
                raise CheckpointError(
                    f"{store}: {MODULES} names more than {_MOST_MODULES} modules: is it the right file?"
                )
    return [folder for path, folder in found.items() if path]


def weights_in(store: Store, folder: Folder) -> StoredFile | None:
    """Return a module's file of weights or index, or None if it has no weights.

    Raises:
        CheckpointError: it has other files, or its class always has weights.
    """
    name = next((name for name in WEIGHTS if name in folder.names), None)
    if name is None:
        _check_no_weights(store, folder)
        return None
    return child(folder.store, name)


def _check_no_weights(store: Store, folder: Folder) -> None:
    """Raise if a module without a file that is read has weights in another format, or must have weights."""
    where, wanted = f"{store}: the module in {folder.path}", " nor ".join(WEIGHTS[::2])
    others = [name for name in folder.names if not name.lower().endswith((*COMPANIONS, *_IGNORED))]
    if others:
        raise CheckpointError(
            f"{where} has {some(sorted(others), 3)} and neither {wanted}, so that it cannot be merged. If "
            "the base's is to be kept, move the file out of the folders, merge, and copy it into the same "
            "folder of the output"
        )
    if folder.kind in _WITH_WEIGHTS:
        raise CheckpointError(
            f"{where} is a {folder.kind}, and has neither {wanted}: the download was probably cut short, "
            "fetch it again"
        )


def _with_inner(store: Store, path: str, kind: str, deep: int) -> Iterator[Folder]:
    """Yield the folder at a path and, if it has a router, the folders of that router's modules."""
    place = _store_at(store, path)
    if place is None:
        if kind in _WITH_WEIGHTS:
            _check_no_weights(store, Folder(path, kind, store, frozenset()))
        return
    folder = Folder(path, kind, place, frozenset(place.names()))
    yield folder
    inner = _routed(folder)
    if inner and not deep:
        raise CheckpointError(f"{store}: {path} holds a router in a router, without end")
    for name, inner_kind in inner.items():
        yield from _with_inner(store, f"{path}/{name}" if path else name, inner_kind, deep - 1)


def _store_at(store: Store, path: str) -> Store | None:
    """Return the store of a folder inside a model's folder, or None if the folder is empty.

    A part of the path that leads out of the folder, by its name or as a link, is an error.
    """
    for part in PurePosixPath(path).parts:
        check_bare(part, store.where(MODULES))
        if store.folder is not None:
            store.check(part)
        store = store.inside(part)
    try:
        return store if store.names() or store.folders() else None
    except FileNotFoundError:
        return None


def _modules_in(store: Store) -> list[tuple[str, str]]:
    """Return the path and the class of each module."""
    file = StoredFile(store, MODULES)
    data = b'{"modules":' + _bounded(file) + b"}"
    modules: object = parse_object(data, str(file), _MOST_VALUES)["modules"]
    entries = cast("list[object]", modules) if isinstance(modules, list) else [modules]
    found = [as_object(one) for one in entries]
    paths = [one.get("path") for one in found]
    if not all(isinstance(path, str) for path in paths):
        raise CheckpointError(
            f"{file} is no list of modules, each with a `path`: fetch it again, or remove it if this is "
            "no model of sentence-transformers"
        )
    return [
        ("/".join(PurePosixPath(str(path)).parts), _class_of(one.get("type")))
        for path, one in zip(paths, found, strict=True)
    ]


def _class_of(kind: object) -> str:
    return kind.rpartition(".")[2] if isinstance(kind, str) else ""


def _routed(folder: Folder) -> dict[str, str]:
    """Return folder names and classes of the modules of a folder's router; empty if it has no router."""
    for name in _ROUTERS:
        if name in folder.names:
            file = StoredFile(folder.store, name)
            fields = parse_object(_bounded(file), str(file), _MOST_VALUES * 20)
            types = as_object(fields.get("types"))
            if types and isinstance(fields.get("structure"), dict):
                return {inner: _class_of(kind) for inner, kind in types.items()}
    return {}


def _bounded(file: StoredFile) -> bytes:
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise CheckpointError(f"{file} has more than {_MOST_BYTES} bytes: is it the right file?")
    return data
