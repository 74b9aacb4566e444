"""A checkpoint seen in another way: what it does not say otherwise is as it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, Kind
from covmerge.files.checkpoints.content import Content
from covmerge.files.stores.hub_cache import HubModel


class View(Kind):
    """Where a checkpoint lies and what it is known by, for those that show its tensors in another way.

    Args:
        stored: the checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        own = stored.quantisation
        self.quantisation = None if own is None else replace(own, derived=True)
        self.untied = stored.untied
        self.order = stored.order

    @property
    def seen(self) -> Checkpoint:
        """The checkpoint that it is a view of."""
        return self._stored

    @property
    def folder(self) -> Path | None:
        return self._stored.folder

    @property
    def hub(self) -> HubModel | None:
        return self._stored.hub

    def readme(self) -> Path | None:
        return self._stored.readme()

    def companions(self) -> Path | None:
        return self._stored.companions()

    def materialize(self) -> None:
        self._stored.materialize()

    def identity(self) -> dict[str, Json]:
        return self._stored.identity()

    def contents(self) -> Sequence[Content]:
        return self._stored.contents()

    def close(self) -> None:
        self._stored.close()
