"""Blocks of a file whose version the server does not tell: what is read twice must be the same both times.

The files of such a server are hashed after they were merged, so every block that was merged is read again.
"""

from __future__ import annotations

import threading
import zlib

from covmerge.files.stores.retries import ChangedError

_BLOCK = 2**20


class CheckedFile:
    """Checksums of what was read of one file; for any thread.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def blocks(self, asked: range) -> range:
        """Return the whole blocks that have the bytes of a range."""
        end = asked.stop + -asked.stop % _BLOCK
        return range(asked.start - asked.start % _BLOCK, min(end, self._size))

    def check(self, data: memoryview, offset: int) -> None:
        """Note what was read of whole blocks, and compare it with what was read of them before.

        Raises:
            ChangedError: it is not what was read before.
        """
        for start in range(0, len(data), _BLOCK):
            own = zlib.crc32(data[start : start + _BLOCK])
            with self._lock:
                before = self._sums.setdefault(offset + start, own)
            if own != before:
                raise ChangedError
