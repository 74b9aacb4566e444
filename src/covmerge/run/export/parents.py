"""The models that were merged, as far as strangers may know of them: no path of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.stores.hub_cache import HubModel
from covmerge.run.export.licences import Licence, licence_notes, read_licence
from covmerge.run.export.markdown import one_line


@dataclass(frozen=True)
class Parent:
    """The base or an expert.

    Attributes:
        title: its name on the Hub; the last part of its path where it is not known there.
        hub: which model of the Hub it is, where that is known.
        licence: what its card says; None where nothing is known.
    """

    title: str
    hub: HubModel | None
    licence: Licence | None

    @property
    def source(self) -> str:
        """How a recipe for others names it."""
        return self.title if self.hub is None else f"{self.hub.name}@{self.hub.commit}"


@dataclass(frozen=True)
class Parents:
    """All that were merged.

    Attributes:
        by_key: the base and the experts, by their keys in reports, the base first.
        notes: what a user should know of their licences.
    """

    by_key: Mapping[str, Parent]
    notes: tuple[str, ...]

    @property
    def licences(self) -> dict[str, Licence | None]:
        """What is known of the licence of each."""
        return {key: parent.licence for key, parent in self.by_key.items()}


def read_parents(checkpoints: Iterable[tuple[str, Checkpoint]]) -> Parents:
    """Find out who the parents are, and read their licences; a card that cannot be read is a note."""
    parents: dict[str, Parent] = {}
    notes: list[str] = []
    for key, checkpoint in checkpoints:
        hub = checkpoint.hub
        licence = None
        try:
            card = checkpoint.readme()
            licence = None if card is None else read_licence(card, hub)
        except CheckpointError as error:
            notes.append(f"the licence of {key} could not be read: {error}")
        path = Path(checkpoint.source).expanduser().resolve()
        parents[key] = Parent(one_line(path.name) if hub is None else hub.name, hub, licence)
    found = Parents(parents, ())
    # Where no parent says anything, as mostly of folders, the card says so and the user is not nagged.
    of_licences = licence_notes(found.licences) if any(found.licences.values()) else ()
    return replace(found, notes=(*notes, *of_licences))
