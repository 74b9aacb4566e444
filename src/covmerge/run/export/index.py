"""model.safetensors.index.json, also of modules: which shard holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping

from covmerge.files.checkpoints.layout import Layout
from covmerge.files.stores.store import WritableFile, WritableStore
from covmerge.run.export.files import folder_of


def write_indices(layouts: Mapping[str, Layout], store: WritableStore) -> list[str]:
    """Write the index of each part in several files as transformers does; return their paths.

    Args:
        layouts: by part.
        store: of the output.

    Raises:
        ResourceError: the disk is full.
    """
    found: list[str] = []
    for part, layout in layouts.items():
        folder = folder_of(part)
        name = _write_index(layout, store.inside(folder))
        found += [] if name is None else [f"{folder}/{name}" if folder else name]
    return found


def _write_index(layout: Layout, store: WritableStore) -> str | None:
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
