"""A Hugging Face Hub of one repository, over real HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/name"
REVISIONS = {"main", "v1", "refs/pr/1", COMMIT}


@dataclass
class Hub:
    """The server's side of the tests: what it holds and what it was asked for.

    Attributes:
        files: content by file name.
        ranges: whether Range headers are honoured.
        gated: whether everything is refused as for a gated repository.
        sent: bytes of content sent, by file name.
        listed: sizes that the API announces where they are not the true ones.
        url: the endpoint.
    """

    files: dict[str, bytes]
    ranges: bool = True
    gated: bool = False
    sent: dict[str, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    url: str = ""
    lock: Lock = field(default_factory=Lock)

    def size(self, name: str) -> int:
        return self.listed.get(name, len(self.files[name]))

    def count(self, name: str, size: int) -> None:
        with self.lock:
            self.sent[name] = self.sent.get(name, 0) + size


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if path.startswith(f"api/models/{REPOSITORY}"):
            return self._api(path.removeprefix(f"api/models/{REPOSITORY}").strip("/"))
        if path.startswith(f"{REPOSITORY}/resolve/"):
            return self._resolve(path.removeprefix(f"{REPOSITORY}/resolve/"))
        return self._refuse(404, "RepoNotFound")

    def _api(self, path: str) -> None:
        kind, _, revision = path.partition("/")
        if kind and revision not in REVISIONS:
            return self._refuse(404, "RevisionNotFound")
        if kind == "tree":
            return self._json(
                [
                    {"type": "file", "path": name, "size": self.hub.size(name), "oid": _etag(data)}
                    for name, data in self.hub.files.items()
                ]
            )
        siblings = [
            {"rfilename": name, "size": self.hub.size(name), "blobId": _etag(data)}
            for name, data in self.hub.files.items()
        ]
        return self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _resolve(self, path: str) -> None:
        revision = next((r for r in REVISIONS if path.startswith(f"{r}/")), None)
        if revision is None:
            return self._refuse(404, "RevisionNotFound")
        name = path.removeprefix(f"{revision}/")
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        data, status, extra = self.hub.files[name], 200, {}
        wanted = self.headers.get("Range")
        if wanted and self.hub.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) if last else len(data), len(data) - 1)
            extra = {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}
            data, status = data[begin : end + 1], 206
        head = {"ETag": f'"{_etag(self.hub.files[name])}"', "X-Repo-Commit": COMMIT, **extra}
        self._send(status, data, {"Accept-Ranges": "bytes", **head}, name)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, None)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"}, None)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str | None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for begin in range(0, len(body), 2**16):
                chunk = body[begin : begin + 2**16]
                self.wfile.write(chunk)
                if name is not None:
                    self.hub.count(name, len(chunk))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client had enough


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve the files of a folder as the repository `org/name`."""
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
