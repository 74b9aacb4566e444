"""The files of an output: shards or an adapter, masks, heads, the index, and covmerge.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from covmerge.base.types import Json
from covmerge.files.adapters.layout import ADAPTER_NAME, LORA_NAME
from covmerge.files.checkpoints.base import PEFT_FORM
from covmerge.files.checkpoints.json_file import dumps
from covmerge.files.checkpoints.layout import Layout, plan_layout, plan_shard
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.files.checkpoints.writer import ShardWriter
from covmerge.files.quantised.writing.gguf import plan_gguf
from covmerge.files.stores.local import LocalFolder
from covmerge.plan.planning.forms import MODEL, STEM
from covmerge.plan.planning.types import Plan
from covmerge.run.engine.outputs import FileOutput


def plan_parts(plan: Plan) -> dict[str, Layout]:
    """Return the layout of files of every part of an output."""
    output, modules = plan.recipe.output, plan.modules
    layouts: dict[str, Layout] = {}
    for part, headers in plan.parts.items():
        if part in modules and modules[part].is_of_transformers:
            layouts[part] = plan_layout(headers, output.shard_size, plan.metadata, STEM)
        elif part in modules:  # sentence-transformers reads a single file of weights
            layouts[part] = Layout((plan_shard(f"{STEM}.safetensors", headers, plan.metadata),))
        elif part != MODEL:
            file_name = f"{part.rpartition('/')[2]}.safetensors"
            layouts[part] = Layout((plan_shard(file_name, headers),))
        elif plan.gguf is not None:
            layouts[part] = plan_gguf(plan.gguf, headers)
        elif output.format == "adapter":
            file_name = ADAPTER_NAME if output.names == PEFT_FORM else LORA_NAME
            layouts[part] = Layout((plan_shard(file_name, headers),))
        else:
            layouts[part] = plan_layout(headers, output.shard_size, plan.metadata, plan.stem)
    return layouts


def files_of(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the files of all parts, as paths in the folder of the output."""
    return [
        PurePosixPath(folder_of(part), shard.file_name).as_posix()
        for part, layout in layouts.items()
        for shard in layout.shards
    ]


def open_output(
    store: LocalFolder, layouts: Mapping[str, Layout], *, made: bool = False
) -> FileOutput:
    """Create all files at their full size and open them for writing; files of an earlier run are kept.

    Raises:
        ResourceError: the disk is full.
        CheckpointError: a file differs from the layout, or is missing although `made` says it exists.
    """
    writers = {
        part: ShardWriter(store.inside(folder_of(part)), layout, made=made)
        for part, layout in layouts.items()
    }
    return FileOutput(writers)


def folder_of(part: str) -> str:
    """Return the folder of a part, as a path in the output's folder; "" for the output's folder itself."""
    return part.rpartition("/")[0]


def write_indices(layouts: Mapping[str, Layout], store: LocalFolder) -> list[str]:
    """Write an index, as transformers does, for each part with several files; return the paths."""
    found: list[str] = []
    for part, layout in layouts.items():
        if len(layout.shards) == 1:
            continue
        slots = [slot for shard in layout.shards for slot in shard.entries.values()]
        index = {
            "metadata": {
                "total_parameters": sum(slot.header.numel for slot in slots),
                "total_size": layout.data_size,
            },
            "weight_map": {
                name: shard.file_name for shard in layout.shards for name in shard.entries
            },
        }
        folder, name = folder_of(part), layout.index_name
        content = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        store.inside(folder).put(name, content)
        found.append(f"{folder}/{name}" if folder else name)
    return found


def write_manifest(store: LocalFolder, manifest: Mapping[str, Json]) -> None:
    """Write covmerge.json, whole or not at all; keys keep their order."""
    content = dumps(manifest, what="manifest", indent=1).encode() + b"\n"
    store.put(MANIFEST_NAME, content)
