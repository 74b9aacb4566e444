"""Servers on loopback: moto's S3, and files over HTTP; both do wrong what they are told to."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIASECRETSECRET",
    "AWS_SECRET_ACCESS_KEY": "verysecretverysecret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_CHUNK = 2**14

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Fault = Callable[[App, dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass
class Server:
    """A running server, what it was asked, and what it is to do wrong.

    Attributes:
        url: of it.
        requests: method, path and range of all so far.
        faults: by a pattern of "METHOD path", what is done instead, and how often.
    """

    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[tuple[str, Fault, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, pattern: str, fault: Fault, times: int = 1) -> None:
        """Do a number of requests wrong."""
        self.faults.append((pattern, fault, times))

    def app(self, right: App) -> App:
        """What answers: `right`, but for the faults."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            asked = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
            with self._lock:
                self.requests.append((*asked.split(" ", 1), environ.get("HTTP_RANGE", "")))
                found = next((f for f in self.faults if re.search(f[0], asked)), None)
                if found is not None:
                    self.faults.remove(found)
                    if found[2] > 1:
                        self.faults.append((*found[:2], found[2] - 1))
            return right(environ, start) if found is None else found[1](right, environ, start)

        return answer


def quiet_handler() -> type[WSGIRequestHandler]:
    """Handle requests as moto does, and say nothing."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: object) -> None: ...

    return Quiet


@contextmanager
def serving(app: App) -> Iterator[Server]:
    """Serve an application from a thread."""
    server = Server()
    running = make_server(
        "127.0.0.1", 0, server.app(app), threaded=True, request_handler=quiet_handler()
    )
    running.daemon_threads = True
    server.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def s3() -> App:
    """Moto's S3."""
    from moto.moto_server.werkzeug_app import create_backend_app

    return create_backend_app("s3")


def files(folder: Path, headers: dict[str, str] | None = None, ranges: bool = True) -> App:
    """The files of a folder, by ranges, with an ETag that is another after each change."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = folder / environ["PATH_INFO"].lstrip("/")
        if not path.is_file():
            start("404 Not Found", [("Content-Length", "0")])
            return []
        status = path.stat()
        size = status.st_size
        said = {"ETag": f'"{status.st_mtime_ns:x}"'} if headers is None else headers
        if ranges and (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))):
            first, last = int(asked[1]), min(int(asked[2]), size - 1)
            with path.open("rb") as file:
                file.seek(first)
                part = file.read(max(0, last + 1 - first))
            told = {"Content-Range": f"bytes {first}-{last}/{size}" if part else f"bytes */{size}"}
            code = "206 Partial Content" if part else "416 Range Not Satisfiable"
        else:
            part, told, code = path.read_bytes(), {}, "200 OK"
        start(code, [*{"Content-Length": str(len(part)), **told, **said}.items()])
        return [part]

    return answer


def status(code: str) -> Fault:
    """Answer by an error."""

    def fault(_: App, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(code, [("Content-Length", "0")])
        return []

    return fault


def cut(right: App, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Send half of the answer, and close the connection."""
    data = b"".join(right(environ, start))
    yield data[: len(data) // 2]
    raise ConnectionAbortedError


def late(seconds: float) -> Fault:
    """Send half of the answer, and the rest later."""

    def fault(right: App, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        data = b"".join(right(environ, start))
        yield data[: len(data) // 2]
        threading.Event().wait(seconds)
        yield data[len(data) // 2 :]

    return fault


@dataclass
class Narrow:
    """A link to a server, which answers so many requests at once.

    Attributes:
        latency: seconds until an answer begins.
        each: bytes a second of a connection.
        most: requests at once; what goes beyond is answered by status 503.
        peak: the most requests that were answered at once.
        refused: how many were answered by 503.
    """

    latency: float = 0.0
    each: float = float("inf")
    most: int = 1000
    peak: int = 0
    refused: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def app(self, right: App) -> App:
        """What answers over this link."""

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            time.sleep(self.latency)
            with self._lock:
                if self._now >= self.most:
                    self.refused += 1
                    return status("503 Slow Down")(right, environ, start)
                self._now += 1
                self.peak = max(self.peak, self._now)
            return self._sent(b"".join(right(environ, start)))

        return answer

    def _sent(self, data: bytes) -> Iterator[bytes]:
        began = time.monotonic()
        try:
            for offset in range(0, len(data), _CHUNK):
                chunk = data[offset : offset + _CHUNK]
                due = began + (offset + len(chunk)) / self.each
                time.sleep(max(0.0, due - time.monotonic()))
                yield chunk
        finally:
            with self._lock:
                self._now -= 1
