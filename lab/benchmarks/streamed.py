"""Models larger than the disk, as files whose bytes are computed when they are read.

    python -m benchmarks.streamed FOLDER [--layers 32] [--experts 3]

serves folders of a Llama-shaped 8B base and of its experts, until it is interrupted. It needs Linux,
Debian's `libfuse2` and `fuse`, and PyPI's `fusepy`. A read costs the server's processor; nothing is
stored.

Values are read out of a pool of normal numbers, for each tensor from a place of its own, so that every
read of a file gives the same bytes. An update is of eight directions and noise, in equal parts, and the
experts' updates differ sixfold in norm. All is stored in bfloat16, so an expert's file holds what rounding
left of its update.
"""

from __future__ import annotations

import argparse
import bisect
import errno
import hashlib
import json
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fuse import FUSE, FuseOSError, Operations

from benchmarks.models import llama_shapes

# Llama-3-8B.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BASE = 0.02
UPDATE = 4e-4
DIRECTIONS = 8
POOL = 2**24 + 43  # no multiple of a row: rows do not repeat
ONE_READ = 2**20  # entries, at most
SHARD = 5 * 10**9
BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--experts", type=int, default=3)
    arguments = parser.parse_args()
    config = {**CONFIG, "num_hidden_layers": arguments.layers}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    models = Models(config, arguments.experts)
    # Pages stay in the page cache, as those of a disk do.
    FUSE(models, str(arguments.folder), foreground=True, ro=True, kernel_cache=True)


@dataclass(frozen=True)
class Values:
    """Entries of one tensor of one model.

    Attributes:
        shape: of the tensor.
        name: of the tensor; decides where its values begin in the pools.
        scale: standard deviation of the update's entries; 0 of the base.
    """

    shape: tuple[int, ...]
    name: str
    scale: float

    def read(self, start: int, stop: int, base: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return the entries from `start` to `stop`, in bfloat16's bits."""
        around = 1.0 if len(self.shape) == 1 else 0.0
        found = self._drawn(base, "base", start, stop) * np.float32(BASE) + np.float32(around)
        stored = _bfloat16(found)
        if not self.scale:
            return stored
        update = self._drawn(own, "noise", start, stop)
        if len(self.shape) == 2:
            update = (update + self._low_rank(start, stop, own)) * np.float32(0.5**0.5)
        return _bfloat16(_float32(stored) + update * np.float32(self.scale))

    def _low_rank(self, start: int, stop: int, own: np.ndarray) -> np.ndarray:
        _, columns = self.shape
        first, last = start // columns, -(-stop // columns)
        left = self._drawn(own, "left", first * DIRECTIONS, last * DIRECTIONS)
        right = self._drawn(own, "right", 0, DIRECTIONS * columns)
        product = left.reshape(-1, DIRECTIONS) @ right.reshape(DIRECTIONS, columns)
        found = product.ravel()[start - first * columns : stop - first * columns]
        return found * np.float32(DIRECTIONS**-0.5)

    def _drawn(self, pool: np.ndarray, what: str, start: int, stop: int) -> np.ndarray:
        begin = (_place(self.name, what) + start) % POOL
        return pool[begin : begin + stop - start]


@cache
def _place(name: str, what: str) -> int:
    digest = hashlib.blake2b(f"{name} {what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class File:
    """A file: bytes that are there, then tensors one behind the other."""

    def __init__(self, head: bytes, tensors: Mapping[int, Values] | None = None, size: int = 0):
        self._head = head
        self._tensors = tensors or {}
        self._starts = list(self._tensors)
        self.size = len(head) + size

    def read(self, offset: int, size: int, base: np.ndarray, own: np.ndarray) -> bytes:
        stop = min(offset + size, self.size)
        parts = [self._head[offset:stop]]
        start = max(offset - len(self._head), 0)
        stop -= len(self._head)
        while start < stop:
            begin = self._starts[bisect.bisect_right(self._starts, start) - 1]
            tensor = self._tensors[begin]
            entries = int(np.prod(tensor.shape))
            first = (start - begin) // BYTES
            last = min(-(-(stop - begin) // BYTES), entries)
            values = tensor.read(first, last, base, own).tobytes()
            skipped = start - begin - first * BYTES
            parts.append(values[skipped : stop - begin - first * BYTES])
            start = begin + last * BYTES
        return b"".join(parts)


class Models(Operations):
    """Folders `base`, `a`, `b`, … of one shape."""

    def __init__(self, config: Mapping[str, Any], experts: int) -> None:
        names = ["base", *(chr(ord("a") + number) for number in range(experts))]
        scales = [0.0, *(UPDATE * 6 ** (n / max(experts - 1, 1)) for n in range(experts))]
        self._pools = {name: _pool(number) for number, name in enumerate(names)}
        self._files = {
            f"/{name}/{file}": content
            for name, scale in zip(names, scales, strict=True)
            for file, content in files(config, scale).items()
        }
        self._folders = {"/", *(f"/{name}" for name in names)}

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path in self._folders:
            return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
        if path not in self._files:
            raise FuseOSError(errno.ENOENT)
        size = self._files[path].size
        return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> list[str]:
        known = [*self._files, *(self._folders - {"/"})]
        inside = [p for p in known if p.rpartition("/")[0] == path.rstrip("/")]
        return [".", "..", *(p.rpartition("/")[2] for p in inside)]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        own = self._pools[path.split("/")[1]]
        return self._files[path].read(offset, size, self._pools["base"], own)


def _pool(seed: int) -> np.ndarray:
    """Normal numbers, and their beginning once more behind them, for what is read across the end."""
    found = np.random.default_rng(seed).standard_normal(POOL, dtype=np.float32)
    return np.concatenate([found, found[:ONE_READ]])


def files(config: Mapping[str, Any], scale: float) -> dict[str, File]:
    """Return a checkpoint's files: its configuration, its index and its shards."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in llama_shapes(dict(config)).items():
        size = BYTES * int(np.prod(shape))
        if held + size > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += size
    found = {}
    index = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(shapes, file)
        found[file] = _shard(shapes, scale)
    total = sum(file.size for file in found.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    return {
        "config.json": File(json.dumps(config, indent=1).encode()),
        "model.safetensors.index.json": File(text.encode()),
        **found,
    }


def _shard(shapes: Mapping[str, tuple[int, ...]], scale: float) -> File:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = {}
    place = 0
    for name, shape in shapes.items():
        stop = place + BYTES * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, stop]}
        tensors[place] = Values(shape, name, scale)
        place = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return File(struct.pack("<Q", len(text)) + text, tensors, place)


if __name__ == "__main__":
    main()
