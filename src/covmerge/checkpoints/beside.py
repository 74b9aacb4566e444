"""Files of weights beside a model's own: those that the output would need are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import cast

from covmerge.checkpoints.adapter_names import looks_like_adapter
from covmerge.checkpoints.base import WeightFile
from covmerge.checkpoints.json_file import parse_object
from covmerge.errors import CheckpointError
from covmerge.stores.store import Store, StoredFile
from covmerge.text import some
from covmerge.types import TensorHeader

MODULES = (
    "modules.json"  # of sentence-transformers: which modules follow one another, each in a folder
)

_MOST_BYTES = 1_000_000
_MOST_VALUES = 10_000
# What training leaves, which no model needs; and adapters, which are opened as such.
_KNOWN = re.compile(
    r"adapter_model\..*|"
    r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args|trainer_state)\b.*"
    r"|(optimizer|rng_state|random_states)_.*"
)


def check_modules(store: Store, names: Collection[str], suffixes: tuple[str, ...]) -> None:
    """Refuse a sentence-transformers model whose modules in folders have weights of their own.

    Args:
        store: the model's folder.
        names: of its files.
        suffixes: of files of weights.

    Raises:
        CheckpointError: it is one; its output would not load.
    """
    if MODULES not in names:
        return
    found = [
        f"{folder}/{name}"
        for folder in _module_folders(store)
        for name in sorted(store.inside(folder).names())
        if name.endswith(suffixes)
    ]
    if found:
        raise CheckpointError(
            f"{store}: {MODULES} names modules with weights of their own ({some(found)}). They are not "
            "merged with the model, and without them the output would not load. Merge each file of weights "
            "by itself (pass the files in place of the folders), and copy the results over the files of a "
            "copy of the base's folder"
        )


def _module_folders(store: Store) -> list[str]:
    """Folders that modules.json names; the model itself may be in one, or in the folder that it is in."""
    file = StoredFile(store, MODULES)
    data = b'{"modules":' + file.read(_MOST_BYTES) + b"}"
    modules: object = parse_object(data, str(file), _MOST_VALUES)["modules"]
    entries = cast("list[object]", modules) if isinstance(modules, list) else []
    found = [cast("dict[str, object]", entry) for entry in entries if isinstance(entry, dict)]
    folders = store.folders()
    return [path for own in found if isinstance(path := own.get("path"), str) and path in folders]


def notes_on_others(
    store: Store,
    chosen: str,
    others: Collection[str],
    headers: Mapping[str, TensorHeader],
    opened: Callable[[StoredFile], WeightFile],
) -> Iterator[str]:
    """Say which files of weights beside the model's own are left aside.

    Args:
        store: the model's folder.
        chosen: the file that led to the model's weights.
        others: names of further files of weights.
        headers: the model's tensors.
        opened: opens a file of weights.

    Raises:
        CheckpointError: one of them holds other tensors of the same model. What lies on the Hub is not
            fetched to look.
    """
    for name in sorted(others):
        if store.folder is not None and not _KNOWN.fullmatch(name):
            _check_no_part(store, name, headers, opened)
    if others:
        yield f"{store}: {chosen} was read, and not {some(sorted(others), 12)}"


def _check_no_part(
    store: Store,
    name: str,
    headers: Mapping[str, TensorHeader],
    opened: Callable[[StoredFile], WeightFile],
) -> None:
    try:
        read = opened(StoredFile(store, name))
    except CheckpointError:
        return  # no tensors that covmerge reads
    own = set(read.headers)
    read.close()
    # A copy in another precision has the same names, one under its authors' names has other modules.
    if own & headers.keys() or not _modules(own) & _modules(headers):
        return
    # An adapter has its own place in a merge; scales of activations and directions are named by modules.
    if looks_like_adapter(own) or all(f"{tensor}.weight" in headers for tensor in own):
        return
    raise CheckpointError(
        f"{store}: {name} holds {len(own)} tensors of the model that its other files lack "
        f"({some(sorted(own), 3, quoted=True)}), and the output would lack them. Merge that file by itself "
        "(pass the files in place of the folders), and the rest after it was moved out of the folder"
    )


def _modules(names: Collection[str]) -> set[str]:
    """The outermost modules of tensors."""
    return {outer for name in names if (outer := name.partition(".")[0]) != name}
