"""A web server behind a link of so much latency and so many bytes a second, of each connection and of all.

    python -m benchmarks.narrow FOLDER ADDRESS...

copies files from addresses into a folder, by the requests that covmerge makes, and says the seconds.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CHUNK = 2**16
_READ = 2**26


@dataclass(frozen=True)
class Rates:
    """What a link carries.

    Attributes:
        latency: seconds until an answer begins.
        each: bytes a second of a connection.
        total: bytes a second of all together.
    """

    latency: float = 0.03
    each: float = 10e6
    total: float = 100e6


class Narrow:
    """A server that runs, and what it has sent.

    Attributes:
        url: of its folder.
        sent: bytes of answers so far.
        requests: how many there were.
        peak: the most connections that were sent to at once.
    """

    def __init__(self, url: str, rates: Rates) -> None:
        self.url = url
        self._rates = rates
        self._lock = threading.Lock()
        self._free = 0.0
        self._now = 0
        self.clear()

    def clear(self) -> None:
        """Count anew."""
        self.sent = self.requests = self.peak = 0

    def counted(self) -> dict[str, int]:
        """As results have it."""
        return {"bytes": self.sent, "requests": self.requests, "at_once": self.peak}

    @contextmanager
    def answer(self) -> Generator[None]:
        """Come to an answer, and send it."""
        with self._lock:
            self.requests += 1
            self._now += 1
            self.peak = max(self.peak, self._now)
        try:
            time.sleep(self._rates.latency)
            yield
        finally:
            with self._lock:
                self._now -= 1

    def move(self, size: int, began: float, done: int) -> None:
        """Wait as long as the link takes for so many bytes more, of an answer that had so many."""
        with self._lock:
            self.sent += size
            self._free = max(self._free, time.monotonic()) + size / self._rates.total
            due = max(self._free, began + (done + size) / self._rates.each)
        time.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def serving(folder: Path, rates: Rates) -> Generator[Narrow]:
    """Serve the files of a folder from threads of this process, by ranges."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with found.answer():
                self._send(folder / self.path.lstrip("/"))

        def _send(self, path: Path) -> None:
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            if asked is None or not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = path.stat()
            first, last = int(asked[1]), min(int(asked[2]), status.st_size - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{status.st_size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("ETag", f'"{status.st_mtime_ns:x}"')
            self.end_headers()
            began = time.monotonic()
            with path.open("rb") as file:
                file.seek(first)
                for offset in range(first, last + 1, _CHUNK):
                    chunk = file.read(min(_CHUNK, last + 1 - offset))
                    found.move(len(chunk), began, offset - first)
                    self.wfile.write(chunk)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *asked: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # whoever asked has ended
                super().handle_error(*asked)

    server = Server(("127.0.0.1", 0), Handler)
    found = Narrow(f"http://127.0.0.1:{server.server_port}", rates)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def copy(address: str, folder: Path) -> None:
    """Copy a file from an address, as fast as covmerge would read all of it."""
    from covmerge.files.stores.address import Address
    from covmerge.files.stores.remote import RemoteStore, server_at

    scheme, _, path = address.partition("://")
    parent, _, name = path.rpartition("/")
    store = RemoteStore(*server_at(Address(scheme, parent)))
    data = memoryview(bytearray(_READ))
    with store.open(name) as opened, (folder / name).open("wb") as file:
        while count := opened.read_at(data, file.tell()):
            file.write(data[:count])


def main() -> None:
    began = time.perf_counter()
    for address in sys.argv[2:]:
        copy(address, Path(sys.argv[1]))
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
