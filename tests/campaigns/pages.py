"""A web server, a bucket and a Hub that answer wrongly, as `answers.json` beside the files says.

    [{"file": "config.json", "first": 0, "do": "length", "with": "9"}]

is a rule: from the request `first` for the file on, the answer is the right one but for what is done.
Where the first entry is "s3" or "hub" there are also rules of the "listing". The server is a process of its
own, so that only what covmerge does is measured, and ends with it.
"""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import json
import os
import re
import signal
import socketserver
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from urllib.parse import unquote

from tests.campaigns import listings

REACHED: set[tuple[str, int]] = set()  # the server's address: what may be connected to
ANSWERS = "answers.json"
IN = "given"  # the folder that a store has

_PIECE = 1 << 16
_TAIL = 256  # bytes that are others where a file has changed
RULES: dict[str, tuple[Any, ...]] = {
    "status": (
        *("200 OK", "204 No Content", "206 Partial Content", "300 x", "301 Moved", "304 Same"),
        *("400 x", "401 x", "403 x", "404 x", "408 x", "412 x", "416 x", "418 x", "429 x"),
        *("500 x", "503 x", "599 x", "999 x", "abc", "-1 x", "", "200"),
    ),
    "location": (
        *("file:///etc/passwd", "FILE:/etc/passwd", "ftp://127.0.0.1/x", "data:,x", "//", "/", ""),
        *("http://127.0.0.2:9/x", "http://localhost:9/x", "http://[::1]:9/x", "http://0/x"),
        *("http://169.254.169.254/latest", "http://2130706434/x", "//127.0.0.2:9/x", "http://"),
        *("http://u:secret@127.0.0.2/", "http://127.0.0.2\\@127.0.0.1/", "?x", "{path}", "{path}?"),
        *(
            "http://127.0.0.1:99999/x",
            "http://127.0.0.1:x/",
            "http://[x/",
            "\x01",
            "/" + "a" * 7000,
        ),
        *("s3://bucket/x", "https://127.0.0.2/x", "HTTP://LOCALHOST.:9/x", "http://a@b@127.0.0.2/"),
    ),
    "length": ("-1", "0", "1", "+5", "x", "", "999999999999999999", "9" * 30, "7, 7", "0x10", None),
    "range": (
        *("bytes 0-0/{size}", "bytes 1-1/{size}", "bytes 0-0/999999999999999999", "bytes */0"),
        *("bytes 0-0/1", "bytes 0-0/*", "bytes */{size}", "bytes 9-0/{size}", "items 0-0/1", "x"),
        *("bytes 0-0/16777217", "bytes 0-9/" + "9" * 30, "", None),
    ),
    "encoding": (
        "gzip",
        "br",
        "deflate",
        "zstd",
        "identity",
        "identity, gzip",
        "x",
        "IDENTITY",
        "",
    ),
    "transfer": ("chunked", "gzip, chunked", "identity", "x", "chunked, chunked"),
    "type": ("text/html", "text/html; charset=\xff", "", "application/json"),
    "etag": ("", "changing", '"' + "x" * 7000 + '"', "\x01", 'W/"a"'),
    "modified": ("changing", "", "x" * 7000),
    "body": ("short", "empty", "longer", "endless", "other", "flipped", "zeros", "whole"),
    "chunks": (
        "right",
        "-1",
        "fffffffffffffffff",
        "zz",
        "endless size",
        "no end",
        "1;" + "x" * 9000,
    ),
    "headers": ("endless", "long", "many", "none", "early", "folded", "http/9", "ssh", "nul"),
    "slow": ("never", "head", "body"),
    "changed": ("values",),  # another file of the same size, under the version that it has
    "listing": tuple(listings.kinds()),
}
_STORES = ("s3", "hub")
_BUCKET = f"/{listings.BUCKET}"
_HUB = (f"/{listings.REPOSITORY}/", "/api/")
_RESOLVED = re.compile(rf"/{listings.REPOSITORY}/resolve/[0-9a-f]{{40}}/")
_HERE = ("/", "", "?x", "{path}", "{path}?")  # where a store may lead is its own matter


def draw(data: bytes, random: Random) -> bytes:
    """Return an `answers.json` with one more rule."""
    rules, store = _rules(data), _store(data)
    listed = store is not None and random.random() < 0.4
    do = "listing" if listed else random.choice([name for name in RULES if name != "listing"])
    few = do == "slow"  # each takes as long as one is waited for
    names = ("model.safetensors", "model.safetensors.index.json", "config.json", "README.md")
    names = (*names, "tokenizer.json", "a-00001-of-00001.safetensors")
    names = names if store is None else (*names, listings.LISTING, listings.LISTING)
    rules.append(
        {
            "file": "*" if listed else random.choice(names if few else ("*", *names * 2)),
            "first": random.choice((0, 0, 0, 1, 1, 2, 3, 5)),
            "do": do,
            "with": random.choice(_HERE if store and do == "location" else RULES[do]),
        }
    )
    return json.dumps(rules if store is None else [store, *rules]).encode()


def start(folder: Path) -> str:
    """Serve a folder, whatever will lie there, for as long as this process lives; return the address."""
    if not REACHED:
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with whoever forked it
                with _Server(("127.0.0.1", 0), _Handler) as server:
                    server.folder = folder
                    os.write(theirs, str(server.server_address[1]).encode())
                    os.close(theirs)
                    server.serve_forever()
            finally:
                os._exit(1)
        os.close(theirs)
        REACHED.add(("127.0.0.1", int(os.read(ours, 9))))
        os.close(ours)
    ((host, port),) = REACHED
    return f"http://{host}:{port}"


def changed(data: bytes) -> bytes:
    """Return a file with other values at its end."""
    return data[:-_TAIL] + bytes(own ^ 1 for own in data[-_TAIL:])


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64
    folder: Path
    said: ClassVar[dict[str, tuple[bytes, Counter[str]]]] = {}  # by folder, of these rules

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has gone, as it may."""


class _Handler(socketserver.StreamRequestHandler):
    server: _Server  # type: ignore[assignment]

    def handle(self) -> None:
        """Answer one request, and close."""
        asked = self.rfile.readline(1 << 16).split(b" ")
        told: dict[str, str] = {}
        while line := self.rfile.readline(1 << 16).strip():
            key, _, value = line.decode("latin-1").partition(":")
            told[key.lower()] = value.strip()
        path, _, query = asked[1].decode().partition("?")
        self._bare = asked[0] == b"HEAD"
        self._query = unquote(f"{path}?{query}")
        path = self._placed(unquote(path))
        self._answer(path, self._rules_of(path), told.get("range", ""))

    def _placed(self, path: str) -> str:
        """Where the file lies that is asked for; of a listing, where it would lie."""
        about = f"/api/models/{listings.REPOSITORY}"
        if path.startswith(about) or (path.startswith(_BUCKET) and "list-type=2" in self._query):
            return f"/{IN}/{listings.LISTING}"
        if path.startswith(_BUCKET):
            return path.removeprefix(_BUCKET) or "/"
        if found := _RESOLVED.match(path):
            return f"/{IN}/{path[found.end() :]}"
        return path

    def _rules_of(self, path: str) -> dict[str, Any]:
        """What is to be done wrong of a file, now."""
        folder, _, name = path.strip("/").partition("/")
        file = self.server.folder / folder / ANSWERS
        data = file.read_bytes() if file.is_file() else b"[]"
        before, asked = self.server.said.get(folder, (b"", Counter[str]()))
        if before != data:
            asked = Counter()
            self.server.said[folder] = data, asked
        asked[name] += 1
        due = {
            rule["do"]: rule["with"]
            for rule in _rules(data)
            if rule["file"] in ("*", name) and rule["first"] < asked[name]
        }
        # What the clients of buckets and Hubs do by themselves, which SECURITY.md says.
        if self._query.startswith((_BUCKET, *_HUB)) and due.get("location", "") not in _HERE:
            del due["location"]
        if self._query.startswith(_HUB):
            due = {do: own for do, own in due.items() if own not in ("early", "no end")}
        return due

    def _answer(self, path: str, rules: dict[str, Any], asked: str) -> None:
        data = self._content(path, rules.get("listing"))
        there, data = data is not None, data or b""
        data = changed(data) if "changed" in rules else data
        status, body, size = ("200 OK" if there else "404 x"), data, len(data)
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers: dict[str, Any] = {"ETag": etag, "Connection": "close"}
        if self._query.startswith(_HUB):
            headers["X-Repo-Commit"] = listings.commit(self.server.folder / IN)
        if there and (found := re.fullmatch(r"bytes=(\d+)-(\d+)", asked)):
            first = int(found[1])
            status, body = "206 Partial Content", data[first : int(found[2]) + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{size}"
        body = _body(rules.get("body"), body, data)
        headers["Content-Length"] = str(len(body))
        now = str(time.monotonic_ns())
        for key, header in (
            *(("length", "Content-Length"), ("range", "Content-Range"), ("type", "Content-Type")),
            *(("encoding", "Content-Encoding"), ("etag", "ETag"), ("modified", "Last-Modified")),
            *(("location", "Location"), ("transfer", "Transfer-Encoding")),
        ):
            if key in rules:
                own = rules[key]
                port = self.server.server_address[1]
                headers[header] = own and {"changing": now}.get(
                    own, own.format(size=size, path=path, port=port) if "{" in own else own
                )
        if "location" in rules:
            status = ("301 x", "302 x", "303 x", "307 x", "308 x")[size % 5]
        status = rules.get("status", status)
        if "encoding" in rules and "gzip" in str(rules["encoding"]):
            body = gzip.compress(b"\0" * (1 << 24)) if size % 2 else gzip.compress(body)
        if "chunks" in rules:
            del headers["Content-Length"]
            headers["Transfer-Encoding"] = "chunked"
            body = _chunked(rules["chunks"], body)
        lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
        self._send(status, lines, body, rules)

    def _content(self, path: str, wrong: str | None) -> bytes | None:
        """What a right answer holds; None: there is no such file."""
        folder = self.server.folder / IN
        if path == f"/{IN}/{listings.LISTING}":
            asked, _, query = self._query.partition("?")
            of_hub = asked.startswith("/api")
            return (
                listings.of_hub(folder, asked, wrong)
                if of_hub
                else listings.of_bucket(folder, query, wrong)
            )
        file = self.server.folder / path.lstrip("/")
        return file.read_bytes() if path.count("/") < 3 and file.is_file() else None

    def _send(self, status: str, lines: list[str], body: bytes, rules: dict[str, Any]) -> None:
        slow = rules.get("slow")
        if slow == "never":
            time.sleep(3)
            return
        odd = rules.get("headers")
        if odd in ("none", "ssh"):
            self.wfile.write(b"" if odd == "none" else b"SSH-2.0-x\r\n")
            return
        if odd == "early":  # answers before the answer
            self._endless(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        if odd in ("long", "nul", "folded"):
            lines += {"long": ["X: " + "x" * (1 << 20)], "nul": ["X: \0"], "folded": [" x", "\tx"]}[
                odd
            ]
        if odd == "many":
            lines += [f"X{n}: 1" for n in range(20_000)]
        version = "HTTP/9.9" if odd == "http/9" else "HTTP/1.1"
        head = "\r\n".join((f"{version} {status}", *lines)).encode("latin-1", "replace")
        if odd == "endless":
            self.wfile.write(head + b"\r\n")
            self._endless(b"X-More: x\r\n")
        head += b"\r\n\r\n"
        body = b"" if self._bare else body
        for part, is_slow in ((head, slow == "head"), (body, slow == "body")):
            for at in range(0, len(part), 1 if is_slow else len(part) or 1):
                self.wfile.write(part[at : at + 1] if is_slow else part)
                self.wfile.flush()
                if is_slow:  # a Hub's client waits for each byte anew, and there are hundreds
                    time.sleep(0.01 if self._query.startswith(_HUB) else 0.1)
        if self._bare:
            return
        if rules.get("body") == "endless" or rules.get("chunks") == "no end":
            self._endless(b"\0" * _PIECE if rules.get("body") else b"1\r\nx\r\n" * 1000)

    def _endless(self, piece: bytes) -> None:
        """Send the same until nobody listens, or for as long as no request may take."""
        until = time.monotonic() + 5
        with suppress(OSError):
            while time.monotonic() < until:
                self.wfile.write(piece)


def _store(data: bytes) -> str | None:
    """What the server is beside a web server, by a file that may have been changed to anything."""
    return next((own for own in _STORES if data.startswith(f'["{own}"'.encode())), None)


def _rules(data: bytes) -> list[dict[str, Any]]:
    """The rules in a file that may have been changed to anything."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return [
        rule
        for rule in (found if isinstance(found, list) else [])
        if isinstance(rule, dict)
        and rule.get("do") in RULES
        and rule.get("with") in RULES[rule["do"]]
        and isinstance(rule.get("first"), int)
        and isinstance(rule.get("file"), str)
    ]


def _body(kind: Any, body: bytes, whole: bytes) -> bytes:
    match kind:
        case "short":
            return body[: len(body) // 2]
        case "empty":
            return b""
        case "longer":
            return body + b"x" * 100
        case "other":
            return b"<html>" * 20
        case "flipped":
            return bytes(own ^ 1 for own in body)
        case "zeros":
            return b"\0" * len(body)
        case "whole":
            return whole
        case _:
            return body


def _chunked(kind: str, body: bytes) -> bytes:
    right = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    match kind:
        case "right":
            return right
        case "endless size":
            return b"1" * (1 << 20)
        case "no end":
            return right[:-5]
        case _:
            return kind.encode() + b"\r\n" + right
