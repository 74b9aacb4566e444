"""Repositories of the Hugging Face Hub: headers for planning, weights only for the merge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from covmerge.checkpoints.base import CARD_NAME, Checkpoint, Pace, find_header
from covmerge.checkpoints.folder import (
    CONFIG,
    check_weight_map,
    choose_weights,
    open_folder,
    read_config,
    read_weight_map,
)
from covmerge.checkpoints.hub_client import Repository, cached_snapshot, is_offline
from covmerge.errors import CheckpointError
from covmerge.stores.hub_cache import HubModel
from covmerge.stores.local import LocalFolder
from covmerge.types import Json, TensorHeader


class HubCheckpoint:
    """A repository at one commit.

    Args:
        source: as the user wrote it.
        repository: it, at that commit.
        headers: of every tensor.
        config: parsed `config.json`.
        files: names of the files to download.
        notes: what is particular about how it was opened.
        local: the downloaded checkpoint, if it is there already.
    """

    def __init__(
        self,
        source: str,
        repository: Repository,
        *,
        headers: Mapping[str, TensorHeader],
        config: Mapping[str, Any] | None,
        files: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        local: Checkpoint | None = None,
    ) -> None:
        self.source = source
        self.headers = MappingProxyType(headers)
        self.config = config
        self.notes = notes
        self._repository = repository
        self._files = files
        self._local = local

    @property
    def folder(self) -> Path | None:
        """The snapshot in the cache, once `materialize` has completed it."""
        return None if self._local is None else self._local.folder

    @property
    def hub(self) -> HubModel:
        """See `Checkpoint.hub`."""
        return HubModel(self._repository.name, self._repository.commit)

    def readme(self) -> Path | None:
        """See `Checkpoint.readme`."""
        if CARD_NAME in self._repository.sizes:
            return self._repository.file(CARD_NAME)
        # Offline the repository's files are not known.
        return None if self._local is None else self._local.readme()

    def companions(self) -> Path | None:
        """See `Checkpoint.companions`."""
        if self._local is not None:
            return self._local.folder
        return self._repository.download(self._repository.companions())

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
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
        local = open_folder(self.source, LocalFolder(self._repository.download(self._files)))
        if dict(local.headers) != dict(self.headers):
            local.close()
            raise CheckpointError(
                f"{self.source}: {local.folder} holds other tensors than the Hub announced: delete "
                "that folder and start again"
            )
        self._local = local

    def identity(self) -> dict[str, Json]:
        """Repository and commit."""
        return {"kind": "hub", "repo": self._repository.name, **self.fingerprint()}

    def fingerprint(self, pace: Pace | None = None) -> dict[str, str]:
        """The commit, which fixes every byte."""
        return {"revision": self._repository.commit}

    def close(self) -> None:
        """See `Checkpoint.close`."""
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
    repository = Repository.find(source, name, revision)
    choice = choose_weights(repository.top_level(), source)
    if not choice.name.endswith((".safetensors", ".safetensors.index.json")):
        return _open_pickled(source, repository, choice.name)
    config = read_config(repository.file(CONFIG)) if CONFIG in repository.sizes else None
    if choice.is_index:
        weight_map = read_weight_map(repository.file(choice.name))
        headers_of = repository.headers(sorted(set(weight_map.values())))
        check_weight_map(f"{source}: {choice.name}", weight_map, headers_of)
    else:
        headers_of = repository.headers([choice.name])
    return HubCheckpoint(
        source,
        repository,
        headers={
            name: header for headers in headers_of.values() for name, header in headers.items()
        },
        config=config,
        files=(*repository.companions(), *headers_of),
        notes=choice.notes(source, headers_of),
    )


def _open_pickled(source: str, repository: Repository, chosen: str) -> HubCheckpoint:
    """Open a repository without safetensors, whose headers are inside the pickled weights."""
    stem = chosen.removesuffix(".index.json").removesuffix(".bin")
    weights = [name for name in repository.top_level() if name.startswith(stem)]
    folder = repository.download((*repository.companions(), *weights))
    local = open_folder(source, LocalFolder(folder))
    note = f"{source} has no safetensors: its weights were downloaded to read their headers"
    return _downloaded(source, repository, local, note)


def _open_cached(source: str, name: str, revision: str | None) -> HubCheckpoint:
    folder = cached_snapshot(source, name, revision)
    repository = Repository(source, name, folder.name, {})
    note = f"{source}: HF_HUB_OFFLINE is set, commit {folder.name} was taken from the cache"
    return _downloaded(source, repository, open_folder(source, LocalFolder(folder)), note)


def _downloaded(source: str, repository: Repository, local: Checkpoint, note: str) -> HubCheckpoint:
    return HubCheckpoint(
        source,
        repository,
        headers=local.headers,
        config=local.config,
        notes=(note, *local.notes),
        local=local,
    )
