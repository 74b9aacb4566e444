"""Which code made what is kept: what another state of it made is made anew."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def digest(*modules: ModuleType) -> str:
    """Return a hash of the code of some modules; of a package, of all in it."""
    found = hashlib.sha256()
    for path in sorted(path for module in modules for path in _files(module)):
        found.update(path.read_bytes())
    return found.hexdigest()


def _files(module: ModuleType) -> Iterable[Path]:
    assert module.__file__ is not None
    path = Path(module.__file__)
    return path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
