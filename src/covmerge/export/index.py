"""model.safetensors.index.json: which shard holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path

from covmerge.checkpoints.layout import Layout
from covmerge.stores.disk import disk_errors


def write_index(layout: Layout, folder: Path) -> Path | None:
    """Write the index of a sharded model as transformers does; return its path.

    A model of one file needs no index: nothing is written and None returned.

    Raises:
        ResourceError: the disk is full.
    """
    if len(layout.shards) == 1:
        return None
    slots = [slot for shard in layout.shards for slot in shard.entries.values()]
    index = {
        "metadata": {
            "total_parameters": sum(slot.header.numel for slot in slots),
            "total_size": layout.data_size,
        },
        "weight_map": {name: shard.file_name for shard in layout.shards for name in shard.entries},
    }
    path = folder / layout.index_name
    content = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with disk_errors(path, len(content)):
        path.write_bytes(content)
    return path
