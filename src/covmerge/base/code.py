"""Where covmerge keeps what it can make again, and which code made it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import cast

from covmerge.base.version import __version__

# Where covmerge keeps what it can make again.


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


# Which code made a saved result: one that other code made is made anew, not continued.


def digest(*modules: ModuleType) -> str:
    """Return a hash of the code of some modules; of a package, of all in it."""
    found = hashlib.sha256()
    for path in sorted(path for module in modules for path in _files(module)):
        found.update(path.read_bytes())
    return found.hexdigest()


def digest_of_code(code: CodeType) -> str:
    """Return a hash of a function that no file has, such as one of a notebook: of what it does."""
    constants = (
        digest_of_code(value) if isinstance(value, CodeType) else _written(value)
        for value in code.co_consts
    )
    said = (code.co_code.hex(), *code.co_names, *code.co_varnames, *constants)
    return hashlib.sha256("\0".join(said).encode(errors="backslashreplace")).hexdigest()


@cache
def own_version() -> str:
    """Return covmerge's version, and the start of a hash of its code."""
    return f"{__version__}, code {digest(import_module('covmerge'))[:12]}"


def _written(value: object) -> str:
    # The order of a set differs from process to process.
    return (
        str(sorted(map(repr, cast("frozenset[object]", value))))
        if isinstance(value, frozenset)
        else repr(value)
    )


def _files(module: ModuleType) -> Iterable[Path]:
    assert module.__file__ is not None
    path = Path(module.__file__)
    if path.name != "__init__.py":
        return [path]
    # Tables decide what is read as what.
    return (file for file in path.parent.rglob("*") if file.suffix in (".py", ".json"))
