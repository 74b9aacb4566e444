"""heads/<expert>.safetensors: the task heads, which belong to one expert each and are not merged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from covmerge.checkpoints.disk import disk_errors
from covmerge.checkpoints.layout import Layout, plan_shard
from covmerge.checkpoints.writer import ShardWriter
from covmerge.errors import InputError
from covmerge.types import TensorHeader

HEADS_FOLDER = "heads"

_FILE_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def write_heads(folder: Path, heads: Mapping[str, Mapping[str, Tensor]]) -> tuple[Path, ...]:
    """Write the heads of each expert that has some; return the files' paths.

    Args:
        folder: the folder of the output.
        heads: by expert, its tensors by name, on the CPU.

    Raises:
        InputError: an expert's name is not safe as a file name.
        TensorError: a dtype that safetensors cannot hold.
        ResourceError: the disk is full.
    """
    for expert in heads:
        if not _FILE_SAFE.fullmatch(expert):
            raise InputError(
                f"the expert name {expert!r} cannot name a file: use letters, digits, '.', '_' and "
                "'-', not beginning with '.'"
            )
    return tuple(_write_head(folder, expert, head) for expert, head in heads.items() if head)


def _write_head(folder: Path, expert: str, head: Mapping[str, Tensor]) -> Path:
    target = folder / HEADS_FOLDER
    with disk_errors(target):
        target.mkdir(exist_ok=True)
    headers = [TensorHeader(name, tuple(t.shape), t.dtype) for name, t in head.items()]
    shard = plan_shard(f"{expert}.safetensors", headers)
    writer = ShardWriter(target, Layout((shard,)))
    for name, tensor in head.items():
        writer.write(name, tensor.contiguous())
    return target / shard.file_name
