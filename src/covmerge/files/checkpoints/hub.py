"""Repositories of the Hugging Face Hub: headers for planning, weights only for the merge.

Index, config and headers are read where they lie, by the readers of a folder over a `HubStore`. What
a merge reads is downloaded into the cache of the client first (`materialize`): it is read more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import CARD_NAME, Checkpoint, Kind, find_header
from covmerge.files.checkpoints.content import Content
from covmerge.files.checkpoints.folder import (
    choose_weights,
    holds_weights,
    module_files,
    open_folder,
)
from covmerge.files.stores.hub import HubStore, cached_snapshot, is_offline
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.local import LocalFolder


class HubCheckpoint(Kind):
    """A repository at one commit.

    Args:
        store: it, at that commit.
        planned: the checkpoint as it lies there, or `local`.
        files: names of the files to download.
        notes: what is particular about how it was opened.
        local: the downloaded checkpoint, if it is there already.
    """

    def __init__(
        self,
        store: HubStore,
        planned: Checkpoint,
        *,
        files: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        local: Checkpoint | None = None,
    ) -> None:
        self.source = store.source
        self.headers = planned.headers
        self.config = planned.config
        self.notes = notes
        self._store = store
        self._files = files
        self._local = local

    @property
    def folder(self) -> Path | None:
        """The snapshot in the cache, once `materialize` has completed it."""
        return None if self._local is None else self._local.folder

    @property
    def hub(self) -> HubModel:
        return HubModel(self._store.name, self._store.commit)

    def readme(self) -> Path | None:
        if self._store.is_file(CARD_NAME):
            return self._store.card(CARD_NAME)
        # Offline the repository's files are not known.
        return None if self._local is None else self._local.readme()

    def companions(self) -> Path | None:
        if self._local is not None:
            return self._local.folder
        return self._store.download(self._store.companions())

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        if self._local is None:
            raise CheckpointError(f"{self.source} is not downloaded: call materialize() first")
        return self._local.read(name, rows)

    def materialize(self) -> None:
        """Download weights and companion files into the cache of the Hub's client.

        Raises:
            CheckpointError: the download failed, or gave other tensors than were planned with.
        """
        if self._local is not None:
            return
        folder = self._store.download(self._files)
        local = open_folder(self.source, LocalFolder(folder))
        if dict(local.headers) != dict(self.headers):
            local.close()
            # The commit's folder holds links, which the client makes again without a download.
            cache = next((p for p in folder.parents if p.name.startswith("models--")), folder)
            raise CheckpointError(
                f"{self.source}: {folder} holds other tensors than the Hub announced: delete {cache} and "
                "start again"
            )
        self._local = local

    def identity(self) -> dict[str, Json]:
        """Repository and commit."""
        return {"kind": "hub", "repo": self._store.name, "revision": self._store.commit}

    def contents(self) -> Sequence[Content]:
        """The commit, which fixes every byte."""
        return [Content("revision", 0, lambda _: self._store.commit)]

    def close(self) -> None:
        if self._local is not None:
            self._local.close()


def open_hub(source: str, name: str, revision: str | None) -> HubCheckpoint:
    """Open a repository of the Hub; its weights stay there, unless they are pickled.

    With `HF_HUB_OFFLINE=1` the copy in the cache is opened.

    Args:
        source: as the user wrote it.
        name: `org/name`.
        revision: branch, tag or commit; None is the default branch.

    Raises:
        CheckpointError: the Hub cannot be reached, has no such repository or revision, or what it
            has cannot be read.
    """
    if is_offline(source):
        return _open_cached(source, name, revision)
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
    return HubCheckpoint(store, planned, files=files, notes=planned.notes)


def _open_pickled(
    store: HubStore, choice: str | None, of_modules: Sequence[str], pickled: str
) -> HubCheckpoint:
    """Open a repository without safetensors, whose headers are inside the pickled weights."""
    weights = list(of_modules)
    if choice is not None:
        stem = choice.removesuffix(".index.json")
        stem = stem.removesuffix(".bin").removesuffix(".safetensors")
        weights += [name for name in store.names() if name.startswith(stem)]
    folder = store.download((*store.companions(), *weights))
    local = open_folder(store.source, LocalFolder(folder))
    note = (
        f"{store.source} has {pickled} and no safetensors of it: its weights were downloaded to read "
        "their headers"
    )
    return _downloaded(store, local, note)


def _open_cached(source: str, name: str, revision: str | None) -> HubCheckpoint:
    folder = cached_snapshot(source, name, revision)
    note = f"{source}: HF_HUB_OFFLINE is set, commit {folder.name} was taken from the cache"
    local = open_folder(source, LocalFolder(folder))
    return _downloaded(HubStore(source, name, folder.name, {}), local, note)


def _downloaded(store: HubStore, local: Checkpoint, note: str) -> HubCheckpoint:
    return HubCheckpoint(store, local, notes=(note, *local.notes), local=local)
