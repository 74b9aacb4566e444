"""covmerge.json: what the output was made of and how; by it an output of covmerge is known."""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.base.types import Json
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.files.checkpoints.strict_json import dumps
from covmerge.files.stores.store import WritableFile, WritableStore


def write_manifest(store: WritableStore, manifest: Mapping[str, Json]) -> None:
    """Write covmerge.json, whole or not at all; keys keep their order.

    Raises:
        InputError: the manifest holds a number that is not finite, or what JSON cannot hold.
        ResourceError: the disk is full.
    """
    content = dumps(manifest, what="manifest", indent=1).encode() + b"\n"
    WritableFile(store, MANIFEST_NAME).put(content)
