"""Checkpoints of other machines: weights are read where they lie, and what lies beside them is fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from covmerge.base.errors import CheckpointError
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import CARD_NAME, check_unchanged
from covmerge.files.checkpoints.content import Content, Pace
from covmerge.files.checkpoints.folder import FileCheckpoint
from covmerge.files.checkpoints.modules import module_folders
from covmerge.files.checkpoints.ranges import open_stored, read_into, still_readable
from covmerge.files.checkpoints.view import View
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.remote import RemoteStore
from covmerge.files.stores.store import Stamp, StoredFile, child

_BESIDE = re.compile(r".*(?<!\.index)\.(json|txt|model|jinja|tiktoken)", re.S)
_FOLDERS = re.compile(r"[0-9]_.*|additional_chat_templates", re.S)
_MOST = 2**29  # bytes of one of them
_MANY = 200


class RemoteCheckpoint(View):
    """A checkpoint in a store of another machine.

    Args:
        stored: its files of weights, as they lie there.
        store: the folder that it is, or that its file lies in.
        whole: whether it is the folder, and what lies beside the weights is the checkpoint's.
    """

    def __init__(self, stored: FileCheckpoint, store: RemoteStore, *, whole: bool) -> None:
        super().__init__(stored)
        self.is_far = True
        self._files = stored
        self._store = store
        self._whole = whole
        self._fetched: TemporaryDirectory[str] | None = None
        self._card: TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path | None:
        """The folder with what lies beside the weights, once `materialize` has fetched it."""
        return None if self._fetched is None else Path(self._fetched.name)

    def readme(self) -> Path | None:
        card = StoredFile(self._store, CARD_NAME)
        if not (self._whole and _is_there(card)):
            return None
        if self._card is None:
            self._card = _filled(lambda folder: _fetch(card, folder))
        return Path(self._card.name) / CARD_NAME

    def companions(self) -> Path | None:
        if self._whole and self._fetched is None:
            self._fetched = _filled(lambda folder: _fetch_companions(self._store, folder))
        return self.folder

    def materialize(self) -> None:
        """Fetch what lies beside the weights; these are read where they lie."""
        self.companions()

    def identity(self) -> dict[str, Json]:
        """Sizes and versions of the files, as they were opened; 0: the server has no version of one."""
        files: dict[str, Json] = {
            self._files.path_of(file): {"size": stamp[0], "version": stamp[1]}
            for file, stamp in self._files.stamps.items()
        }
        return {"kind": "remote", "files": files}

    def contents(self) -> Sequence[Content]:
        """The version that the server has of every file; the files where it has none for one of them.

        To hash the files they would have to be fetched once more.
        """
        stamps = self._files.stamps
        versions = {file: _version(file) for file in stamps}
        if not all(versions.values()):
            return super().contents()
        return [
            Content(self._files.path_of(file), 0, partial(self._as_served, file, version))
            for file, version in versions.items()
        ]

    def _as_served(self, file: StoredFile, version: str, pace: Pace) -> str:
        pace(0)
        stamp = self._files.stamps[file]
        check_unchanged(file, stamp, _asked(file))
        return f"version:{version} size:{stamp[0]}"

    def close(self) -> None:
        """See `Checkpoint.close`; what was fetched is removed."""
        super().close()
        for folder in (self._fetched, self._card):
            if folder is not None:
                folder.cleanup()
        self._fetched = self._card = None


def _filled(fetch: Callable[[Path], None]) -> TemporaryDirectory[str]:
    """Return a folder with what is fetched into it; where that fails, nothing is left."""
    folder = TemporaryDirectory(prefix="covmerge-")
    try:
        fetch(Path(folder.name))
    except BaseException:
        folder.cleanup()
        raise
    return folder


def _fetch_companions(store: RemoteStore, to: Path) -> None:
    """Fetch configs, tokenizers and processors into a folder of this machine."""
    try:
        places = {"": store}
        for name in filter(_FOLDERS.fullmatch, store.folders()):
            check_bare(name, str(store))
            places[name] = store.inside(name)
        places |= {module.path: module.store for module in module_folders(store, store.names())}
        found = [
            (path, child(place, name))
            for path, place in places.items()
            for name in place.names()
            if _BESIDE.fullmatch(name)
        ]
    except OSError as error:
        raise CheckpointError(f"{store} cannot be listed: {error.strerror}") from error
    if len(found) > _MANY:
        raise CheckpointError(
            f"{store} holds {len(found)} files beside its weights, and {_MANY} are fetched: pass the "
            "folder of one model"
        )
    for path, file in found:
        (to / path).mkdir(parents=True, exist_ok=True)
        _fetch(file, to / path)


def _fetch(file: StoredFile, to: Path) -> None:
    size = _asked(file)[0]
    if size > _MOST:
        raise CheckpointError(
            f"{file} has {size} bytes, which no such file needs to have: is it the right folder?"
        )
    data = memoryview(bytearray(size))
    with open_stored(file) as opened:
        read_into(data, opened, 0, str(file))
    (to / file.name).write_bytes(data)


def _is_there(file: StoredFile) -> bool:
    with still_readable(file):
        return file.store.is_file(file.name)


def _version(file: StoredFile) -> str:
    with still_readable(file):
        return cast("RemoteStore", file.store).version(file.name)


def _asked(file: StoredFile) -> Stamp:
    with still_readable(file):
        return file.stamp()
