"""Disks and systems that say no: what is reserved, appended, locked and removed under them."""

import errno
import os
from pathlib import Path

import pytest

from covmerge.errors import InputError, ResourceError
from covmerge.files.stores import lock, regular_file
from covmerge.files.stores.disk import disk_errors, replace_file
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.lock import REMOVED, Lock, held_file
from tests.advised import advice


def failing(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_space_is_reserved_where_it_can_be(tmp_path: Path, monkeypatch) -> None:
    for change, size in (
        (lambda: monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP)), 5),
        (lambda: monkeypatch.delattr(os, "posix_fallocate"), 7),
    ):
        change()
        with (tmp_path / "file").open("wb") as file:
            regular_file.reserve(file.fileno(), size)
        assert (tmp_path / "file").stat().st_size == size
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO), raising=False)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Input/output"):
        regular_file.reserve(file.fileno(), 5)


def test_a_limit_on_files_is_told_by_its_name(tmp_path: Path) -> None:
    said = advice("the limit of this process (ulimit -f) allows: pass a smaller shard size")
    larger = pytest.raises(ResourceError, match=said)
    with larger, disk_errors(tmp_path / "x"):
        failing(errno.EFBIG)()
    with (
        pytest.raises(InputError, match=r"cannot write .*Input/output"),
        disk_errors(tmp_path / "x"),
    ):
        failing(errno.EIO)()


def test_half_of_a_line_is_taken_back(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "journal").write_bytes(b"one\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    with pytest.raises(ResourceError, match=r"no room for .*journal"):
        LocalFolder(tmp_path).append("journal", b"two\n")
    assert (tmp_path / "journal").read_bytes() == b"one\n"


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        Lock(tmp_path / "file")
    with monkeypatch.context() as patched:
        patched.setattr(lock, "lock_descriptor", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            Lock(tmp_path / "a")
        patched.setattr(lock, "lock_descriptor", failing(errno.ENOLCK))
        unsure = Lock(tmp_path / "a")
        assert not unsure.works
        unsure.release()


def test_a_lock_that_goes_with_its_folder_is_made_again(tmp_path: Path, monkeypatch) -> None:
    folder, gone, is_open = tmp_path / "a", [], lock._is_open_at

    def removed_meanwhile(fd: int, path: Path) -> bool:
        if not gone:
            gone.append(path.unlink())
        return is_open(fd, path)

    monkeypatch.setattr(lock, "_is_open_at", removed_meanwhile)
    Lock(folder).remove_folder()
    assert gone and not folder.exists()


def test_what_a_killed_removal_left_goes_with_the_folder(tmp_path: Path, monkeypatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for left in ("link", "folder"):
        held = Lock(tmp_path / "a")
        place = tmp_path / "a" / REMOVED
        if left == "link":
            place.symlink_to(outside)
        else:
            (place / "more").mkdir(parents=True)
        held.remove_folder()
        assert not (tmp_path / "a").exists() and outside.is_dir()
    held = Lock(tmp_path / "a")
    monkeypatch.setattr(Path, "rmdir", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        held.remove_folder()


def test_what_a_killed_writer_of_a_file_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch
) -> None:
    """It stayed for good, and a model with half a report beside it was not replaced by --overwrite."""
    page = tmp_path / "report.html"
    abandoned, used, other = (
        tmp_path / f".{name}.unfinished"
        for name in ("report.html.00000000", "report.html.11111111", "view.html.22222222")
    )
    abandoned.write_text("half")
    other.write_text("of another file")
    with held_file(used) as held:
        assert held
        replace_file(page, "whole")
        assert {*tmp_path.iterdir()} == {page, used, other} and page.read_text() == "whole"
    assert not used.exists()
    taken = iter([False, True])  # another process looks at the new file before it is locked
    monkeypatch.setattr(lock, "lock_descriptor", lambda *_, **__: next(taken, True))
    replace_file(page, b"again")
    assert {*tmp_path.iterdir()} == {page, other} and page.read_text() == "again"
    monkeypatch.setattr(lock, "lock_descriptor", failing(errno.ENOLCK))
    abandoned.write_text("half")
    replace_file(page, "without locks")
    assert abandoned.exists()  # nothing tells whether it is in use
    monkeypatch.setattr(lock, "lock_descriptor", failing(errno.EIO))
    with pytest.raises(InputError, match="Input/output"):
        replace_file(page, "not written")
    assert {*tmp_path.iterdir()} == {page, other, abandoned} and page.read_text() == "without locks"
