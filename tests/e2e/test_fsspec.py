"""Where a library of file systems fits in: fsspec's, with two classes of the size that it takes."""

import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec
import pytest
import torch

from covmerge.checkpoints import open_store
from covmerge.errors import CheckFailed, InputError
from covmerge.stores.local_destination import LocalDestination
from covmerge.stores.paths import check_bare
from covmerge.stores.store import StoredFile
from covmerge.stores.walk import tree
from covmerge.verification import verify
from tests.e2e.test_memory_output import files, merge_into
from tests.interrupted import InterruptAfter
from tests.verification.test_files import save_models


class RemoteFolder:
    """A `Store` of a folder of any file system that fsspec has."""

    folder = None

    def __init__(self, system: fsspec.AbstractFileSystem, root: str) -> None:
        self.system, self.root = system, root

    def __str__(self) -> str:
        return self.system.unstrip_protocol(self.root)

    def where(self, name: str) -> str:
        return f"{self}/{name}"

    def _listed(self, kind: str) -> list[str]:
        if not self.system.isdir(self.root):
            return []
        found = self.system.ls(self.root, detail=True)
        return [PurePosixPath(one["name"]).name for one in found if one["type"] == kind]

    def names(self) -> list[str]:
        return self._listed("file")

    def folders(self) -> list[str]:
        return self._listed("directory")

    def check(self, name: str) -> None:
        check_bare(name, str(self))

    def is_file(self, name: str, *, follow: bool = True) -> bool:
        return self.system.isfile(f"{self.root}/{name}")

    def stamp(self, name: str) -> tuple[int, int, int]:
        info = self.system.info(f"{self.root}/{name}")
        return info["size"], zlib.crc32(repr(sorted(info.items())).encode()), 0

    def open(self, name: str, *, follow: bool = True) -> "RemoteFile":
        return RemoteFile(self, name)

    def inside(self, folder: str) -> "RemoteFolder":
        return RemoteFolder(self.system, f"{self.root}/{folder}") if folder else self


class RemoteFile:
    """A file of it, read by ranges."""

    def __init__(self, store: RemoteFolder, name: str) -> None:
        self.system, self.path = store.system, f"{store.root}/{name}"
        self.stamp = store.stamp(name)

    def __enter__(self) -> "RemoteFile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_at(self, target: memoryview, offset: int) -> int:
        data = self.system.cat_file(self.path, start=offset, end=offset + len(target))
        target[: len(data)] = data
        return len(data)


class Uploaded(LocalDestination):
    """The work lies in a folder of this machine; to publish it is to send it, covmerge.json last."""

    def __init__(self, output: RemoteFolder, aside: Path) -> None:
        super().__init__(aside / "sent")
        self.output = output

    def __str__(self) -> str:
        return str(self.output)

    def occupant(self) -> object | None:
        return sorted(tree(self.output)) or None

    def publish(self) -> None:
        if self.occupant():
            self.output.system.rm(self.output.root, recursive=True)
        for name in sorted(tree(self.work), key=lambda name: name == "covmerge.json"):
            content = StoredFile(self.work, name).read(2**30)
            self.output.system.pipe_file(f"{self.output.root}/{name}", content)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteFolder]:
    system = fsspec.filesystem("memory")
    yield RemoteFolder(system, f"{tmp_path}/merged")
    system.store.clear()


def test_a_merge_is_written_there_and_read_from_there(tmp_path: Path, remote) -> None:
    base, experts = save_models(tmp_path / "models")
    out, aside = tmp_path / "out", tmp_path / "aside"
    aside.mkdir()
    options = {"output": {"shard_size": "150KB"}}
    merge_into(LocalDestination(out), base, experts, **options)
    with pytest.raises(KeyboardInterrupt):
        merge_into(Uploaded(remote, aside), base, experts, progress=InterruptAfter(2), **options)
    assert list(tree(remote)) == []
    merge_into(Uploaded(remote, aside), base, experts, resume=True, **options)
    there = {f"merged/{name}": StoredFile(remote, name).read(2**30) for name in tree(remote)}
    assert there == files(out)
    assert list(aside.iterdir()) == []

    checked = verify(remote)
    assert checked.ok and str(checked.folder).startswith("memory://")
    here, far = open_store("here", LocalDestination(out).output), open_store("far", remote)
    assert far.config == here.config and far.headers == here.headers
    for name in here.headers:
        assert torch.equal(far.read(name), here.read(name))

    with pytest.raises(InputError, match=r"memory://.* exists: pass --overwrite"):
        merge_into(Uploaded(remote, aside), base, experts)
    with pytest.raises(CheckFailed, match=r"memory://.*fails its verification"):
        unchanged = {"e0": base / "model.safetensors"}
        allow = ["unchanged-expert"]
        merge_into(Uploaded(remote, aside), base, unchanged, allow=allow, overwrite=True)
    assert verify(remote).ok
