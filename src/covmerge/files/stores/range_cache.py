"""What was read of other machines' files, kept on a disk of this one: no more bytes than were allowed.

Files are kept in blocks of 1 MiB, each under a hash of what tells it from all others: server, address,
version, size and place. A file that changes has other blocks, and what is kept of the old one is never
asked for again.

Blocks are dealt to 256 folders in turn, as lines are to the sets of a processor's cache. Each folder has
its share of the bytes that are allowed, and what was used least recently in it makes room. So there is no
list of what is kept, which processes would have to agree on: a block is there under its name, or not.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from covmerge.base.cache import user_cache
from covmerge.base.errors import CheckpointError, InputError, ResourceError
from covmerge.base.sizes import parse_size
from covmerge.base.text import shown
from covmerge.files.stores.disk import disk_errors, free_bytes, replace_file
from covmerge.files.stores.regular_file import read_regular

BLOCK = 2**20
VARIABLE = "COVMERGE_REMOTE_CACHE"
_SETS = 256
_LEAST = 10**9  # bytes that may be allowed: three blocks a set
_SPARED = 2**30  # bytes of the disk that are left to others
_ABANDONED = 3600  # seconds after which nobody writes on at what is unfinished
_CHECKSUM = 4  # bytes of the CRC-32 behind a block
_NAME = re.compile(r"\.?[0-9a-f]{64}-\d+(\.[0-9a-f]+\.unfinished)?")  # of what is ours in a set


class RangeCache:
    """Blocks of files in a folder of this machine; for any thread, and any number of processes.

    Args:
        folder: made when something is kept.
        bound: bytes that they may have together; what is just being written comes on top.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self._folder = folder
        self._share = bound // _SETS
        self._failed = False

    @classmethod
    def of_user(cls) -> RangeCache | None:
        """Return the cache that COVMERGE_REMOTE_CACHE allows so many bytes; None: it allows none.

        Raises:
            InputError: it is no size, or too small a one, or there is no folder for it.
        """
        said = os.environ.get(VARIABLE, "")
        if said in ("", "0"):
            return None
        try:
            bound = parse_size(said)
            folder = user_cache() / "ranges"
        except InputError as error:
            raise InputError(f"{VARIABLE}: {error}") from None
        except RuntimeError as error:
            raise InputError(
                f"{VARIABLE} is set, and there is no folder for what is kept: set COVMERGE_CACHE to one "
                f"({error})"
            ) from error
        if bound < _LEAST:
            raise InputError(
                f"{VARIABLE} is {shown(said)}: give at least 1GB, or 0 for no cache, which is the default"
            )
        return _cache(folder, bound)

    def file(self, *identity: str, size: int) -> CachedFile:
        """Return what is kept of a file.

        Args:
            identity: all that tells it from other files, and from itself after a change.
            size: its bytes.
        """
        digest = hashlib.sha256("\0".join((*identity, str(size))).encode())
        return CachedFile(self, digest.digest(), size)

    def get(self, part: int, name: str, size: int) -> bytes | None:
        """Return a block of so many bytes; None: it is not kept, or no longer what was put there."""
        if self._exposed() is not None:
            return None
        path = self._path(part, name)
        try:
            content = read_regular(path, size + _CHECKSUM)
        except FileNotFoundError:
            return None
        except CheckpointError:  # longer, or it cannot be read
            content = b""
        data, checksum = content[:size], content[size:]
        if len(checksum) == _CHECKSUM and checksum == _checksum(name, data):
            with suppress(OSError):  # a folder that may be read and not written
                os.utime(path)
            return data
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, part: int, name: str, data: memoryview) -> None:
        """Keep a block whole, or not at all; what was used least recently makes room.

        A disk that is full, or may not be written to, ends no merge: that is said, and no more is kept.
        """
        if self._failed:
            return
        path, content = self._path(part, name), b"".join((data, _checksum(name, data)))
        try:
            with disk_errors(path.parent):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (problem := self._exposed()) is not None:
                    raise InputError(problem)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                if path.parent.is_symlink():
                    raise InputError(f"{path.parent} is a link")
                _make_room(path.parent, self._share - len(content))
                if free_bytes(path.parent) < _SPARED:
                    raise ResourceError(
                        f"less than {_SPARED} bytes are free on the disk of {path.parent}"
                    )
            replace_file(path, content)
        except (InputError, ResourceError) as error:
            self._give_up(error)

    def _path(self, part: int, name: str) -> Path:
        return self._folder / f"{part % _SETS:02x}" / name

    def _exposed(self) -> str | None:
        """Why others could have put blocks into the folder, whose checksums anybody can compute."""
        try:
            status = self._folder.lstat()
        except OSError:  # it is not there; what else there is, reading and writing say
            return None
        if not stat.S_ISDIR(status.st_mode):
            return f"{self._folder} is a link or a file, and no folder"
        if os.name == "nt":  # whose modes say nothing of others
            return None
        if status.st_uid != os.geteuid():
            return f"{self._folder} is another user's: set COVMERGE_CACHE to a folder of your own"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {self._folder}: remove it, or `chmod 700` it"
        return None

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            warnings.warn(
                f"nothing more of what is read of other machines is kept ({VARIABLE}): {error}. Where "
                f"{self._folder} is not as covmerge made it, remove it",
                stacklevel=2,
            )


class CachedFile:
    """What is kept of one file, at one version."""

    def __init__(self, cache: RangeCache, digest: bytes, size: int) -> None:
        self._cache = cache
        self._name = digest.hex()
        self._first = digest[0]  # the set of its first block: not the same of all files
        self._size = size

    def fill(self, target: memoryview, offset: int) -> list[range]:
        """Fill memory with what is kept of a range, and return the ranges of whole blocks that are not."""
        missing: list[range] = []
        for own in self._blocks(offset, offset + len(target)):
            data = self._cache.get(*self._key(own.start), len(own))
            if data is not None:
                copy_overlap(memoryview(data), own.start, target, offset)
            elif missing and missing[-1].stop == own.start:
                missing[-1] = range(missing[-1].start, own.stop)
            else:
                missing.append(own)
        return missing

    def keep(self, data: memoryview, offset: int) -> None:
        """Keep what was read of a range of whole blocks."""
        for own in self._blocks(offset, offset + len(data)):
            start = own.start - offset
            self._cache.put(*self._key(own.start), data[start : start + len(own)])

    def _blocks(self, start: int, stop: int) -> Iterator[range]:
        for begin in range(start - start % BLOCK, stop, BLOCK):
            yield range(begin, min(begin + BLOCK, self._size))

    def _key(self, start: int) -> tuple[int, str]:
        number = start // BLOCK
        return self._first + number, f"{self._name}-{number}"


@cache
def _cache(folder: Path, bound: int) -> RangeCache:
    return RangeCache(folder, bound)


def copy_overlap(data: memoryview, start: int, target: memoryview, offset: int) -> None:
    """Copy bytes of a file that lie from `start` on to where memory that begins at `offset` has them."""
    first, last = max(start, offset), min(start + len(data), offset + len(target))
    target[first - offset : last - offset] = data[first - start : last - start]


def _checksum(name: str, data: bytes | memoryview) -> bytes:
    """Of the name too: a block under another's name is none."""
    return zlib.crc32(data, zlib.crc32(name.encode())).to_bytes(_CHECKSUM, "big")


def _make_room(folder: Path, left: int) -> None:
    """Remove what was used least recently until no more than `left` bytes are there.

    A block that is being written stays; what a kill left of one goes when it is old.
    """
    found: list[tuple[float, int, os.DirEntry[str]]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                continue
            with suppress(FileNotFoundError):  # another process made room
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, entry))
    total = sum(size for _, size, _ in found)
    for used, size, entry in sorted(found, key=lambda one: one[0]):
        if total <= left:
            return
        if not entry.name.endswith(".unfinished") or used < time.time() - _ABANDONED:
            Path(entry.path).unlink(missing_ok=True)
            total -= size
