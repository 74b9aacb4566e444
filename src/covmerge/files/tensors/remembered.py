"""A cache of skeletons of earlier runs: importing transformers takes longer than many a merge.

A skeleton depends on config.json, the stored names and shapes, transformers' release and this folder's
code. It is stored under a hash of all these in the user's cache folder, which may be deleted at any time.
If it cannot be stored, it is built each time.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from covmerge.base import code
from covmerge.base.code import user_cache
from covmerge.base.errors import InputError
from covmerge.base.types import TensorHeader
from covmerge.files.stores.disk import replace_file
from covmerge.files.tensors.skeleton import Skeleton, build_skeleton, refuse_many_keys

_KEPT = 200  # number of files that are kept, the last used ones
_STORED = TypeAdapter(Skeleton)


def remembered_skeleton(headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Skeleton:
    """Return the result of `build_skeleton`, from the cache if it is there.

    Raises:
        SkeletonUnavailable: as in `build_skeleton`; a failure is not cached.
    """
    refuse_many_keys(config)
    try:
        file = _file(headers, config)
    except (OSError, RuntimeError):  # no home folder, or no source files
        file = None
    if file is None:
        return build_skeleton(headers, config)
    with suppress(OSError, ValidationError):  # the file is missing, or damaged
        skeleton = _STORED.validate_json(file.read_bytes())
        with suppress(OSError):  # the cache may be read-only
            os.utime(file)
        return skeleton
    skeleton = build_skeleton(headers, config)
    with suppress(OSError, InputError):  # `replace_file` raises InputError for the disk's errors
        _keep(_STORED.dump_json(skeleton), file)
    return skeleton


def _file(headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Path | None:
    """Return the file of a skeleton; None if transformers is missing, or is a development version."""
    if importlib.util.find_spec("transformers") is None:
        return None
    release = _release()
    if release is None or "dev" in release:
        return None
    shapes = sorted((name, header.shape) for name, header in headers.items())
    known = [_own_code(), release, torch.__version__, config, shapes]
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode())
    return user_cache() / "skeletons" / f"{key.hexdigest()}.json"


@cache
def _release() -> str | None:
    """Return transformers' release, cached: a lookup takes as long as reading a small model."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("transformers")
    return None


@cache
def _own_code() -> str:
    return code.digest(importlib.import_module("covmerge.files.tensors"))


def _keep(content: bytes, file: Path) -> None:
    """Write a file, and delete the files that have not been used for longest."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)
    by_age = sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in by_age[:-_KEPT]:
        old.unlink()
