"""The stores that readers and writers are tested on: a folder of this machine, and memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import open_file, open_folder
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store, StoredFile
from tests.memory_store import MemoryStore


def in_memory(source: str | Path) -> Checkpoint:
    """Open a copy of a file, or of the files of a folder."""
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.iterdir() if file.is_file()] if path.is_dir() else [path]
    store = MemoryStore({file.name: file.read_bytes() for file in files}, str(folder))
    if path.is_dir():
        return open_folder(str(path), store)
    return open_file(str(path), StoredFile(store, path.name))


@pytest.fixture(params=[open_checkpoint, in_memory], ids=["local", "memory"])
def opens(request: pytest.FixtureRequest) -> Callable[[Path], Checkpoint]:
    """What opens a file or a folder, where it lies or copied to memory."""
    return request.param


@pytest.fixture
def store(tmp_path: Path) -> LocalFolder:
    """A folder with nothing in it."""
    (tmp_path / "store").mkdir()
    return LocalFolder(tmp_path / "store")


def content(store: Store) -> dict[str, bytes]:
    """All that a store holds."""
    return {name: StoredFile(store, name).read(2**40) for name in sorted(store.names())}
