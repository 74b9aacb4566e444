"""The folder of what the lab's commands fetch and train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from covmerge.base.code import user_cache
from covmerge.errors import InputError
from covmerge.front.cli import options

Cache = Annotated[
    Path | None,
    options.flag(
        options.RUN,
        "DIR",
        "Folder of what is fetched and trained; by default COVMERGE_CACHE or ~/.cache/covmerge.",
    ),
]


def cache_folder(given: Path | None) -> Path:
    """Return the folder of what is fetched and trained; it need not exist.

    Raises:
        InputError: it can be neither made nor written to.
    """
    folder = (user_cache() if given is None else given).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "not a folder" if not there.is_dir() else "not writable"
        raise InputError(
            f"the cache folder {folder} cannot be used: {there} is {what}. Name another by --cache "
            "or COVMERGE_CACHE"
        )
    return folder
