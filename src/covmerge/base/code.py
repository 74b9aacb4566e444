"""The folder of covmerge's caches, and hashes of the code that made a saved result."""

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


def user_cache() -> Path:
    """Return the folder of caches: COVMERGE_CACHE, else $XDG_CACHE_HOME/covmerge or ~/.cache/covmerge.

    The folder need not exist.

    Raises:
        RuntimeError: the user has no home.
    """
    if is_cache_named():
        return Path(os.environ["COVMERGE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covmerge"


def is_cache_named() -> bool:
    """Return whether COVMERGE_CACHE is set."""
    return bool(os.environ.get("COVMERGE_CACHE"))


# Hashes of code. A saved result that other code made is computed again, not continued.


def digest(*modules: ModuleType) -> str:
    """Return a hash of the files of some modules; for a package, of all its files."""
    found = hashlib.sha256()
    for path in sorted(path for module in modules for path in _files(module)):
        found.update(path.read_bytes())
    return found.hexdigest()


def digest_of_code(code: CodeType) -> str:
    """Return a hash of what a function does, for a function without a file, as in a notebook."""
    constants = (
        digest_of_code(value) if isinstance(value, CodeType) else _written(value)
        for value in code.co_consts
    )
    said = (code.co_code.hex(), *code.co_names, *code.co_varnames, *constants)
    return hashlib.sha256("\0".join(said).encode(errors="backslashreplace")).hexdigest()


@cache
def own_version() -> str:
    """Return covmerge's version, and the first 12 digits of the hash of its code."""
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
    # A package's JSON files are tables that decide how files are read, so they count as code.
    return (file for file in path.parent.rglob("*") if file.suffix in (".py", ".json"))
