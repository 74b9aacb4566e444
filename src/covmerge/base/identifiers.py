"""What a model of the Hugging Face Hub and an expert may be called; below all folders."""

from __future__ import annotations

import re
from typing import NamedTuple

# A pattern as JSON Schema and Python read it.
EXPERT_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
EXPERT_NAME_LENGTH = 100
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@\s]+))?", re.ASCII)


class HubId(NamedTuple):
    """A model of the Hub as it is written in recipes, org/name or org/name@revision."""

    repository: str
    revision: str | None


def hub_id(source: str) -> HubId | None:
    """Return what a source names on the Hub; None: it cannot name anything there.

    Example:
        >>> hub_id("org/name@main"), hub_id("./models/name")
        (HubId(repository='org/name', revision='main'), None)
    """
    found = _HUB_ID.fullmatch(source)
    return None if found is None else HubId(found[1], found[2])


def expert_name(name: str) -> str:
    """Return the name of an expert, which becomes a file name: heads/<name>.safetensors.

    Raises:
        ValueError: it cannot be one.
    """
    if not re.fullmatch(EXPERT_NAME, name) or len(name) > EXPERT_NAME_LENGTH:
        raise ValueError(
            f"{name!r} cannot name an expert; use up to {EXPERT_NAME_LENGTH} letters, digits, '.', '_' "
            "or '-', and no '.' at the start"
        )
    return name
