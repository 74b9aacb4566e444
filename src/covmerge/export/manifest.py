"""covmerge.json: what the output was made of and how; by it an output of covmerge is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from covmerge.checkpoints.manifest import MANIFEST_NAME
from covmerge.checkpoints.strict_json import dumps
from covmerge.stores.disk import disk_errors
from covmerge.types import Json


def write_manifest(folder: Path, manifest: Mapping[str, Json]) -> Path:
    """Write covmerge.json into `folder` and return its path; keys keep their order.

    Raises:
        InputError: the manifest holds a number that is not finite, or what JSON cannot hold.
        ResourceError: the disk is full.
    """
    path = folder / MANIFEST_NAME
    content = dumps(manifest, what="manifest", indent=1).encode() + b"\n"
    with disk_errors(path, len(content)):
        path.write_bytes(content)
    return path
