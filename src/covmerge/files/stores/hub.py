"""A repository of the Hugging Face Hub as a store: listed by its API, read by ranges over HTTP.

Sessions, credentials, endpoint and retries are those of the Hub's client, huggingface_hub. It is an
optional dependency that only this file and `front/publish.py` import.
"""

# The client's signatures have bare dicts, which strict checking reports at each import.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import errno
import glob
import json
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from covmerge.base.errors import CheckpointError
from covmerge.files.stores.hub_cache import is_commit
from covmerge.files.stores.store import Opened, Stamp

TIMEOUT = 30.0  # seconds without a byte

# Ends of names of the files beside weights: config, tokenizer, index.
COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_AHEAD = 100_000  # bytes: enough for most files' headers in one request
_MOST_OF_A_CARD = 100_000_000
_MOST_TOLD = 10_000_000  # bytes of the API's answer about a repository: some 40,000 files
_MOST_COMPANIONS = 2000  # the client compares each of them with every file of the repository


def is_offline(source: str) -> bool:
    """Return whether the client is set (`HF_HUB_OFFLINE`) to use only its cache.

    Raises:
        CheckpointError: the client is not installed.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(
            f"no such file or folder: {source}. If it is a model of the Hugging Face Hub: "
            "pip install covmerge[hub]"
        ) from error
    return constants.HF_HUB_OFFLINE


def cached_snapshot(source: str, name: str, revision: str | None) -> Path:
    """Return the folder of a repository's snapshot in the cache; its name is the commit."""
    from huggingface_hub import snapshot_download

    with _named_errors(source, name, revision):
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=["config.json"], local_files_only=True
            )
        )


@dataclass(frozen=True, eq=False)
class HubStore:
    """The files of one commit, which fixes every byte; the store is read-only.

    A branch is resolved once (`find`), so that a push meanwhile cannot mix two commits.
    """

    source: str  # the source as the user wrote it, for errors
    name: str  # `org/name`
    commit: str  # the full hash
    sizes: Mapping[str, int]  # size of each file in bytes, by name
    prefix: str = ""  # the folder of the repository that the store shows, with its `/`

    folder = None

    def __str__(self) -> str:
        return f"{self.source}/{self.prefix}".removesuffix("/")

    @classmethod
    def find(cls, source: str, name: str, revision: str | None) -> HubStore:
        """Return the store of a branch, tag or commit (None: the default branch), after asking the Hub."""
        with _named_errors(source, name, revision):
            answer = _told(source, name, revision)
        try:
            about: Any = json.loads(answer)
            commit: Any = about["sha"]
            sizes: dict[Any, Any] = {file["rfilename"]: file["size"] for file in about["siblings"]}
            whole = all(isinstance(file, str) for file in sizes) and all(
                isinstance(size, int) and size >= 0 for size in sizes.values()
            )
        except (ValueError, TypeError, LookupError, RecursionError):  # the answer may be anything
            commit, sizes, whole = None, {}, False
        if not (isinstance(commit, str) and is_commit(commit) and whole):
            raise CheckpointError(
                f"{source}: the Hub did not say which commit or which sizes its files have: "
                "download the model and pass its folder"
            )
        store = cls(source, name, commit, sizes)
        if len(store.companions()) > _MOST_COMPANIONS:
            raise CheckpointError(
                f"{source} has {len(store.companions())} files beside its weights, and more than "
                f"{_MOST_COMPANIONS} are not fetched: download what is needed and pass its folder"
            )
        return store

    def where(self, name: str) -> str:
        return f"{self.source}: {self.prefix}{name}"

    def names(self) -> list[str]:
        return [name for name in self.sizes if "/" not in name]

    def folders(self) -> list[str]:
        return list(dict.fromkeys(name.partition("/")[0] for name in self.sizes if "/" in name))

    def check(self, name: str) -> None:
        if name not in self.names():
            raise CheckpointError(
                f"{self.source} has no file '{name}', which its index names: the repository is "
                "incomplete"
            )

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        del follow  # a repository has no links
        return name in self.sizes

    def stamp(self, name: str) -> Stamp:
        """See `Store.stamp`; everything but the size follows from the commit."""
        if name not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.sizes[name], zlib.crc32(self.commit.encode()), 0

    def open(self, name: str, *, follow: bool = True) -> _Ranges:
        """See `Store.open`; no request is made yet."""
        del follow  # a repository has no links
        return _Ranges(self, name, self.stamp(name))

    def inside(self, folder: str) -> HubStore:
        prefix = f"{folder}/" if folder else ""
        sizes = {k.removeprefix(prefix): v for k, v in self.sizes.items() if k.startswith(prefix)}
        return replace(self, sizes=sizes, prefix=f"{self.prefix}{prefix}")

    def companions(self) -> tuple[str, ...]:
        """Return the names of the files needed beside the weights: config, tokenizer, index."""
        return tuple(name for name in self.sizes if name.endswith(COMPANIONS))

    def card(self, name: str) -> Path:
        """Download one small file into the client's cache."""
        from huggingface_hub import hf_hub_download

        if self.sizes[name] > _MOST_OF_A_CARD:
            raise CheckpointError(
                f"{self.where(name)} has {self.sizes[name]} bytes, which no such file needs to "
                "have: is it the right repository?"
            )
        with _named_errors(self.source, self.name, self.commit):
            return Path(hf_hub_download(self.name, f"{self.prefix}{name}", revision=self.commit))

    def download(self, names: tuple[str, ...]) -> Path:
        """Download those files that the client's cache lacks, and return their folder."""
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(f"{self.prefix}{name}") for name in names]
        with _named_errors(self.source, self.name, self.commit):
            snapshot = snapshot_download(self.name, revision=self.commit, allow_patterns=patterns)
        folder = Path(snapshot) / self.prefix
        # If the Hub refuses or is down, the client silently returns what the cache has.
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.source}: the Hub did not give {len(missing)} of {len(names)} files, "
                f"{missing[0]} among them: check the connection and `hf auth whoami`, and start "
                "again"
            )
        for name in names:
            self._check_whole(name, folder / name)
        return folder

    def _check_whole(self, name: str, path: Path) -> None:
        """Check that a file in the client's cache has the Hub's size; the client keeps shorter ones."""
        size = path.stat().st_size
        if size != self.sizes[name]:
            raise CheckpointError(
                f"{self.where(name)} has {self.sizes[name]} bytes, and the client's cache holds {size}: "
                f"delete {path.resolve()} and start again"
            )

    def fetch(self, name: str, offset: int, count: int) -> bytes:
        """Fetch `count` bytes of a file, and read no further even if the server ignores ranges."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name, f"{self.prefix}{name}", revision=self.commit)
        wanted = {"Range": f"bytes={offset}-{offset + count - 1}"}
        found = bytearray()
        with (
            _named_errors(self.source, self.name, self.commit),
            _answer(url, wanted) as response,
        ):
            before = 0 if _is_range(response, offset) else offset
            for chunk in response.iter_bytes():
                found += chunk[before:]
                before = max(0, before - len(chunk))
                if len(found) >= count:
                    break
        if len(found) < count:
            raise CheckpointError(
                f"{self.source}: the Hub sent {len(found)} bytes of {name} where {count} were "
                "asked for: try again"
            )
        return bytes(found[:count])


class _Ranges(Opened):
    """A file that is read by requests. Small reads read ahead, large ones do not."""

    def __init__(self, store: HubStore, name: str, stamp: Stamp) -> None:
        self._store = store
        self._name = name
        self._start, self._held = 0, b""
        self.stamp = stamp

    def read_at(self, target: memoryview, offset: int) -> int:
        wanted = min(len(target), max(0, self.stamp[0] - offset))
        if not wanted:
            return 0
        if not self._start <= offset < self._start + len(self._held):
            count = min(max(wanted, _AHEAD), self.stamp[0] - offset)
            self._start, self._held = offset, self._store.fetch(self._name, offset, count)
        begin = offset - self._start
        found = memoryview(self._held)[begin : begin + wanted]
        target[: len(found)] = found
        return len(found)


def _told(source: str, name: str, revision: str | None) -> bytes:
    """Return the API's answer about a repository; the client would accept an answer of any length."""
    from huggingface_hub import constants
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)
    of = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    url = f"{constants.ENDPOINT}/api/models/{name}{of}"
    answer = bytearray()
    with _answer(url, {}, params={"blobs": True}, max_retries=0) as response:  # a user is waiting
        for chunk in response.iter_bytes():
            answer += chunk
            if len(answer) > _MOST_TOLD:
                raise CheckpointError(
                    f"{source}: the Hub tells more than {_MOST_TOLD} bytes of its files: download what is "
                    "needed and pass its folder"
                )
    return bytes(answer)


@contextmanager
def _answer(url: str, headers: Mapping[str, str], **options: Any) -> Generator[Any]:
    """Ask the Hub; with an encoding, a range would be one of compressed bytes."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    wanted = {**build_hf_headers(), "Accept-Encoding": "identity", **headers}
    with http_stream_backoff("GET", url, headers=wanted, timeout=TIMEOUT, **options) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        yield response


def _is_range(response: Any, offset: int) -> bool:
    """Return whether an answer is the requested range, rather than the whole file.

    Raises:
        ValueError: the answer is another range.
    """
    if response.status_code != 206:
        return False
    sent = str(response.headers.get("Content-Range", ""))
    if not sent.startswith(f"bytes {offset}-"):
        raise ValueError(f"asked for bytes from {offset}, sent was the range {sent!r}")
    return True


@contextmanager
def _named_errors(source: str, name: str, revision: str | None) -> Generator[None, None, None]:
    """Turn errors of the Hub's client into errors that name the repository and the next step."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except CheckpointError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"{source} is gated: accept its terms at {hub}/{name}, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{source} is no file or folder here, and {hub} has no model {name}, or not for you: "
            "correct the name, or log in with `hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{source}: {name} on {hub} has no revision '{revision}': correct it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{source} is not in the cache {constants.HF_HUB_CACHE}, and {hub} was not or could "
            f"not be asked: run `hf download {name}` where there is a connection, or name the "
            f"commit that is in the cache, {name}@<commit>"
        ) from error
    except Exception as error:  # the client's transport, and so its errors, change between versions
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{source} is no file or folder here, and could not be read from {hub} "
            f"({type(error).__name__}: {reason}): correct the path, check the connection, or set "
            "HF_HUB_OFFLINE=1 to use the copy in the cache"
        ) from error
