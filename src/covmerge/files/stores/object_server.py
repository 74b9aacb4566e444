"""Objects in buckets, as file systems of fsspec have them: s3fs for all that speaks as S3 does, and gcsfs.

Which endpoint is asked, and with whose credentials, their own libraries take from the environment:
AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on; GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from covmerge.base.errors import InputError
from covmerge.files.stores.address import Address
from covmerge.files.stores.link import MOST
from covmerge.files.stores.retries import RefusedError
from covmerge.files.stores.server import FileStat

_S3 = "s3"
SILENCE = 30  # seconds without a byte
_PIECE = 2**25  # bytes of a part of what is sent

_PATIENCE = {"read_timeout": SILENCE, "connect_timeout": 10}
# One layer makes requests again. Of parts that are sent it is botocore: it knows which.
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
# A listing and a question about one file must say the same.
_VERSIONS = ("generation", "ETag", "etag")


class ObjectServer:
    """Files of buckets; a path is the bucket and the key.

    Args:
        scheme: of the addresses, such as s3.
        writing: it is written to.

    Raises:
        InputError: the file system is not installed.
    """

    def __init__(self, scheme: str, *, writing: bool = False) -> None:
        self._scheme = scheme
        self._system = _file_system(scheme, writing=writing)
        self.loop = self._system.loop

    @classmethod
    def at(cls, address: Address, *, writing: bool = False) -> tuple[ObjectServer, str]:
        """Return the server of an address, and what it calls the place."""
        return cls(address.scheme, writing=writing), address.path

    def inside(self, folder: str, name: str) -> str:
        return f"{folder}/{name}"

    def shown(self, path: str) -> str:
        return f"{self._scheme}://{path}"

    async def stat(self, path: str) -> FileStat:
        info: Mapping[str, Any] = await self._system._info(path, refresh=True)
        if info.get("type") != "file":
            raise FileNotFoundError(path)
        return _stat(info)

    async def listed(self, folder: str) -> Mapping[str, FileStat | None]:
        """See `Server.listed`; a bucket or folder that there is not holds nothing."""
        try:
            entries: Sequence[Mapping[str, Any]] = await self._system._ls(
                folder, detail=True, refresh=True
            )
        except FileNotFoundError:
            return {}
        found: dict[str, FileStat | None] = {}
        for entry in entries:
            where, _, name = str(entry["name"]).rstrip("/").rpartition("/")
            if where == folder:  # not the marker of the folder itself
                found[name] = _stat(entry) if entry["type"] == "file" else None
        return found

    async def fetch(self, path: str, target: memoryview, offset: int, stat: FileStat) -> None:
        end = offset + len(target)
        if self._scheme == _S3 and stat.version:
            data = await self._of_version(path, offset, end, stat.version)
        else:  # the number of a generation never comes again: `stat` tells of the next one
            data = await self._system._cat_file(path, start=offset, end=end)
        if len(data) != len(target):
            raise OSError(f"sent {len(data)} bytes of {len(target)}")
        target[:] = data

    async def _of_version(self, path: str, start: int, end: int, version: str) -> bytes:
        """Read a range if the object still has an ETag, which s3fs's own call does not ask."""
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
        """Send a file, of which nothing is there before all of it is."""
        await self._system._put_file(str(file), path, chunksize=_PIECE)

    async def claim(self, path: str, content: bytes) -> None:
        """Make a small file where there is none.

        Raises:
            FileExistsError: there is one.
        """
        await self._system._pipe_file(path, content, mode="create")

    async def remove(self, path: str) -> None:
        """Remove a file; it need not be there."""
        with suppress(FileNotFoundError):
            await self._system._rm_file(path)


def _stat(info: Mapping[str, Any]) -> FileStat:
    size = info.get("size")
    if not isinstance(size, int) or size < 0:
        raise RefusedError("the server does not say how long it is")
    said = (str(info[key]).strip('"') for key in _VERSIONS if info.get(key))
    version = next(said, "")
    return FileStat(size, version)


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
    system.retries = 1  # s3fs's own
    return system
