"""Checkpoints on other machines: weights are read there, and their companion files are fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import (
    CARD_NAME,
    Checkpoint,
    Content,
    Pace,
    check_unchanged,
    find_header,
)
from covmerge.files.checkpoints.folder import (
    FileCheckpoint,
    choose_weights,
    holds_weights,
    module_files,
    open_folder,
)
from covmerge.files.checkpoints.header import current_stamp, open_stored, read_into
from covmerge.files.checkpoints.modules import module_folders
from covmerge.files.checkpoints.view import View
from covmerge.files.stores.hub import COMPANIONS, HubStore, cached_snapshot, is_offline
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.remote import RemoteStore
from covmerge.files.stores.store import StoredFile, child

_FOLDERS = re.compile(r"[0-9]_.*|additional_chat_templates", re.S)
_MOST = 2**29  # the most bytes of one companion file
_MANY = 200


class RemoteCheckpoint(View):
    """A checkpoint in a store of another machine.

    Args:
        stored: the checkpoint of its files of weights, read from the other machine.
        store: the folder of the checkpoint, or the folder that has its file.
        whole: whether it is the whole folder, so that files beside the weights belong to it.
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
        """The local folder with the companion files, once `materialize` has fetched them."""
        return None if self._fetched is None else Path(self._fetched.name)

    def readme(self) -> Path | None:
        card = StoredFile(self._store, CARD_NAME)
        with failing_as(f"{card} cannot be read any more"):
            if not (self._whole and self._store.is_file(CARD_NAME)):
                return None
        if self._card is None:
            self._card = _filled(lambda folder: _fetch(card, folder))
        return Path(self._card.name) / CARD_NAME

    def companions(self) -> Path | None:
        if self._whole and self._fetched is None:
            self._fetched = _filled(lambda folder: _fetch_companions(self._store, folder))
        return self.folder

    def materialize(self) -> None:
        """Fetch the companion files; weights are read from the other machine."""
        self.companions()

    def identity(self) -> dict[str, Json]:
        """Return sizes and versions of the files when they were opened; version 0: the server has none."""
        files: dict[str, Json] = {
            self._files.path_of(file): {"size": stamp[0], "version": stamp[1]}
            for file, stamp in self._files.stamps.items()
        }
        return {"kind": "remote", "files": files}

    def contents(self) -> Sequence[Content]:
        """Return the server's version of every file; if a file has none, the files themselves.

        Hashing the files would require fetching them once more.
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
        check_unchanged(file, stamp, current_stamp(file))
        return f"version:{version} size:{stamp[0]}"

    def close(self) -> None:
        """Close the checkpoint, and remove the fetched files."""
        super().close()
        for folder in (self._fetched, self._card):
            if folder is not None:
                folder.cleanup()
        self._fetched = self._card = None


def _filled(fetch: Callable[[Path], None]) -> TemporaryDirectory[str]:
    """Return a temporary folder with fetched files; if fetching fails, the folder is removed."""
    folder = TemporaryDirectory(prefix="covmerge-")
    try:
        fetch(Path(folder.name))
    except BaseException:
        folder.cleanup()
        raise
    return folder


def _fetch_companions(store: RemoteStore, to: Path) -> None:
    """Fetch configs, tokenizers and processors into a local folder."""
    with failing_as(f"{store} cannot be listed"):
        places = {"": store}
        for name in filter(_FOLDERS.fullmatch, store.folders()):
            check_bare(name, str(store))
            places[name] = store.inside(name)
        places |= {module.path: module.store for module in module_folders(store, store.names())}
        found = [
            (path, child(place, name))
            for path, place in places.items()
            for name in place.names()
            if name.endswith(COMPANIONS) and not name.endswith(".index.json")
        ]
    if len(found) > _MANY:
        raise CheckpointError(
            f"{store} holds {len(found)} files beside its weights, and {_MANY} are fetched: pass the "
            "folder of one model"
        )
    for path, file in found:
        (to / path).mkdir(parents=True, exist_ok=True)
        _fetch(file, to / path)


def _fetch(file: StoredFile, to: Path) -> None:
    size = current_stamp(file)[0]
    if size > _MOST:
        raise CheckpointError(
            f"{file} has {size} bytes, which no such file needs to have: is it the right folder?"
        )
    data = memoryview(bytearray(size))
    with open_stored(file) as opened:
        read_into(data, opened, 0, str(file))
    (to / file.name).write_bytes(data)


def _version(file: StoredFile) -> str:
    with failing_as(f"{file} cannot be read any more"):
        return cast("RemoteStore", file.store).version(file.name)


# Repositories of the Hugging Face Hub: headers are read for planning, weights only for the merge.
#
# Index, config and headers are read remotely, by a folder's readers over a `HubStore`. Tensors are
# read more than once, so `materialize` first downloads the weights into the Hub client's cache.


class HubCheckpoint(View):
    """A repository of the Hub at one commit.

    Args:
        store: the repository at that commit.
        planned: the checkpoint read remotely, or the downloaded one.
        files: names of the files to download; None: it was downloaded already.
        notes: how it was opened.
    """

    def __init__(
        self,
        store: HubStore,
        planned: Checkpoint,
        files: tuple[str, ...] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(planned)
        self.notes = notes
        self._store = store
        self._missing = files

    @property
    def folder(self) -> Path | None:
        """The snapshot in the cache, once `materialize` has completed it."""
        return self._stored.folder

    @property
    def hub(self) -> HubModel:
        return HubModel(self._store.name, self._store.commit)

    def readme(self) -> Path | None:
        if self._store.is_file(CARD_NAME):
            return self._store.card(CARD_NAME)
        # Offline, the names of the repository's files are unknown.
        return None if self._missing is not None else self._stored.readme()

    def companions(self) -> Path | None:
        if self._missing is None:
            return self.folder
        return self._store.download(self._store.companions())

    def read(self, name: str, rows: range | None = None) -> Tensor:
        if self._missing is not None:
            find_header(self.headers, name, rows, self.source)
            raise CheckpointError(f"{self.source} is not downloaded: call materialize() first")
        return super().read(name, rows)

    def materialize(self) -> None:
        """Download weights and companion files into the cache of the Hub's client.

        Raises:
            CheckpointError: the download failed, or has other tensors than were planned.
        """
        if self._missing is None:
            return
        folder = self._store.download(self._missing)
        local = open_folder(self.source, LocalFolder(folder))
        if dict(local.headers) != dict(self.headers):
            local.close()
            # The commit's folder has links, which the client creates again without a download.
            cache = next((p for p in folder.parents if p.name.startswith("models--")), folder)
            raise CheckpointError(
                f"{self.source}: {folder} holds other tensors than the Hub announced: delete {cache} and "
                "start again"
            )
        self._stored, self._missing = local, None

    def identity(self) -> dict[str, Json]:
        """Return the repository and the commit."""
        return {"kind": "hub", "repo": self._store.name, "revision": self._store.commit}

    def contents(self) -> Sequence[Content]:
        """Return the commit, which determines every byte."""
        return [Content("revision", 0, lambda _: self._store.commit)]


def open_hub(source: str, name: str, revision: str | None) -> HubCheckpoint:
    """Open a repository of the Hub; its weights are not downloaded yet, unless they are pickled.

    With `HF_HUB_OFFLINE=1`, the copy in the cache is opened. `name` is `org/name`, and `revision` a branch,
    tag or commit (None: the default branch).

    Raises:
        CheckpointError: the Hub cannot be reached, it has no such repository or revision, or the
            repository cannot be read.
    """
    if is_offline(source):
        folder = cached_snapshot(source, name, revision)
        note = f"{source}: HF_HUB_OFFLINE is set, commit {folder.name} was taken from the cache"
        return _downloaded(HubStore(source, name, folder.name, {}), folder, note)
    store = HubStore.find(source, name, revision)
    of_modules = module_files(store, store.names())
    names = store.names()
    choice = None if of_modules and not holds_weights(names) else choose_weights(names, source)
    chosen = [*of_modules, *([] if choice is None else [choice])]
    if pickled := [
        n for n in chosen if not n.endswith((".safetensors", ".safetensors.index.json"))
    ]:
        return _open_pickled(store, choice, of_modules, some(pickled))
    planned = open_folder(source, store)
    files = (*store.companions(), *planned.weight_names)
    return HubCheckpoint(store, planned, files, planned.notes)


def _open_pickled(
    store: HubStore, choice: str | None, of_modules: Sequence[str], pickled: str
) -> HubCheckpoint:
    """Open a repository without safetensors; it is downloaded, as headers are inside pickled weights."""
    weights = list(of_modules)
    if choice is not None:
        stem = choice.removesuffix(".index.json")
        stem = stem.removesuffix(".bin").removesuffix(".safetensors")
        stem = re.sub(r"-[0-9]+-of-[0-9]+\.gguf$", "-", stem)
        weights += [name for name in store.names() if name.startswith(stem)]
    folder = store.download((*store.companions(), *weights))
    note = (
        f"{store.source} has {pickled} and no safetensors of it: its weights were downloaded to read "
        "their headers"
    )
    return _downloaded(store, folder, note)


def _downloaded(store: HubStore, folder: Path, note: str) -> HubCheckpoint:
    local = open_folder(store.source, LocalFolder(folder))
    return HubCheckpoint(store, local, notes=(note, *local.notes))
