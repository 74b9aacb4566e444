"""A Hugging Face Hub of one repository, over real HTTP on this machine: read, and written to."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from huggingface_hub import close_session, constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/name"
REVISIONS = ("main", "v1", "refs/pr/1", COMMIT)
SILENT = 2.5  # seconds that an answer takes which does not come
WRITER, READER = "hf_writer", "hf_reader"  # tokens: one may write, the other not


@dataclass(frozen=True)
class Commit:
    """What one commit brought."""

    branch: str
    message: str
    files: dict[str, bytes]


@dataclass
class Hub:
    """The server's side of the tests: what it holds and what it was asked for.

    Attributes:
        files: content by file name.
        ranges: whether Range headers are honoured.
        shifted: bytes by which what is sent lies behind what was asked for.
        gated: whether everything is refused as for a gated repository.
        sent: bytes of content sent, by file name.
        listed: sizes that the API announces where they are not the true ones.
        exists: whether the repository is there.
        private: whether it is private.
        full: whether there is no room for large files.
        revisions: branches, tags and commits that it has.
        commits: what was committed, in order.
        stored: content of large files by hash, uploaded but perhaps not committed.
        wrong: what is done wrong of each request, in their order; "": nothing.
        url: the endpoint.
    """

    files: dict[str, bytes]
    ranges: bool = True
    shifted: int = 0
    gated: bool = False
    sent: dict[str, int] = field(default_factory=dict)
    listed: dict[str, int] = field(default_factory=dict)
    exists: bool = True
    private: bool = False
    full: bool = False
    revisions: set[str] = field(default_factory=lambda: set(REVISIONS))
    commits: list[Commit] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    wrong: Iterator[str] = field(default_factory=lambda: repeat(""))
    url: str = ""
    lock: Lock = field(default_factory=Lock)

    def size(self, name: str) -> int:
        return self.listed.get(name, len(self.files[name]))

    def info(self) -> dict[str, object]:
        siblings = [
            {"rfilename": name, "size": self.size(name), "blobId": _etag(data)}
            for name, data in self.files.items()
        ]
        return {
            "id": REPOSITORY,
            "sha": COMMIT,
            "private": self.private,
            "siblings": siblings,
            "tags": [],
        }

    def count(self, name: str, size: int) -> None:
        with self.lock:
            self.sent[name] = self.sent.get(name, 0) + size


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    _wrong = ""
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def parse_request(self) -> bool:
        """Read the head of a request; one that is to be refused goes no further."""
        if not super().parse_request():
            return False
        with self.hub.lock:
            self._wrong = next(self.hub.wrong, "")
        if not self._wrong or self._wrong.startswith("done"):
            return True
        if self._wrong[0].isdigit():
            self._body()
            status, self._wrong = int(self._wrong[:3]), ""
            self._refuse(status, "")
        elif self._wrong == "silent":
            time.sleep(SILENT)
        self.close_connection = True
        return False

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if not self.hub.exists:
            return self._refuse(404, "RepoNotFound")
        if path.startswith(f"api/models/{REPOSITORY}"):
            return self._api(path.removeprefix(f"api/models/{REPOSITORY}").strip("/"))
        if path.startswith(f"{REPOSITORY}/resolve/"):
            return self._resolve(path.removeprefix(f"{REPOSITORY}/resolve/"))
        return self._refuse(404, "RepoNotFound")

    def _api(self, path: str) -> None:
        kind, _, revision = path.partition("/")
        if kind and revision not in self.hub.revisions:
            return self._refuse(404, "RevisionNotFound")
        if kind == "tree":
            return self._json(
                [
                    {"type": "file", "path": name, "size": self.hub.size(name), "oid": _etag(data)}
                    for name, data in self.hub.files.items()
                ]
            )
        return self._json(self.hub.info())

    def _resolve(self, path: str) -> None:
        revision = next((r for r in self.hub.revisions if path.startswith(f"{r}/")), None)
        if revision is None:
            return self._refuse(404, "RevisionNotFound")
        name = path.removeprefix(f"{revision}/")
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound")
        data, status, extra = self.hub.files[name], 200, {}
        wanted = self.headers.get("Range")
        if wanted and self.hub.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin = int(first) + self.hub.shifted
            end = min(int(last) if last else len(data), len(data) - 1)
            extra = {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}
            data, status = data[begin : end + 1], 206
        head = {"ETag": f'"{_etag(self.hub.files[name])}"', "X-Repo-Commit": COMMIT, **extra}
        self._send(status, data, {"Accept-Ranges": "bytes", **head}, name)

    def do_PUT(self) -> None:
        """Take a large file; its address is its hash, as the answer to a batch says."""
        oid = self.path.removeprefix("/lfs/")
        content = self._body()
        if self.hub.full:
            return self._refuse(403, "", "over the quota")
        if hashlib.sha256(content).hexdigest() != oid:
            return self._refuse(400, "WrongHash")
        self.hub.stored[oid] = content
        return self._json({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path).strip("/"), self._body()
        if path == "api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            return self._refuse(401, "", "Invalid username or password.")
        if token == READER:
            return self._refuse(403, "", "you have no write access to it")
        if path == "api/repos/create":
            return self._create(json.loads(body))
        if path == f"{REPOSITORY}.git/info/lfs/objects/batch":
            return self._json(self._batch(json.loads(body)))
        kind, _, branch = path.removeprefix(f"api/models/{REPOSITORY}/").partition("/")
        if kind == "branch":
            self.hub.revisions.add(branch)
            return self._json({})
        if branch not in self.hub.revisions:
            return self._refuse(404, "RevisionNotFound")
        if kind == "preupload":
            return self._json(_upload_modes(json.loads(body)))
        assert kind == "commit", path
        return self._commit(branch, [json.loads(line) for line in body.splitlines()])

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _validate(self, card: str) -> None:
        metadata = yaml.safe_load(card.split("---")[1])
        if metadata.get("license") == "nonsense":
            errors = {"errors": [{"message": '"license" must be one of the known ones'}]}
            return self._json(errors, 400)
        return self._json({})

    def _create(self, wanted: dict[str, str]) -> None:
        if wanted["organization"] != "org":
            return self._refuse(403, "", f"no rights in the namespace {wanted['organization']}")
        if self.hub.exists:
            return self._json({"url": f"{self.hub.url}/{REPOSITORY}"}, 409)
        self.hub.exists = True
        self.hub.private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        return self._json({"url": f"{self.hub.url}/{REPOSITORY}"})

    def _batch(self, wanted: dict[str, list[dict[str, object]]]) -> dict[str, object]:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
            for each in wanted["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, branch: str, lines: list[dict[str, dict[str, str]]]) -> None:
        header, *entries = lines
        files = {}
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.stored[value["oid"]]
        self.hub.files.update(files)
        self.hub.commits.append(Commit(branch, header["value"]["summary"], files))
        oid = f"{len(self.hub.commits):040x}"
        url = f"{self.hub.url}/{REPOSITORY}/commit/{oid}"
        return self._json({"success": True, "commitOid": oid, "commitUrl": url})

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"}, None)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message}
        told = {key: value for key, value in told.items() if value}
        self._send(status, b"{}", {**told, "Content-Type": "application/json"}, None)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str | None) -> None:
        self.close_connection |= bool(self._wrong)
        if self._wrong == "done, and cut":
            return
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        body = body[: len(body) // 2] if self._wrong == "done, and half an answer" else body
        if self.command == "HEAD":
            return
        try:
            for begin in range(0, len(body), 2**16):
                chunk = body[begin : begin + 2**16]
                if name is not None:  # before: whoever has read it may ask at once
                    self.hub.count(name, len(chunk))
                self.wfile.write(chunk)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client had enough


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _upload_modes(wanted: dict[str, list[dict[str, str]]]) -> dict[str, object]:
    """Weights are stored as large files, the rest in the repository itself."""
    return {
        "files": [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for each in wanted["files"]
        ]
    }


def connect(
    monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: Path, token: str | None = None
) -> None:
    """Have the real client talk to this Hub alone, and keep what it fetches in a folder.

    Args:
        monkeypatch: of the test.
        hub: the Hub.
        cache: the client's cache.
        token: what it is logged in with; None: as nobody.
    """
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Its own store for large files speaks another protocol; without it they go over HTTP.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", token is None)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)


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
        close_session()  # the client's connections
        server.shutdown()
        thread.join()
        server.server_close()
