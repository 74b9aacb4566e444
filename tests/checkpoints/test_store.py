"""A folder as a store; and a store on another machine, of which files in memory stand for the content."""

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from covmerge.errors import CheckpointError, InputError
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.checkpoints.folder import open_file, open_folder
from covmerge.files.stores import regular_file
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import (
    Store,
    StoredFile,
    child,
    file_at,
    tree,
)
from tests.memory_store import MemoryStore


def read(store: Store, name: str) -> bytes:
    return StoredFile(store, name).read(2**20)


def test_a_file_is_made_written_and_removed(store: LocalFolder) -> None:
    assert store.names() == [] and not store.exists("a")
    store.create("a", 6, b"12", needed=6)
    assert read(store, "a") == b"12\0\0\0\0"
    store.write("a", memoryview(b"34"), 3)
    store.append("a", b"5")
    assert read(store, "a") == b"12\x0034\x005"
    store.truncate("a", 2)
    assert read(store, "a") == b"12" and StoredFile(store, "a").read(1) == b"1"
    store.flush(["a"])
    assert store.names() == ["a"] and store.is_file("a") and store.exists("a")
    store.remove("a")
    assert store.names() == []


def test_ranges_are_read_up_to_the_end(store: LocalFolder) -> None:
    store.create("a", 4, b"1234", needed=4)
    target = bytearray(3)
    with store.open("a") as opened:
        assert opened.read_at(memoryview(target), 2) == 2
        assert opened.read_at(memoryview(target), 4) == 0
    assert target == b"34\0"


def test_a_stamp_tells_of_every_change(store: LocalFolder) -> None:
    stamps = set()
    for change in (
        lambda: store.create("a", 4, b"1234", needed=4),
        lambda: store.write("a", memoryview(b"5"), 0),
        lambda: store.append("a", b"6"),
        lambda: store.create("a", 4, b"1234", needed=4),
    ):
        time.sleep(0.02)  # a clock of files may tick so seldom
        change()
        with store.open("a") as opened:
            assert opened.stamp == store.stamp("a")
        stamps.add(store.stamp("a"))
    assert len(stamps) == 4


def test_a_file_that_there_is_not(store: LocalFolder) -> None:
    assert not store.is_file("gone")
    with pytest.raises(FileNotFoundError):
        store.stamp("gone")
    with pytest.raises(FileNotFoundError), store.open("gone"):
        pass
    for change in (
        lambda: store.write("gone", memoryview(b"1"), 0),
        lambda: store.append("gone", b"1"),
        lambda: store.truncate("gone", 0),
        lambda: store.remove("gone"),
    ):
        with pytest.raises(InputError, match=r"cannot write .*gone: No such file"):
            change()


def test_a_folder_inside(store: LocalFolder) -> None:
    heads = store.inside("heads")
    heads.create("a", 1, b"1", needed=1)
    assert heads.names() == ["a"] and store.names() == []
    assert read(store, "heads/a") == b"1"
    assert store.inside("").where("heads/a") == heads.where("a") == f"{heads}/a"
    assert store.folders() == ["heads"] and store.exists("heads") and not store.is_file("heads")


def test_a_folder_is_there_once_there_is_something_in_it(store: LocalFolder) -> None:
    inner = store.inside("a").inside("b")
    assert inner.names() == inner.folders() == store.folders() == []
    assert not inner.exists("c") and not inner.is_file("c")
    inner.put("c", b"1")
    assert store.folders() == ["a"] and list(tree(store)) == ["a/b/c"]
    assert file_at(store, "a/b/c").read(10) == b"1"


def test_what_is_put_takes_the_place_of_what_is_there(store: LocalFolder) -> None:
    assert not store.exists("a")
    for content in (b"123", b"", b"4"):
        store.put("a", content)
        assert store.exists("a") and read(store, "a") == content


def test_all_but_some_files_are_removed(store: LocalFolder) -> None:
    for folder, name in (("", "a"), ("", "b"), ("c", "a"), ("c", "d"), ("e/f", "a")):
        store.inside(folder).put(name, b"1")
    assert sorted(store.remove_others(["b", "c/d"])) == ["a", "c/a", "e/f/a"]
    assert list(tree(store)) == ["b", "c/d"]


def test_links_and_folders_of_this_machine(tmp_path: Path) -> None:
    store, elsewhere = LocalFolder(tmp_path / "store"), tmp_path / "elsewhere"
    (tmp_path / "store" / "empty" / "too").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "a").write_text("precious")
    (tmp_path / "store" / "folder").symlink_to(elsewhere)
    (tmp_path / "store" / "file").symlink_to(elsewhere / "a")
    assert store.folders() == ["empty"] and sorted(store.names()) == ["file", "folder"]
    assert store.is_file("file") and not store.is_file("file", follow=False)
    assert list(tree(store)) == ["empty/too", "file", "folder"]
    for path in ("folder/a", "file"):
        with pytest.raises(CheckpointError, match="is a link to"):
            file_at(store, path)
    assert sorted(store.remove_others(["file"])) == ["file", "folder"]
    assert list(tree(store)) == [] and (elsewhere / "a").read_text() == "precious"


def test_nothing_is_written_through_a_hard_link(tmp_path: Path) -> None:
    store, outside = LocalFolder(tmp_path), tmp_path / "outside"
    outside.write_bytes(b"precious")
    for name in ("a", ".b.new"):
        os.link(outside, tmp_path / name)
    for write in (
        lambda: store.write("a", memoryview(b"x"), 0),
        lambda: store.append("a", b"x"),
        lambda: store.truncate("a", 0),
    ):
        with pytest.raises(InputError, match="is a hard link"):
            write()
    with pytest.raises(OSError, match="is a hard link"):
        store.open("a", follow=False)
    assert store.is_file("a") and not store.is_file("a", follow=False)
    store.create("a", 1, b"1", needed=1)
    store.create("b", 1, b"2", needed=1)
    assert outside.read_bytes() == b"precious" and outside.stat().st_nlink == 1


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_a_strangers_name_stays_inside(store: LocalFolder, name: str) -> None:
    with pytest.raises(CheckpointError, match="bare names"):
        child(store, name)


def test_more_than_one_call_moves(store: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "_MOST", 3)
    store.create("a", 10, b"0123456789", needed=10)
    store.write("a", memoryview(b"abcdefgh"), 1)
    assert read(store, "a") == b"0abcdefgh9"


def test_a_folder_may_be_sent_to_another_process(tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(LocalFolder(tmp_path)))
    store.create("a", 1, b"1", needed=1)
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_changed_file_in_memory_is_refused() -> None:
    store = MemoryStore({"m.safetensors": save({"w": torch.zeros(4)})})
    checkpoint = open_file("m", StoredFile(store, "m.safetensors"))
    store.contents["m.safetensors"] = save({"w": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"memory/m\.safetensors changed while"):
        checkpoint.read("w")
    with pytest.raises(CheckpointError, match="changed while"):
        fingerprint(checkpoint)


def test_pickles_in_memory_are_refused_by_name() -> None:
    store = MemoryStore({"pytorch_model.bin": b"PK"})
    with pytest.raises(CheckpointError, match=r"memory/pytorch_model\.bin is a pickle"):
        open_folder("m", store)
