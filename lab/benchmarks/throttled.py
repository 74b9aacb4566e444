"""covmerge's command line with a slow disk: THROTTLE=BYTES_A_SECOND:FILE for all of its processes together.

    THROTTLE=150e6:/tmp/disk python -m benchmarks.throttled merge ...

FILE holds until when the disk is busy. Workers import this module too, and Ray's tasks are given it. What
hashes the sources is not held up: it reads what the merge has just read, which is in the page cache.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

from covmerge.files.stores import local

_TIME = struct.Struct("d")


class Disk:
    """A disk that moves so many bytes a second, whoever asks.

    Args:
        given: the rate, and the file that its users share.
    """

    def __init__(self, given: str) -> None:
        rate, _, file = given.partition(":")
        self._rate, self._file = float(rate), Path(file)

    def move(self, size: int) -> None:
        """Wait as long as this disk would take for so many bytes more."""
        if threading.current_thread().name.startswith("covmerge-hash"):
            return
        with self._file.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (free,) = _TIME.unpack(file.read(_TIME.size))
            free = max(free, time.monotonic()) + size / self._rate
            file.seek(0)
            file.write(_TIME.pack(free))
        time.sleep(max(0.0, free - time.monotonic()))

    @staticmethod
    def make(file: Path) -> None:
        """Make the file that its users share."""
        file.write_bytes(_TIME.pack(0.0))


@contextmanager
def held_up(disk: Disk) -> Iterator[None]:
    """Have this process read and write at the speed of a disk."""
    read, write = local.read_at, local.write_at

    def slow_read(file: FileIO, target: memoryview, offset: int) -> int:
        count = read(file, target, offset)
        disk.move(count)
        return count

    def slow_write(fd: int, data: memoryview, offset: int) -> None:
        disk.move(len(data))
        write(fd, data, offset)

    local.read_at, local.write_at = slow_read, slow_write
    try:
        yield
    finally:
        local.read_at, local.write_at = read, write


def hold_up_tasks(given: str) -> None:
    """Have tasks that this process gives out merge, and read what was merged, at the speed of a disk."""

    def slow(module: str, name: str) -> Callable[..., Any]:
        def task(*arguments: Any) -> Any:
            from benchmarks.throttled import Disk, held_up  # it is run in another process

            with held_up(Disk(given)):
                return getattr(import_module(module), name)(*arguments)

        return task

    for name in ("executor._do", "reading._read"):
        module, _, function = f"covmerge.run.engine.cluster.{name}".rpartition(".")
        setattr(import_module(module), function, slow(module, function))


if __name__ in ("__main__", "__mp_main__") and "THROTTLE" in os.environ:
    _HELD = held_up(Disk(os.environ["THROTTLE"]))
    _HELD.__enter__()  # to the end of the process

if __name__ == "__main__":
    from covmerge.front.cli import main

    if "THROTTLE" in os.environ and "ray" in sys.argv:  # --executor ray
        hold_up_tasks(os.environ["THROTTLE"])
    main()
