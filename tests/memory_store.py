"""A store and a destination in memory: what a folder on disk is compared with."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from covmerge.base.errors import InputError
from covmerge.files.stores.lock import TakenError
from covmerge.files.stores.paths import check_bare
from covmerge.files.stores.store import Stamp, WritableFile, remove_others, tree


class MemoryStore:
    r"""Files that are bytes by name; those of folders have both names, as "heads/a.safetensors" has.

    Args:
        contents: what there is to begin with.
        name: what messages call the store.

    Example:
        >>> store = MemoryStore({"a": b"123"})
        >>> store.inside("heads").create("b", 4, b"1", needed=4)
        >>> store.write("heads/b", memoryview(b"2"), 3)
        >>> store.contents()
        {'a': b'123', 'heads/b': b'1\x00\x002'}
    """

    folder = None

    def __init__(self, contents: Mapping[str, bytes] | None = None, name: str = "memory") -> None:
        self._name = name
        self._prefix = ""
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._changes = itertools.count()
        self._files = {
            key: _File(bytearray(value), next(self._changes), self._lock)
            for key, value in (contents or {}).items()
        }

    def __str__(self) -> str:
        return self.where("").removesuffix("/")

    def contents(self) -> dict[str, bytes]:
        """Return a copy of everything."""
        with self._lock:
            return {name: bytes(file.data) for name, file in sorted(self._files.items())}

    def where(self, name: str) -> str:
        return f"{self._name}/{self._prefix}{name}"

    def names(self) -> list[str]:
        return [name for name in self._inside() if "/" not in name]

    def folders(self) -> list[str]:
        return list(dict.fromkeys(n.partition("/")[0] for n in self._inside() if "/" in n))

    def check(self, name: str) -> None:
        check_bare(name, self._name)

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        del follow  # there are no links
        return self._prefix + name in self._files

    def stamp(self, name: str) -> Stamp:
        return self._find(name).stamp

    def open(self, name: str, *, follow: bool = True) -> _File:
        del follow
        return self._find(name)

    def inside(self, folder: str) -> MemoryStore:
        found = copy.copy(self)  # which shares the files
        found._prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        return found

    def exists(self, name: str) -> bool:
        inside = f"{self._prefix}{name}/"
        return self.is_file(name) or any(key.startswith(inside) for key in list(self._files))

    def create(self, name: str, size: int, start: bytes, *, needed: int) -> None:
        del needed  # memory is not reserved
        file = _File(bytearray(size), next(self._changes), self._lock)
        file.data[: len(start)] = start
        with self._lock:
            self._files[self._prefix + name] = file

    def write(self, name: str, data: memoryview, offset: int) -> None:
        with self._changed(name) as file:
            file.data[offset : offset + len(data)] = data

    def append(self, name: str, data: bytes) -> None:
        with self._changed(name) as file:
            file.data += data

    def truncate(self, name: str, size: int) -> None:
        with self._changed(name) as file:
            del file.data[size:]

    def remove(self, name: str) -> None:
        with self._changed(name):
            del self._files[self._prefix + name]

    def flush(self, names: Sequence[str]) -> None:
        """Nothing survives the process."""

    def move(self, folder: str, to: str) -> None:
        """Put a folder in the place of another, in one step."""
        old, new = (f"{self._prefix}{name}/" for name in (folder, to))
        with self._lock:
            moved = {k: v for k, v in self._files.items() if k.startswith(old)}
            for name in [n for n in self._files if n.startswith((old, new))]:
                del self._files[name]
            self._files.update({new + k.removeprefix(old): v for k, v in moved.items()})

    def take(self, folder: str) -> None:
        """Lock a folder against other threads.

        Raises:
            TakenError: another has it.
        """
        with self._lock:
            if self._prefix + folder in self._taken:
                raise TakenError
            self._taken.add(self._prefix + folder)

    def release(self, folder: str) -> None:
        """Let another have it."""
        with self._lock:
            self._taken.discard(self._prefix + folder)

    def _inside(self) -> list[str]:
        with self._lock:
            every = list(self._files)
        return [n.removeprefix(self._prefix) for n in every if n.startswith(self._prefix)]

    def _find(self, name: str) -> _File:
        with self._lock:
            found = self._files.get(self._prefix + name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return found

    @contextmanager
    def _changed(self, name: str) -> Generator[_File]:
        try:
            file = self._find(name)
        except FileNotFoundError as error:
            raise InputError(f"cannot write {self.where(name)}: {error.strerror}") from error
        with self._lock:
            yield file
            file.change = next(self._changes)


@dataclass
class _File:
    """Bytes, and the number of the last change to them."""

    data: bytearray
    change: int
    lock: threading.Lock

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def stamp(self) -> Stamp:
        return len(self.data), self.change, 0

    def read_at(self, target: memoryview, offset: int) -> int:
        with self.lock:
            found = self.data[offset : offset + len(target)]
        target[: len(found)] = found
        return len(found)


class MemoryDestination:
    """A folder of files in memory that an output becomes; see `Destination`.

    Args:
        store: where it lies; its lock is among the threads that have this store.
        name: of the folder.

    Example:
        >>> store = MemoryStore()
        >>> out = MemoryDestination(store, "merged")
        >>> out.take()
        True
        >>> WritableFile(out.work, "covmerge.json").put(b"{}")
        >>> out.publish()
        >>> store.contents()
        {'merged/covmerge.json': b'{}'}
    """

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store = store
        self._name = name
        self._partial = f".{name}.covmerge-partial"
        self._taken = False
        partial = store.inside(self._partial)
        self.output = store.inside(name)
        self.work = partial.inside("output")
        self.journal = WritableFile(partial, "journal.jsonl")

    def __str__(self) -> str:
        return str(self.output)

    @property
    def aside(self) -> str:
        return self._store.where(self._partial)

    def share(self) -> None:
        """See `Destination.share`: among the threads that have this store."""

    def is_made_here(self) -> bool:
        return True

    def occupant(self) -> object | None:
        return [(name, self.output.stamp(name)) for name in tree(self.output)] or None

    def take(self) -> bool:
        self._store.take(self._partial)
        self._taken = True
        return True

    def recover(self) -> bool:
        """See `Destination.recover`: it is published in one step."""
        return False

    def begun(self) -> bool:
        return self.journal.exists() and any(True for _ in tree(self.work))

    def begin(self) -> None:
        remove_others(self._store.inside(self._partial), ())

    def publish(self) -> None:
        self._store.move(f"{self._partial}/output", self._name)

    def release(self) -> None:
        if self._taken:
            self._store.release(self._partial)
            self._taken = False

    def discard(self) -> None:
        if self._taken:
            self.begin()
            self.release()
