"""Recognition of models of the Hugging Face Hub by their paths in the cache of the Hub's client.

The cache holds a commit as `models--org--name/snapshots/<commit>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = re.compile(r"models--(\w[\w.-]*)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub at one commit."""

    name: str  # `org/name`; the oldest models have no `org`
    commit: str  # the full hash


def is_commit(name: str) -> bool:
    """Return whether a name is a full commit hash."""
    return _COMMIT.fullmatch(name) is not None


def snapshot_around(path: Path) -> Path | None:
    """Return the snapshot that a path is or lies in, judged by names alone, or None."""
    for folder in (path, *path.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            return folder
    return None


def snapshot_of(path: Path) -> Path | None:
    """Return the snapshot of the cache to which a path belongs; None for any other path."""
    # A file is a link out of its snapshot, and a snapshot may be linked to: check both ways.
    places = (path.parent.resolve() / path.name, path.resolve())
    return next((found for place in places if (found := snapshot_around(place))), None)


def cached_model(path: Path) -> HubModel | None:
    """Return the model of the Hub to which a path in the cache belongs; None for any other path.

    Example:
        >>> commit = "0123456789abcdef0123456789abcdef01234567"
        >>> cached_model(Path(f"/hub/models--org--my-name/snapshots/{commit}/config.json")).name
        'org/my-name'
        >>> cached_model(Path("/models/org/my-name"))
    """
    snapshot = snapshot_of(path)
    if snapshot is None or not is_commit(snapshot.name):
        return None
    found = _FOLDER.fullmatch(snapshot.parent.parent.name)
    # Names on the Hub have no "--" in them.
    parts = found[1].split("--") if found else []
    return HubModel("/".join(parts), snapshot.name) if len(parts) in (1, 2) and all(parts) else None
