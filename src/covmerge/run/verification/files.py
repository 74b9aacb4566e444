"""Comparison of an output's files with the hashes in its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from covmerge.base.text import counted, some
from covmerge.files.adapters.checkpoint import ADAPTER_CONFIG
from covmerge.files.checkpoints.base import CARD_NAME
from covmerge.files.checkpoints.hashes import FileHashes
from covmerge.files.checkpoints.layout import HEADS_FOLDER, MASKS_FOLDER
from covmerge.files.checkpoints.manifest import ADDED_LATER, MANIFEST_NAME
from covmerge.files.stores.store import Store, tree
from covmerge.run.engine.hashing import hashes_of
from covmerge.run.export.companions import is_weights
from covmerge.run.verification.outcome import Check

# By file: its hashes, or the reason why it has none.
Found = Mapping[str, FileHashes | str]


def hash_files(store: Store, names: Iterable[str]) -> dict[str, FileHashes | str]:
    """Return by file of an output its hashes, or a text that says what is wrong with it."""
    return {name: hashes_of(store, name) for name in names}


def check_files(store: Store, manifest: Mapping[str, Any], found: Found) -> Check:
    """Check that the files of an output are those that the merge wrote.

    A model card that was edited or removed is named, and is no failure, as it is for people. Added files
    are named too; they are a failure if a loader could take them in place of the merge's.
    """
    recorded: Mapping[str, Mapping[str, Any]] | None = manifest.get("files")
    if recorded is None:
        return Check(
            "files",
            ok=True,
            detail="not checked: no hashes are recorded (an older covmerge wrote this output), so "
            "that changed bytes would not be found; merge again to have them",
            made=False,
        )
    wrong: list[str] = []
    said: list[str] = []
    edited = 0
    of_weights = (_folder_of(name) for name in recorded if is_weights(name))
    places = {"", HEADS_FOLDER, MASKS_FOLDER, *of_weights}
    for name, record in recorded.items():
        for problem in _problems(record, found[name]):
            if name != CARD_NAME:
                wrong.append(f"{name} {problem}")
            else:
                gone = isinstance(found[name], str)
                said.append(f"{name} {problem}" if gone else f"{name} was edited since")
                edited += 1
    for name in tree(store):
        if name not in recorded and name not in ADDED_LATER and name != MANIFEST_NAME:
            if _is_loaded(name, places):
                wrong.append(f"{name} is not of this merge, and could be loaded in its place")
            else:
                said.append(f"{name} was added since")
    if wrong:
        return Check("files", ok=False, detail=some(wrong, 5, between="; "))
    count = len(recorded) - edited
    good = f"all {count} files are as they were written"
    if edited:
        good = f"{counted(count, 'file')} of {len(recorded)} are as they were written"
    elif count == 1:
        good = "the one file is as it was written"
    detail = f"{good}; {some(said, 5, between='; ')}" if said else good
    return Check("files", ok=True, detail=detail, noted=bool(said))


def _problems(record: Mapping[str, Any], found: FileHashes | str) -> Iterator[str]:
    if isinstance(found, str):
        yield found
        return
    if found.sha256 == record["sha256"]:
        return
    wanted: Mapping[str, str] = record.get("tensors", {})
    changed = [n for n, digest in wanted.items() if found.tensors.get(n) != digest]
    if not wanted:
        yield "is not as it was written"
    elif not found.tensors:
        yield "is not as it was written: its header is damaged"
    elif changed:
        yield f"is not as it was written: {some(changed, 5, quoted=True)}"
    else:
        yield "is not as it was written: its header differs, its tensors do not"


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _is_loaded(name: str, places: Collection[str]) -> bool:
    """Return whether a loader may take a file for a part of the output; `places` are folders of weights."""
    file = name.rpartition("/")[2]
    return _folder_of(name) in places and (is_weights(file) or file == ADAPTER_CONFIG)
