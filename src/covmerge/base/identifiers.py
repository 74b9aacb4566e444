"""Which texts are ids of models on the Hugging Face Hub, and which are names of experts."""

from __future__ import annotations

import re
from typing import NamedTuple

# Both JSON Schema and Python's re read this pattern.
EXPERT_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
EXPERT_NAME_LENGTH = 100
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@\s]+))?", re.ASCII)


class HubId(NamedTuple):
    """The id of a model on the Hub as recipes write it, org/name or org/name@revision."""

    repository: str
    revision: str | None


def hub_id(source: str) -> HubId | None:
    """Return the Hub id that a source is written as; None: the text is no Hub id.

    Example:
        >>> hub_id("org/name@main"), hub_id("./models/name")
        (HubId(repository='org/name', revision='main'), None)
    """
    found = _HUB_ID.fullmatch(source)
    return None if found is None else HubId(found[1], found[2])


def expert_name(name: str) -> str:
    """Check the name of an expert, which becomes a file name (heads/<name>.safetensors), and return it.

    Raises:
        ValueError: the text cannot be a name.
    """
    if not re.fullmatch(EXPERT_NAME, name) or len(name) > EXPERT_NAME_LENGTH:
        raise ValueError(
            f"{name!r} cannot name an expert; use up to {EXPERT_NAME_LENGTH} letters, digits, '.', '_' "
            "or '-', and no '.' at the start"
        )
    return name
