"""A store in memory, which readers treat like one on another machine."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping

from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.store import Opened, Stamp


class MemoryStore:
    """Files that are bytes by name; those of folders have both names, as "heads/a.safetensors" has.

    Args:
        contents: the files.
        name: what messages call the store.
    """

    folder = None

    def __init__(self, contents: Mapping[str, bytes], name: str = "memory") -> None:
        self.contents = dict(contents)
        self._name = name

    def __str__(self) -> str:
        return self._name

    def where(self, name: str) -> str:
        return f"{self._name}/{name}"

    def names(self) -> list[str]:
        return [name for name in self.contents if "/" not in name]

    def folders(self) -> list[str]:
        return list(dict.fromkeys(n.partition("/")[0] for n in self.contents if "/" in n))

    def check(self, name: str) -> None:
        check_bare(name, self._name)

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        return name in self.contents

    def stamp(self, name: str) -> Stamp:
        return self.open(name).stamp

    def open(self, name: str, *, follow: bool = True) -> _File:
        if name not in self.contents:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return _File(self.contents[name])

    def inside(self, folder: str) -> MemoryStore:
        prefix = f"{folder}/"
        inner = {
            k.removeprefix(prefix): v for k, v in self.contents.items() if k.startswith(prefix)
        }
        return MemoryStore(inner, self.where(folder)) if folder else self


class _File(Opened):
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stamp = len(data), zlib.crc32(data), 0

    def read_at(self, target: memoryview, offset: int) -> int:
        found = self.data[offset : offset + len(target)]
        target[: len(found)] = found
        return len(found)
