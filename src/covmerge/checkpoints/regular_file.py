"""The one way in which files of strangers are opened: regular files, and nothing that could block."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes; links are followed.

    A pipe would be waited for, and a device may have no end. What a path is may change between a
    question and its use, so that the file is asked when it is open.

    Raises:
        OSError: there is no such file, it may not be read, it is something else, or its name is none
            that a file can have.

    Example:
        >>> open_regular(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: [Errno 22] It is a pipe or a device, not a regular file: '/dev/zero'
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"No file can have this name ({error})", repr(path)) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a regular file", str(path))
