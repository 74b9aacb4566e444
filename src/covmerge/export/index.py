"""model.safetensors.index.json: which shard holds which tensor."""

from __future__ import annotations

import json

from covmerge.checkpoints.layout import Layout
from covmerge.stores.store import WritableFile, WritableStore


def write_index(layout: Layout, store: WritableStore) -> str | None:
    """Write the index of a sharded model as transformers does; return its name.

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
    content = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    WritableFile(store, layout.index_name).put(content)
    return layout.index_name
