"""File servers: the interface that a store needs, pages over http(s), and object stores."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from covmerge.base.errors import InputError
from covmerge.files.stores.address import PAGES
from covmerge.files.stores.link import MOST, ChangedError, RefusedError

# Both kinds of servers have the same methods. Their coroutines run in `loop`, an event loop with its own
# thread. A path is the server's name of a file or folder. Failures raise any error of a library; `persist`
# decides which are worth another attempt.


@dataclass(frozen=True)
class FileStat:
    """A server's answer about a file."""

    size: int  # in bytes
    version: str  # a text that changes with every change of the file; "": the server has none


_BLOCK = 2**20


class CheckedFile:
    """Checksums of the parts of one file that were read; all threads may use it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def blocks(self, asked: range) -> range:
        """Return the range of whole blocks that covers a range."""
        end = asked.stop + -asked.stop % _BLOCK
        return range(asked.start - asked.start % _BLOCK, min(end, self._size))

    def check(self, data: memoryview, offset: int) -> None:
        """Record the checksums of whole blocks, and compare them with those of earlier reads."""
        for start in range(0, len(data), _BLOCK):
            checksum = zlib.crc32(data[start : start + _BLOCK])
            with self._lock:
                before = self._sums.setdefault(offset + start, checksum)
            if checksum != before:
                raise ChangedError


# Single files of a web server, read by ranges over HTTP with fsspec's session.

SILENCE = 30.0  # seconds without a byte, or without the head of an answer

_WHOLE = 2**24  # bytes of the longest file that is read from a server without ranges
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})", re.ASCII)
_ELSEWHERE = frozenset({301, 302, 303, 307, 308})
_HOPS = 6


class PageServer:
    """The files of web servers; a path is the address with its parts quoted."""

    def __init__(self) -> None:
        try:
            from aiohttp import ClientTimeout
            from fsspec.implementations.http import HTTPFileSystem  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise InputError(
                f"https:// takes further packages: pip install 'covmerge[remote]' ({error})"
            ) from None
        # `trust_env`: use proxies, and credentials in ~/.netrc, which are sent only to their own host.
        timeout = ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE)
        system: Any = HTTPFileSystem(
            client_kwargs={"trust_env": True, "timeout": timeout, "auto_decompress": False},
            encoded=True,
            skip_instance_cache=True,
        )
        self._system = system
        self.loop = system.loop

    def inside(self, folder: str, name: str) -> str:
        """Return the path of an entry of a folder."""
        return f"{folder}/{quote(name)}"

    def shown(self, path: str) -> str:
        """Return a path in the form that recipes have."""
        return path

    async def stat(self, path: str) -> FileStat:
        """Return the server's answer about a file.

        The first byte is asked for, which shows whether the server has ranges.

        Raises:
            FileNotFoundError: there is no such file.
        """
        async with await self._get(path, 0, 1) as answer:
            if str(answer.headers.get("Content-Type", "")).startswith("text/html"):
                raise FileNotFoundError(path)  # an error page, or a listing of a folder
            found = _RANGE.fullmatch(str(answer.headers.get("Content-Range", "")))
            if found is not None:
                return FileStat(int(found[3]), _version(answer))
            length = str(answer.headers.get("Content-Length", ""))
            if answer.status == 200 and length.isdecimal() and int(length) <= _WHOLE:
                return FileStat(int(length), _version(answer))
        raise RefusedError("the server sends no ranges of it: download it, and pass its folder")

    async def listed(self, folder: str) -> Mapping[str, FileStat | None]:
        """Raise: a web server lists no folders."""
        raise RefusedError("a web server lists no folders: name a file in it")

    async def fetch(self, path: str, target: memoryview, offset: int, stat: FileStat) -> None:
        """Fill memory from a place in a file; no more is read, whatever the server sends.

        Raises:
            ChangedError: the file is no longer the one that `stat` describes.
        """
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
        # With an encoding, the range would be one of compressed bytes.
        headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
        where = path
        for _ in range(_HOPS):
            url = self._system.encode_url(where)
            # A server may send interim answers (1xx) without end, and is then never silent.
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
    """Return the address to which an answer redirects, which a server may not choose freely.

    It must be a web address without credentials, and no less protected than the one asked for. It must not
    lead to the user's machine or network if the server is elsewhere.

    Raises:
        RefusedError: the address is not allowed.

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
    """Return whether a host is written as one of this machine or its network; names are not looked up."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return not ip_address(name).is_global
    except ValueError:  # a name, or a number that some take for an address, such as 0 or 0x7f000001
        return name.rpartition(".")[2].startswith(tuple("0123456789"))


def _version(answer: Any) -> str:
    """Return the server's version of a file, from its headers."""
    said = (answer.headers.get(name) for name in ("ETag", "Last-Modified"))
    return " ".join(str(one) for one in said if one)


# Objects in buckets, through fsspec's file systems: s3fs for all servers that speak S3, and gcsfs.
#
# Their libraries take endpoint and credentials from the environment: AWS_PROFILE, AWS_ACCESS_KEY_ID,
# AWS_ENDPOINT_URL and so on; GOOGLE_APPLICATION_CREDENTIALS.

_S3 = "s3"
_PIECE = 2**25  # bytes of a part of an upload

_PATIENCE = {"read_timeout": SILENCE, "connect_timeout": 10}
# Only one layer repeats requests. For parts of an upload it is botocore, which knows which part failed.
_READING = {
    _S3: {
        "config_kwargs": {
            **_PATIENCE,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": MOST,
        }
    }
}
_WRITING = {
    _S3: {
        "max_concurrency": 4,  # parts of a file at once, in memory
        "config_kwargs": {**_PATIENCE, "retries": {"total_max_attempts": 5}},
    }
}
# Keys of the version; a listing and a question about one file must give the same.
_VERSIONS = ("generation", "ETag", "etag")


class ObjectServer:
    """The files of buckets; a path is the bucket and the key.

    Raises:
        InputError: the file system's package is not installed.
    """

    def __init__(self, scheme: str, *, writing: bool = False) -> None:
        self._scheme = scheme
        self._system = _file_system(scheme, writing=writing)
        self.loop = self._system.loop

    def inside(self, folder: str, name: str) -> str:
        return f"{folder}/{name}"

    def shown(self, path: str) -> str:
        return f"{self._scheme}://{path}"

    async def stat(self, path: str) -> FileStat:
        info: Mapping[str, Any] = await self._system._info(path, refresh=True)
        if info.get("type") != "file":
            raise FileNotFoundError(path)
        return _stat_of_object(info)

    async def listed(self, folder: str) -> Mapping[str, FileStat | None]:
        """Return the entries of a folder by name; None stands for a folder. A missing folder is empty."""
        try:
            entries: Sequence[Mapping[str, Any]] = await self._system._ls(
                folder, detail=True, refresh=True
            )
        except FileNotFoundError:
            return {}
        found: dict[str, FileStat | None] = {}
        for entry in entries:
            where, _, name = str(entry["name"]).rstrip("/").rpartition("/")
            if where == folder:  # not the folder's own marker
                found[name] = _stat_of_object(entry) if entry["type"] == "file" else None
        return found

    async def fetch(self, path: str, target: memoryview, offset: int, stat: FileStat) -> None:
        end = offset + len(target)
        if self._scheme == _S3 and stat.version:
            data = await self._of_version(path, offset, end, stat.version)
        else:  # generation numbers are never used again: `stat` has the next one
            data = await self._system._cat_file(path, start=offset, end=end)
        if len(data) != len(target):
            raise OSError(f"sent {len(data)} bytes of {len(target)}")
        target[:] = data

    async def _of_version(self, path: str, start: int, end: int, version: str) -> bytes:
        """Read a range if the object still has an ETag, which s3fs's own call does not check."""
        bucket, key, _ = self._system.split_path(path)
        answer: Any = await self._system._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{end - 1}",
            IfMatch=f'"{version}"',
        )
        async with answer["Body"] as body:
            return await body.read()

    async def send(self, file: Path, path: str) -> None:
        """Send a file; it appears once all of it is sent."""
        await self._system._put_file(str(file), path, chunksize=_PIECE)

    async def claim(self, path: str, content: bytes) -> None:
        """Create a small file if there is none.

        Raises:
            FileExistsError: there is one.
        """
        await self._system._pipe_file(path, content, mode="create")

    async def remove(self, path: str) -> None:
        """Remove a file; it need not exist."""
        with suppress(FileNotFoundError):
            await self._system._rm_file(path)


Server = PageServer | ObjectServer


def _stat_of_object(info: Mapping[str, Any]) -> FileStat:
    size = info.get("size")
    if not isinstance(size, int) or size < 0:
        raise RefusedError("the server does not say how long it is")
    said = (str(info[key]).strip('"') for key in _VERSIONS if info.get(key))
    return FileStat(size, next(said, ""))


def _file_system(scheme: str, *, writing: bool) -> Any:
    try:
        fsspec: Any = import_module("fsspec")
        system = fsspec.filesystem(
            scheme,
            use_listings_cache=False,
            **(_WRITING if writing else _READING).get(scheme, {}),
        )
    except ImportError as error:
        extra = "gs" if scheme == "gs" else "remote"
        raise InputError(
            f"{scheme}:// takes further packages: pip install 'covmerge[{extra}]' ({error})"
        ) from None
    system.retries = 1  # retries of s3fs itself
    return system
