"""A server of S3 for all tests, and one of Google's; a bucket for each."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from covmerge.files.stores import link
from covmerge.files.stores.link import link_to
from tests.remote.servers import KEYS, Server, s3, serving
from tests.verification.test_files import save_models

_NUMBERS = count()


@dataclass
class Bucket:
    """An empty bucket of a server."""

    server: Server
    name: str
    system: Any
    scheme: str = "s3"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def put(self, path: Path, name: str) -> str:
        """Copy a file or a folder there, and return its address."""
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                inner = "" if file == path else f"/{file.relative_to(path).as_posix()}"
                self.system.pipe_file(f"{self.name}/{name}{inner}", file.read_bytes())
        return f"{self.url}/{name}"

    def contents(self) -> dict[str, bytes]:
        """All that it holds."""
        names = self.system.find(self.name)
        return {name.removeprefix(f"{self.name}/"): self.system.cat_file(name) for name in names}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    with serving(s3()) as server:
        yield server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "WAITS", (0.01,) * 5)


@pytest.fixture(autouse=True)
def new_links() -> None:
    """What was learned of one server is nothing to another at the same address."""
    link_to.cache_clear()


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    import fsspec

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_server.url}.items():
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3", use_listings_cache=False)
    name = f"bucket-{next(_NUMBERS)}"
    system.mkdir(name)
    s3_server.requests.clear()
    yield Bucket(s3_server, name, system)
    s3_server.faults.clear()


@pytest.fixture(scope="session")
def google() -> Iterator[None]:
    """A server of Google's storage; it does nothing wrong, and heeds no conditions of a write."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # Else gcsfs asks a service of Google's that is not this one what each bucket is like.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs", reason="not installed: pip install 'covmerge[gs]'")
        emulator = pytest.importorskip("gcp_storage_emulator.server")
        with emulator.create_server("127.0.0.1", port, in_memory=True):
            yield


@pytest.fixture(params=["s3", "gs"])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    """A bucket of each kind."""
    if request.param == "s3":
        return request.getfixturevalue("bucket")
    import fsspec

    request.getfixturevalue("google")
    system = fsspec.filesystem("gs", use_listings_cache=False)
    name = f"bucket-{next(_NUMBERS)}"
    system.mkdir(name)
    return Bucket(Server(), name, system, "gs")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A base with companion files, and two experts; tests only read them."""
    return save_models(tmp_path_factory.mktemp("remote") / "models")


def files(folder: Path) -> dict[str, bytes]:
    """The files of an output, by their names in a bucket whose output is `merged`."""
    return {
        f"merged/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
