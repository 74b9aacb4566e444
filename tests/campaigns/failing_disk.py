"""A disk that fails: a file system of FUSE with a few files, whose reads end in EIO from one of them on.

Spoken as the kernel does (include/uapi/linux/fuse.h, protocol 7.31), as far as reading needs it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _FORGETS = 25, 26, 27, 28, 29, 34, 42
_IN, _OUT, _ATTRIBUTES = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ"), struct.Struct("<6Q10I")
_DIRECT = 1  # every read comes here, and none is answered by the page cache
_REQUEST = 1 << 20
_NEVER = 2**62


class FailingDisk:
    """Files in a folder; `fail_at` says which read is the first to fail, counted over all of them.

    Args:
        place: an empty folder.
        files: content by name.

    Attributes:
        place: the folder.
        real: whether it could be mounted, which needs root and FUSE.
    """

    def __init__(self, place: Path, files: Mapping[str, bytes]) -> None:
        self.place = place
        self._files = [(os.fsencode(name), content) for name, content in files.items()]
        self._shared = mmap.mmap(-1, 16)  # reads left until one fails, and reads in all
        self.fail_at(None)
        self._server = 0
        self.real = self._mount()

    def fail_at(self, read: int | None) -> None:
        """Let a read be the first that fails, 0 the next one; None: none does."""
        self._shared[:] = struct.pack("<QQ", _NEVER if read is None else read, 0)

    @property
    def reads(self) -> int:
        """How many there were since then."""
        return int(struct.unpack("<QQ", self._shared[:])[1])

    def close(self) -> None:
        """Take it off."""
        if self.real:
            ctypes.CDLL(None).umount2(os.fsencode(self.place), 2)  # MNT_DETACH
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)

    def _mount(self) -> bool:
        try:
            device = os.open("/dev/fuse", os.O_RDWR)
        except OSError:
            return False
        told = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        place = os.fsencode(self.place)
        if ctypes.CDLL(None).mount(b"failing", place, b"fuse", ctypes.c_ulong(0), told):
            os.close(device)
            return False
        self._server = os.fork()
        if self._server == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the campaign
                while True:
                    self._answer(device, os.read(device, _REQUEST))
            finally:
                os._exit(0)
        os.close(device)
        return True

    def _answer(self, device: int, request: bytes) -> None:
        _, code, unique, node, *_ = _IN.unpack_from(request)
        if code in (_FORGET, _FORGETS):
            return
        try:
            body, error = self._body(code, node, request[_IN.size :]), 0
        except OSError as refused:
            body, error = b"", -(refused.errno or errno.EIO)
        os.write(device, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    def _body(self, code: int, node: int, given: bytes) -> bytes:
        if code == _INIT:
            return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, 0, 0, 0, 1 << 17, 1, 0, 0, *[0] * 8)
        if code == _LOOKUP:
            names = [name for name, _ in self._files]
            name = given.rstrip(b"\0")
            if name not in names:
                raise OSError(errno.ENOENT, "")
            found = names.index(name) + 2
            return struct.pack("<4Q2I", found, 0, 3600, 3600, 0, 0) + self._attributes(found)
        if code == _GETATTR:
            return struct.pack("<Q2I", 3600, 0, 0) + self._attributes(node)
        if code in (_OPEN, _OPENDIR):
            return struct.pack("<Q2I", 0, _DIRECT if code == _OPEN else 0, 0)
        if code == _READ:
            _, offset, size = struct.unpack_from("<QQI", given)
            left, reads = struct.unpack("<QQ", self._shared[:])
            self._shared[:] = struct.pack("<QQ", max(0, left - 1), reads + 1)
            if not left:
                raise OSError(errno.EIO, "")
            return self._files[node - 2][1][offset : offset + size]
        if code == _STATFS:
            return bytes(80)
        if code in (_RELEASE, _RELEASEDIR, _FLUSH, _ACCESS, _READDIR):
            return b""
        raise OSError(errno.ENOSYS, "")

    def _attributes(self, node: int) -> bytes:
        size = 0 if node == 1 else len(self._files[node - 2][1])
        mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
        return _ATTRIBUTES.pack(node, size, size // 512 + 1, *[1] * 3, *[0] * 3, mode, 1, *[0] * 5)
