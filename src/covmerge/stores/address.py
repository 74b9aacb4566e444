"""Where a user says that something lies: on this machine, so far.

This is the one place that an address elsewhere comes to. A library of file systems, as fsspec, would be
asked here; what it has would be read through a `Store` (`store.py`) as local folders are, and an output
would appear there by a `Destination` (`destination.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from covmerge.errors import InputError

# A drive of Windows is one letter; of two slashes a `Path` keeps one.
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/", re.ASCII | re.IGNORECASE)


def local_path(given: str | Path) -> Path:
    """Return the path that a user gave.

    Raises:
        InputError: it is an address of something that is not on this machine.

    Example:
        >>> local_path("models/base").as_posix()
        'models/base'
        >>> local_path("s3://bucket/base")
        Traceback (most recent call last):
        covmerge.errors.InputError: s3://bucket/base is an address (s3), and covmerge reads and writes \
files of this machine: copy what lies there to a folder, and name that. A model of the Hugging Face Hub is \
written org/name
    """
    if (address := _SCHEME.match(str(given))) is not None:
        raise InputError(
            f"{given} is an address ({address['scheme']}), and covmerge reads and writes files of this "
            "machine: copy what lies there to a folder, and name that. A model of the Hugging Face Hub "
            "is written org/name"
        )
    return Path(given)
