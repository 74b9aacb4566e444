"""From a setting to checkpoints on this disk: given, fetched, or missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from covmerge.errors import InputError, did_you_mean
from covmerge_lab.reproduce.fetch import fetch
from covmerge_lab.reproduce.published import Setting, Source

BASE = "base"  # what `--expert` calls it
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[^@\s]+)?")


@dataclass(frozen=True)
class Given:
    """What the user says of where things are.

    Attributes:
        cache: the folder for everything that is fetched or made.
        experts: sources by name, in place of those that are known; `base` is the base.
        checkpoints: the folder of what the user has downloaded, laid out as its authors do.
    """

    cache: Path
    experts: Mapping[str, str] = field(default_factory=dict[str, str])
    checkpoints: Path | None = None


@dataclass(frozen=True)
class Models:
    """The checkpoints of a setting.

    Attributes:
        base: a folder, or a file of weights.
        experts: the same by name.
    """

    base: Path
    experts: Mapping[str, Path]


def resolve(setting: Setting, given: Given) -> Models:
    """Find or fetch the checkpoints of a setting.

    Raises:
        InputError: nobody knows where some of them are; the message names them and what to pass.
        CheckpointError: one cannot be fetched.
    """
    sources = {BASE: setting.base, **setting.experts}
    for name in given.experts:
        if name not in sources:
            raise InputError(
                f"--expert {name}: {setting.name} has no such expert." + did_you_mean(name, sources)
            )
    places = {name: _place(name, source, given) for name, source in sources.items()}
    missing = [name for name, place in places.items() if place is None]
    if missing:
        raise InputError(
            f"{setting.name}: where {', '.join(missing)} are is not known: {sources[missing[0]].where}"
        )
    ready = {
        name: place if isinstance(place, Path) else fetch(place, given.cache)
        for name, place in places.items()
        if place is not None
    }
    base = ready.pop(BASE)
    return Models(base, ready)


def _place(name: str, source: Source, given: Given) -> Path | Source | None:
    """Where one checkpoint is: on this disk, on the hub, or nowhere."""
    if name in given.experts:
        path = Path(given.experts[name]).expanduser()
        if path.exists():
            return path
        if _HUB_ID.fullmatch(given.experts[name]):
            return Source(given.experts[name])
        raise InputError(
            f"--expert {name}={given.experts[name]}: there is no such file or folder, and an id of the "
            "hub is written org/name or org/name@revision"
        )
    if given.checkpoints is not None and source.file:
        path = given.checkpoints / source.file
        if path.exists():
            return path
    return source if source.hub else None
