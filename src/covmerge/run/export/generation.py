"""How the experts want to be sampled from, where that is not how the output says it: a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.files.checkpoints.folder import read_config
from covmerge.files.stores.paths import safe_child

GENERATION = "generation_config.json"
# What says nothing of how a model generates.
_ASIDE = ("transformers_version", "_from_model_config")


def notes_on_generation(base: Path | None, experts: Mapping[str, Path | None]) -> Iterator[str]:
    """Say of each expert in what its generation settings differ from the base's, which the output has.

    Args:
        base: its folder, if it has one.
        experts: by name, the same.
    """
    if base is None:
        return
    try:
        used = _settings(base)
        for name, folder in experts.items():
            given = None if folder is None else _settings(folder)
            if given is None or given == used:
                continue
            keys = sorted(
                key for key in {*(used or {}), *given} if given.get(key) != (used or {}).get(key)
            )
            yield (
                f"{GENERATION} is the base's, and that of expert '{name}' differs in {some(keys, 6)}: look "
                "which of the two the merged model should have"
            )
    except (CheckpointError, OSError) as error:
        yield f"generation settings were not compared: {error}"


def _settings(folder: Path) -> dict[str, Any] | None:
    path = safe_child(folder, GENERATION)
    if not path.is_file():
        return None
    return {key: value for key, value in read_config(path).items() if key not in _ASIDE}
