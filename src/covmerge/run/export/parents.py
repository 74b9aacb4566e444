"""The models that were merged, described without paths of this machine, and their licences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.stores.hub_cache import HubModel
from covmerge.run.export.markdown import one_line, read_front_matter

# Licences of the parents, read from their model cards, and their meaning for the merged model.

_KEYS = ("license", "license_name", "license_link")
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # the Hub's form of a licence identifier
_LONGEST = 200  # characters of a name or a link
_UNNAMED = "other"  # the Hub's word for a licence that has no identifier

# Terms that not every licence has, recognised by the name of the licence.
_TERMS = (
    (re.compile(r"(^|-)nc(-|$)|non-?commercial|research"), "forbids commercial use"),
    (re.compile(r"(^|-)nd(-|$)"), "forbids passing on what is derived"),
    (re.compile(r"gpl|(^|-)sa(-|$)|^(osl|eupl)-"), "asks for the same licence on what is derived"),
    (re.compile(r"^llama|^gemma|rail"), "has terms of its own for what is derived"),
)
_FORBIDS_MERGES = _TERMS[1][1]


@dataclass(frozen=True)
class Licence:
    """The licence that a model card names."""

    names: tuple[str, ...]  # the Hub's identifiers; the user may choose among several
    title: str | None = None  # of a licence that has no identifier
    link: str | None = None  # to its text

    def __str__(self) -> str:
        return " or ".join(self.names) + (f" ({self.title})" if self.title else "")

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the terms of this licence that not every licence has."""
        names = (*self.names, (self.title or "").lower())
        return tuple(term for known, term in _TERMS if any(map(known.search, names)))


def read_licence(card: Path, model: HubModel | None) -> Licence | None:
    """Return the licence that a model card names, or None.

    Raises:
        CheckpointError: the card cannot be read.
    """
    found = read_front_matter(card, _KEYS)
    names = tuple(name.strip().lower() for name in found.get("license", ()))
    if not names or "unknown" in names or not all(map(_IDENTIFIER.fullmatch, names)):
        return None
    title, link = (one_line(" ".join(found.get(key, ())))[:_LONGEST] or None for key in _KEYS[1:])
    return Licence(names, title, _address(link, model))


def _address(link: str | None, model: HubModel | None) -> str | None:
    if link is None or " " in link:
        return None
    if link.startswith(("https://", "http://")):
        return link
    return model and f"https://huggingface.co/{model.name}/blob/{model.commit}/{link}"


def shared_licence(licences: Mapping[str, Licence | None]) -> Licence | None:
    """Return the licence that all parents have; None if licences differ or one is unknown."""
    distinct = {licence and replace(licence, link=None) for licence in licences.values()}
    first = next(iter(licences.values()))
    if len(distinct) > 1 or first is None or (_UNNAMED in first.names and not first.title):
        return None
    return first


def licence_notes(licences: Mapping[str, Licence | None]) -> Iterator[str]:
    """Say which parent has which licence if these differ, and which terms bind the merged model."""
    holders: dict[str, list[str]] = {}
    for parent, licence in licences.items():
        holders.setdefault("unknown" if licence is None else str(licence), []).append(parent)
    groups = {name: f"{name} ({', '.join(parents)})" for name, parents in holders.items()}
    if shared_licence(licences) is None:
        yield (
            f"the parents' licences are {'; '.join(groups.values())}: the model card claims none; "
            "before you pass the model on, check what they allow and say it in README.md (license: ...)"
        )
    known = {str(licence): licence for licence in licences.values() if licence is not None}
    for name, licence in known.items():
        for term in licence.terms:
            others = [groups[n] for n, licence in known.items() if term not in licence.terms]
            if others:
                yield (
                    f"{groups[name]} {term}, unlike {', '.join(others)}: the merged model is bound "
                    "by all of them"
                )
            elif term == _FORBIDS_MERGES:
                yield f"{groups[name]} {term}: ask before you publish the merged model"


@dataclass(frozen=True)
class Parent:
    """The base or an expert; `title` is its name on the Hub, or else the last part of its path."""

    title: str
    hub: HubModel | None
    licence: Licence | None

    @property
    def source(self) -> str:
        """Return the source that a published recipe names."""
        return self.title if self.hub is None else f"{self.hub.name}@{self.hub.commit}"


@dataclass(frozen=True)
class Parents:
    """The base and the experts of a merge, by their keys in reports, the base first."""

    by_key: Mapping[str, Parent]
    licences: Mapping[str, Licence | None]  # None: it is unknown
    notes: tuple[str, ...]  # on their licences


def read_parents(checkpoints: Iterable[tuple[str, Checkpoint]]) -> Parents:
    """Return the parents with their licences; a card that cannot be read gives a note."""
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
    licences = {key: parent.licence for key, parent in parents.items()}
    # If no parent names a licence, as local folders rarely do, only the card says so, and no note is added.
    if any(licences.values()):
        notes += licence_notes(licences)
    return Parents(parents, licences, tuple(notes))
