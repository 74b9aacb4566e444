"""Single files of a web server, read by ranges over HTTP with fsspec's session."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from covmerge.base.errors import InputError
from covmerge.files.stores.address import PAGES, Address
from covmerge.files.stores.retries import ChangedError, RefusedError
from covmerge.files.stores.server import FileStat

SILENCE = 30.0  # seconds without a byte, or until an answer's head is there

_WHOLE = 2**24  # the longest file that is read of a server that sends all of it
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", re.ASCII)
_ELSEWHERE = frozenset({301, 302, 303, 307, 308})
_HOPS = 6


class PageServer:
    """Files of web servers; a path is the address, with its parts quoted."""

    def __init__(self) -> None:
        try:
            from aiohttp import ClientTimeout
            from fsspec.implementations.http import HTTPFileSystem
        except ImportError as error:
            raise InputError(
                f"https:// takes further packages: pip install 'covmerge[remote]' ({error})"
            ) from None
        # `trust_env`: proxies, and credentials of ~/.netrc, which go to their own host alone.
        timeout = ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE)
        system: Any = HTTPFileSystem(
            client_kwargs={"trust_env": True, "timeout": timeout, "auto_decompress": False},
            encoded=True,
            skip_instance_cache=True,
        )
        self._system = system
        self.loop = system.loop

    @classmethod
    def at(cls, address: Address) -> tuple[PageServer, str]:
        """Return the server of an address, and what it calls the place."""
        return cls(), f"{address.scheme}://{quote(address.path, safe=':/%[]')}"

    def inside(self, folder: str, name: str) -> str:
        return f"{folder}/{quote(name)}"

    def shown(self, path: str) -> str:
        return path

    async def stat(self, path: str) -> FileStat:
        """See `Server.stat`: asked for is the first byte, which also shows whether there are ranges."""
        async with await self._get(path, 0, 1) as answer:
            if str(answer.headers.get("Content-Type", "")).startswith("text/html"):
                raise FileNotFoundError(path)  # a page that says so, or lists a folder
            found = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
            if found is not None:
                return _stat(int(found[3]), answer)
            length = str(answer.headers.get("Content-Length", ""))
            if answer.status == 200 and length.isdecimal() and int(length) <= _WHOLE:
                return _stat(int(length), answer)
        raise RefusedError("the server sends no ranges of it: download it, and pass its folder")

    async def listed(self, folder: str) -> Mapping[str, FileStat | None]:
        """Raise: a web server lists no folders."""
        raise RefusedError("a web server lists no folders: name a file in it")

    async def fetch(self, path: str, target: memoryview, offset: int, stat: FileStat) -> None:
        """See `Server.fetch`; no more is taken than was asked for, whatever is sent."""
        async with await self._get(path, offset, len(target)) as answer:
            if stat.version and _version(answer) != stat.version:
                raise ChangedError
            sent = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
            before = 0
            if answer.status == 200:
                if offset + len(target) > _WHOLE:
                    raise RefusedError("the server sends no ranges of it any more")
                before = offset
            elif answer.status != 206:
                raise RefusedError(f"the server answers by status {answer.status}")
            elif sent is None or sent[1] is None or int(sent[1]) != offset:
                raise OSError("another range was sent")
            done = 0
            async for chunk in answer.content.iter_any():
                new = chunk[before:][: len(target) - done]
                before = max(0, before - len(chunk))
                target[done : done + len(new)] = new
                done += len(new)
                if done == len(target):
                    return
        raise OSError(f"sent {done} bytes of {len(target)}")

    async def _get(self, path: str, offset: int, count: int) -> Any:
        session = await self._system.set_session()
        # An encoding would make the range one of compressed bytes.
        headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
        where = path
        for _ in range(_HOPS):
            url = self._system.encode_url(where)
            # A server may send answers before the answer (1xx) without end, and never be silent.
            asked = session.get(url, headers=headers, allow_redirects=False)
            answer = await asyncio.wait_for(asked, SILENCE)
            if answer.status not in _ELSEWHERE:
                break
            location = str(answer.headers.get("Location", ""))
            answer.close()
            where = onward(where, location)
        else:
            raise RefusedError(f"the server sends from one address to the next {_HOPS} times")
        empty = answer.status == 416 and _RANGE.fullmatch(
            str(answer.headers.get("Content-Range", ""))
        )
        if not (empty and empty[3] == "0"):
            try:
                answer.raise_for_status()
                encoding = str(answer.headers.get("Content-Encoding", "identity"))
                if encoding.lower() != "identity":
                    raise RefusedError(
                        "the server sends it compressed, unasked: download it, and pass its folder"
                    )
            except BaseException:
                answer.close()
                raise
        return answer


def onward(asked: str, location: str) -> str:
    """Return the address that an answer leads to, which no server may choose freely.

    It is of the web, not less protected than what was asked for, without credentials, and leads to no
    machine of the user's network or the user's own where the server is another.

    Raises:
        RefusedError: it is not.

    Example:
        >>> onward("https://example.org/a/b", "/c?sig=1")
        'https://example.org/c?sig=1'
    """
    try:
        old, new = urlsplit(asked), urlsplit(urljoin(asked, location))
        host, user, _ = new.hostname, new.username, new.port
    except ValueError:
        host, user, old, new = None, None, urlsplit(""), urlsplit("")
    plain = host is not None and host.isascii() and location.isprintable()
    if not plain or host is None or new.scheme not in PAGES or user is not None:
        raise RefusedError("the server leads to what is no address of a web page")
    shown = f"{new.scheme}://{host[:100]}"
    if old.scheme == "https" and new.scheme == "http":
        raise RefusedError(f"the server leads to {shown}, which is not protected as https is")
    if host != old.hostname and _is_near(host):
        raise RefusedError(
            f"the server leads to {shown}, a machine of this network: name it yourself"
        )
    return urlunsplit(new._replace(fragment=""))


def _is_near(host: str) -> bool:
    """Whether a host is written as one of this machine or its network; names are not looked up."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return not ip_address(name).is_global
    except ValueError:  # a name, or a number that some take for an address, such as 0 or 0x7f000001
        return name.rpartition(".")[2].startswith(tuple("0123456789"))


def _stat(size: int, answer: Any) -> FileStat:
    return FileStat(size, _version(answer))


def _version(answer: Any) -> str:
    """What the server says of the version of a file."""
    said = (answer.headers.get(name) for name in ("ETag", "Last-Modified"))
    return " ".join(str(one) for one in said if one)
