"""Where covmerge keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return COVMERGE_CACHE, or by the standard of freedesktop.org ~/.cache/covmerge; it need not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    if is_cache_named():
        return Path(os.environ["COVMERGE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covmerge"


def is_cache_named() -> bool:
    """Whether the user has said where that is."""
    return bool(os.environ.get("COVMERGE_CACHE"))
