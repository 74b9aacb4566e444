"""An output in a bucket: a server in a process beside the campaign, which goes wrong as it is told to."""

from __future__ import annotations

import ctypes
import hashlib
import http.client
import mmap
import os
import re
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from tests.campaigns.scenes import Scene
from tests.remote.servers import KEYS, App, quiet_handler, s3, status

NAME = "bucket"
CLAIM = ".covmerge-upload.json"
_MANIFEST = "covmerge.json"
_LAST = ("config.json", "adapter_config.json", "model.safetensors.index.json")  # before it
_NEVER = 2**62
_LATE = 0.2  # seconds that a slow answer takes
_SILENT = 3.0  # and one that does not come
_HELD = 60.0  # after which what is held goes on
_CONTROL = "X-Campaign"  # a header of the campaign's own requests, which are done right
_SIGNED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"  # moto does not look

# What becomes of a request, which is done only where the name says so.
PASSING = (
    *("500 Internal Server Error", "503 Slow Down", "429 Too Many Requests", "cut", "silent"),
    *("done, and cut", "done, and half an answer", "done, and slow"),
)
REFUSED = ("403 Forbidden", "401 Unauthorized")
# Of what lies in a bucket and is read. `OTHER` has the files of another version, under their own names.
CHANGES = ("objects are others", "objects are gone", "a listing lacks one")
OTHER, _GONE = "other", "gone"
HELD, HELD_DONE = "held", "done, and held"
_KINDS = (*PASSING, *REFUSED, *CHANGES, HELD, HELD_DONE)


class Bucket:
    """A bucket of moto's server; `wrong` says from which request on it does what, and how often.

    Attributes:
        url: of the server.
    """

    def __init__(self) -> None:
        # Requests so far; the first that goes wrong, how many do, and how; is one held; may it go on.
        self._shared = mmap.mmap(-1, 6 * 8)
        self._lock = threading.Lock()
        self.right()
        ours, theirs = os.pipe()
        sys.stdout.flush()
        self._server = os.fork()
        if self._server == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the campaign
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                self._serve(theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        self._port = int(os.read(ours, 9))
        os.close(ours)
        self.url = f"http://127.0.0.1:{self._port}"
        self.make()

    @property
    def requests(self) -> int:
        """How many there were since `right` or `wrong`."""
        return self._get(0)

    @property
    def held(self) -> bool:
        """Whether a request waits for `go_on`."""
        return bool(self._get(4))

    def wrong(self, first: int, count: int | None, how: str) -> None:
        """Let requests be done wrong from one on, 0 the next one; None: all of them."""
        most = _NEVER if count is None else count
        self._shared[:] = struct.pack("<6Q", 0, first, most, _KINDS.index(how), 0, 0)

    def right(self) -> None:
        """Let all requests be done right, and what is held go on."""
        self._shared[:] = struct.pack("<6Q", 0, _NEVER, 0, 0, 0, 1)

    def contents(self, folder: str) -> dict[str, bytes]:
        """The files below a folder, by name."""
        listed = self._ask("GET", f"/{NAME}?list-type=2&prefix={folder}/")
        names = [unquote(own) for own in re.findall(r"<Key>(.*?)</Key>", listed.decode())]
        return {
            name.removeprefix(f"{folder}/"): self._ask("GET", f"/{NAME}/{quote(name)}")
            for name in names
        }

    def empty(self) -> None:
        """Remove all files."""
        for name in re.findall(r"<Key>(.*?)</Key>", self._ask("GET", f"/{NAME}").decode()):
            self._ask("DELETE", f"/{NAME}/{name}")

    def make(self) -> None:
        """Make the bucket, where it is not there."""
        self._ask("PUT", f"/{NAME}")

    def put(self, name: str, content: bytes) -> None:
        """Store a file."""
        self._ask("PUT", f"/{NAME}/{quote(name)}", content)

    def vanish(self) -> None:
        """Remove it with all files."""
        self.empty()
        self._ask("DELETE", f"/{NAME}")

    def close(self) -> None:
        """End the server."""
        os.kill(self._server, signal.SIGKILL)
        os.waitpid(self._server, 0)

    def _get(self, place: int) -> int:
        return struct.unpack_from("<Q", self._shared, 8 * place)[0]

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("<Q", self._shared, 8 * place, value)

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        asked = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        asked.request(method, path, content, {_CONTROL: "1", "Authorization": _SIGNED})
        answer = asked.getresponse()
        body = answer.read()
        asked.close()
        if answer.status >= 400 and answer.status != 409:  # it is there
            raise OSError(f"{method} {path}: {answer.status} {body[:200]!r}")
        return body

    def _serve(self, told: int) -> None:
        from werkzeug.serving import make_server

        right = s3()

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            own = "HTTP_" + _CONTROL.upper().replace("-", "_") in environ
            return right(environ, start) if own else self._answer(right, environ, start)

        server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=quiet_handler())
        os.write(told, str(server.server_port).encode())
        os.close(told)
        server.serve_forever(0.02)

    def _answer(
        self, right: App, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        with self._lock:
            number = self._get(0)
            self._set(0, number + 1)
        first, most = self._get(1), self._get(2)
        how = _KINDS[self._get(3)] if first <= number < first + most else None
        if how is None:
            return right(environ, start)
        if how in CHANGES:
            return _changed(how, right, environ, start)
        if how[0].isdigit():
            return status(how)(right, environ, start)
        if how == "silent":
            time.sleep(_SILENT)
        if how in ("silent", "cut"):
            _cut(environ)
        if how == HELD:
            self._hold()
            return right(environ, start)
        body = b"".join(right(environ, start))
        if how == HELD_DONE:
            self._hold()
        if how == "done, and slow":
            time.sleep(_LATE)
        if how == "done, and cut":
            _cut(environ)
        return _halved(body, environ) if how == "done, and half an answer" else [body]

    def _hold(self) -> None:
        self._set(4, 1)
        end = time.monotonic() + _HELD
        while not self._get(5) and time.monotonic() < end:
            time.sleep(0.002)


class StoredScene(Scene):
    """A scene whose output lies in a bucket; `out` is a copy of it, made by `look`.

    The work lies where the outputs of others do, on a disk of its own perhaps.

    Attributes:
        bucket: where it lies.
    """

    def __init__(self, name: str, folder: Path, place: Path, bucket: Bucket) -> None:
        super().__init__(name, folder, place)
        self.bucket = bucket
        self.target = f"s3://{NAME}/out"
        self._caches = [place / "cache", place / "elsewhere"]
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": bucket.url}
        self.environment["COVMERGE_CACHE"] = str(self._caches[0])
        self.elsewhere = {**self.environment, "COVMERGE_CACHE": str(self._caches[1])}
        digest = hashlib.sha256(self.target.encode()).hexdigest()[:32]
        self.partial = self._caches[0] / "uploads" / digest / ".merged.covmerge-partial"
        (folder / "seen").mkdir()
        self.out = folder / "seen" / "out"
        self._there: dict[str, bytes] = {}

    def look(self) -> None:
        """Copy the output, if there is one."""
        self._there = self.bucket.contents("out")
        shutil.rmtree(self.out, ignore_errors=True)
        if _MANIFEST in self._there:
            for name, content in self._there.items():
                if name != CLAIM:
                    (self.out / name).parent.mkdir(parents=True, exist_ok=True)
                    (self.out / name).write_bytes(content)

    def strange(self) -> str | None:
        """See `Scene.strange`: of an output on its way whole files, what makes a model of it last."""
        if _MANIFEST in self._there or not self._there:
            return None
        if CLAIM not in self._there:
            return f"{sorted(self._there)} without {CLAIM} or {_MANIFEST}"
        found = {
            name: hashlib.sha256(content).hexdigest()
            for name, content in self._there.items()
            if name != CLAIM
        }
        for known in (self.expected, self.changed):
            if found.items() <= known.items():
                lacks = {name for name in known if name.endswith(".safetensors")} - found.keys()
                early = [name for name in _LAST if name in found] if lacks else []
                return f"{early} before {sorted(lacks)}" if early else None
        return f"not of one output: {sorted(found)}"

    def left(self) -> bool:
        """See `Scene.left`."""
        return CLAIM in self._there or self.partial.parent.exists()

    def clear(self) -> None:
        """Remove the output and the work on it."""
        super().clear()
        for folder in self._caches:
            shutil.rmtree(folder, ignore_errors=True)
        self.bucket.right()
        self.bucket.make()
        self.bucket.empty()
        self._there = {}


def _changed(
    how: str, right: App, environ: dict[str, Any], start: Callable[..., Any]
) -> Iterable[bytes]:
    """What is answered of objects that were changed meanwhile."""
    _, bucket, *inner = environ["PATH_INFO"].split("/")
    lists = "list-type=2" in environ["QUERY_STRING"]
    if how == CHANGES[2]:
        body = b"".join(right(environ, start))
        return [
            re.sub(rb"(.*)<Contents>.*?</Contents>", rb"\1", body, flags=re.S) if lists else body
        ]
    if inner:
        named = OTHER if how == CHANGES[0] else _GONE
        environ["PATH_INFO"] = "/".join(("", bucket, named, *inner[1:]))
    elif how == CHANGES[1] and lists:
        environ["QUERY_STRING"] = re.sub("prefix=[^&]*", f"prefix={_GONE}", environ["QUERY_STRING"])
    return right(environ, start)


def _cut(environ: dict[str, Any]) -> NoReturn:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def _halved(body: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    _cut(environ)
