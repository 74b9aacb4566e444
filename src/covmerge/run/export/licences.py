"""What the parents' licences mean for the merged model, as far as their cards say it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from covmerge.files.stores.hub_cache import HubModel
from covmerge.run.export.front_matter import read_front_matter
from covmerge.run.export.markdown import one_line

_KEYS = ("license", "license_name", "license_link")
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # what the Hub has for a licence
_LONGEST = 200  # characters of a name or a link
_UNNAMED = "other"  # the Hub's word for a licence that has no identifier

# What a licence asks that others do not, recognised by its name.
_TERMS = (
    (re.compile(r"(^|-)nc(-|$)|non-?commercial|research"), "forbids commercial use"),
    (re.compile(r"(^|-)nd(-|$)"), "forbids passing on what is derived"),
    (re.compile(r"gpl|(^|-)sa(-|$)|^(osl|eupl)-"), "asks for the same licence on what is derived"),
    (re.compile(r"^llama|^gemma|rail"), "has terms of its own for what is derived"),
)
_FORBIDS_MERGES = _TERMS[1][1]


@dataclass(frozen=True)
class Licence:
    """What a model card says of its licence.

    Attributes:
        names: as the Hub calls it; several are a choice.
        title: what it is called, where the Hub has no name for it.
        link: to its text.
    """

    names: tuple[str, ...]
    title: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        return " or ".join(self.names) + (f" ({self.title})" if self.title else "")

    @property
    def terms(self) -> tuple[str, ...]:
        """What it asks that others do not."""
        names = (*self.names, (self.title or "").lower())
        return tuple(term for known, term in _TERMS if any(map(known.search, names)))


def read_licence(card: Path, model: HubModel | None) -> Licence | None:
    """Return the licence that a model card names, or None.

    Args:
        card: README.md of a model.
        model: which model it is, for a link to a file of it.

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
    """Return the licence that all parents have, or None if they differ or one is not known."""
    distinct = {licence and replace(licence, link=None) for licence in licences.values()}
    first = next(iter(licences.values()))
    if len(distinct) > 1 or first is None or (_UNNAMED in first.names and not first.title):
        return None
    return first


def licence_notes(licences: Mapping[str, Licence | None]) -> Iterator[str]:
    """Say which parent has which licence, if they do not agree, and where one binds the others.

    Args:
        licences: by parent; None where nothing is known.
    """
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
