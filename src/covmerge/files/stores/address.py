"""Addresses of files and folders as users write them: a local path, or an address elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from covmerge.base.errors import InputError
from covmerge.base.identifiers import HubId, hub_id

# Schemes that can be read and written (OBJECTS), or only read (PAGES).
OBJECTS = ("s3", "gs")
PAGES = ("https", "http")
_HUB = "hf"

# A drive of Windows is one letter; a `Path` keeps only one of two slashes.
_SCHEME = re.compile(r"\s*(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)", re.ASCII | re.I | re.S)
# An address without slashes would be taken for a path, and repeated in messages with any secret in it.
_NO_SLASHES = re.compile(
    rf"\s*(?P<scheme>{'|'.join((*OBJECTS, *PAGES, _HUB))}):(?!/)", re.ASCII | re.I
)


@dataclass(frozen=True)
class Address:
    """A file or folder on a server; `str` gives the form that recipes have."""

    scheme: str
    path: str  # bucket or host, followed by the path in it, without a slash at either end

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def overlaps(self, other: Address) -> bool:
        """Return whether one of the two addresses equals the other, or lies inside it."""
        one, two = f"{self}/", f"{other}/"
        return one.startswith(two) or two.startswith(one)


def address_of(given: str | Path) -> Address | None:
    """Return the address that a user gave; None: it is a local path.

    An address that may contain a secret is refused, because sources are recorded with every merge.

    Raises:
        InputError: the scheme cannot be read, or the address is malformed or may contain a secret.

    Example:
        >>> str(address_of("s3://bucket/models/base/"))
        's3://bucket/models/base'
        >>> address_of("models/base")
    """
    if (bare := _NO_SLASHES.match(str(given))) is not None:
        scheme = bare["scheme"].lower()
        raise InputError(
            f"an address that begins with '{scheme}:' is written {scheme}://, and without user or "
            "password, as addresses are recorded: correct it. A file of that name on this machine is ./NAME"
        )
    if (found := _SCHEME.match(str(given))) is None or found["scheme"].lower() == _HUB:
        return None
    scheme, path = found["scheme"].lower(), found["rest"].rstrip("/")
    host = path.partition("/")[0].rpartition("@")[2]
    if "@" in path.partition("/")[0] or "?" in path or "#" in path:
        raise InputError(
            f"the address {scheme}://{host}/... has a user, a query or a fragment in it, which may be "
            "secret, and addresses are recorded: write it without, and give credentials in the environment"
        )
    if scheme not in (*OBJECTS, *PAGES):
        raise InputError(
            f"{given} is an address ({scheme}), and covmerge reads s3://, gs://, https:// and files of "
            "this machine: copy what lies there to a folder, and name that. A model of the Hugging Face "
            "Hub is written org/name"
        )
    parts = path.split("/")
    if not path.isprintable() or not host or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{str(given)!r} is no address of a file or folder: correct it")
    return Address(scheme, path)


def hub_address(given: str | Path) -> HubId | None:
    """Return the model of the Hub that an address (hf://) names; None: it is no address of the Hub.

    Raises:
        InputError: the address names no model.

    Example:
        >>> hub_address("hf://org/name@main")
        HubId(repository='org/name', revision='main')
    """
    if (found := _SCHEME.match(str(given))) is None or found["scheme"].lower() != _HUB:
        return None
    if (named := hub_id(found["rest"])) is None:
        # The text before an @, and a query, may be a secret.
        shown = "hf://..." if {"@", "?", "#"} & set(found["rest"]) else given
        raise InputError(
            f"{shown} names no model of the Hugging Face Hub: write hf://org/name or "
            "hf://org/name@revision, or without the hf://. Credentials are the Hub client's own"
        )
    return named


def local_path(given: str | Path) -> Path:
    """Return the path that a user gave for something that can only be local.

    Raises:
        InputError: it is an address.

    Example:
        >>> local_path("models/base").as_posix()
        'models/base'
        >>> local_path("s3://bucket/base")
        Traceback (most recent call last):
        covmerge.base.errors.InputError: s3://bucket/base is an address, and a path of this machine is \
needed here: copy what lies there to a folder, and name that
    """
    if not any(form.match(str(given)) for form in (_SCHEME, _NO_SLASHES)):
        return Path(given)
    shown = (hub_address(given) and str(given)) or str(address_of(given))
    raise InputError(
        f"{shown} is an address, and a path of this machine is needed here: copy what lies there to a "
        "folder, and name that"
    )
