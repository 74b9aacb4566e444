"""An input: a folder of files that was valid, and the changes that were made to it; laid out on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random

from tests.campaigns.formats import change, resized
from tests.campaigns.trees import OUTSIDE, TEXTS

_LARGE = 1 << 21  # bytes that a file may grow to


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Odd:
    """What is no file: `pipe` or `folder`."""

    kind: str


@dataclass(frozen=True)
class Sparse:
    """A file with a hole at its end, in which bytes may lie here and there."""

    start: bytes
    size: int
    islands: tuple[tuple[int, bytes], ...] = ()


Content = bytes | Link | Odd | Sparse


def hostile(
    valid: Mapping[str, bytes], changes: Sequence[int], patterns: Sequence[str]
) -> dict[str, Content]:
    """Return a valid input with changes, each drawn by a number of its own, so that any may be left out."""
    files: dict[str, Content] = dict(valid)
    for number in changes:
        random = Random(number)
        open_to = sorted(name for name in files if any(fnmatchcase(name, own) for own in patterns))
        if not open_to:
            break
        # A small file says more about the others than they do.
        name = random.choice(open_to)
        if random.random() < 0.06:
            _change_folder(files, name, random)
        else:
            content = files[name]
            if isinstance(content, bytes) and len(content) < _LARGE:
                files[name] = change(name, content, random)
            elif isinstance(content, Sparse):
                files[name] = _change_large(name, content, random)
    return files


def _change_large(name: str, own: Sparse, random: Random) -> Sparse:
    """A change to a header, to the size, or to values far behind it."""
    match random.randrange(4):
        case 0:
            return replace(own, start=change(name, own.start, random))
        case 1:
            header = resized(own.start, own.size, random)
            return replace(own, start=header)
        case 2:
            size = random.choice(
                (own.size - 1, own.size + 1, own.size // 2, len(own.start), 1 << 40)
            )
            return replace(own, size=size)
        case _:
            at = random.randrange(len(own.start), max(own.size, len(own.start) + 1))
            value = random.choice(
                (b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", b"\1\0\0\0")
            )
            where = at - (at - len(own.start)) % 4
            return replace(
                own, islands=(*own.islands, (where, value * random.choice((1, 9, 3000))))
            )


def _change_folder(files: dict[str, Content], name: str, random: Random) -> None:
    own = files[name]
    up = "../" * name.count("/")
    match random.randrange(8):
        case 0:
            del files[name]
        case 1:
            files[name] = Link(f"{up}{OUTSIDE}/{Path(name).name}")
        case 2:
            files[name] = Link(
                random.choice(
                    (
                        Path(name).name,
                        "/dev/zero",
                        "/etc/passwd",
                        "nowhere",
                        f"{up}{OUTSIDE}/secret",
                    )
                )
            )
        case 3:
            files[name] = Odd(random.choice(("pipe", "folder")))
        case 4:
            start = own if isinstance(own, bytes) else b""
            # What has no format is hashed as it is, for as long as it takes.
            whole = name == "out/README.md"
            files[name] = Sparse(
                start, 1 << 20 if whole else random.choice((1 << 20, 1 << 40, 1 << 62))
            )
        case 5:
            files[name] = files[random.choice(sorted(files))]
        case 6:
            folder, text = (
                str(Path(name).parent),
                random.choice([t for t in TEXTS if isinstance(t, str)]),
            )
            if (
                text.strip(".")
                and "/" not in text
                and "\0" not in text
                and len(text.encode(errors="replace")) < 200
            ):
                files[f"{folder}/{text}" if folder != "." else text] = own
        case _:
            suffix = random.choice(
                (".safetensors", ".bin", ".json", ".gguf", ".index.json", "", ".bak")
            )
            files[str(Path(name).with_suffix(suffix)) if suffix else f"{name}x"] = own


class Laid:
    """A folder that holds one input after the other; what is the same stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._laid: dict[str, Content] = {}

    def lay(self, files: Mapping[str, Content]) -> None:
        """Have the folder hold these files and no other."""
        for name in [*self._laid]:
            if files.get(name) != self._laid[name]:
                _remove(self._folder / name)
                del self._laid[name]
        for name, content in files.items():
            if name not in self._laid:
                try:
                    _put(self._folder / name, content)
                except (
                    OSError,
                    ValueError,
                ):  # no file can have this name, or it lies below another
                    continue
                self._laid[name] = content

    def clear(self) -> None:
        """Start over: a reader has changed what it was given."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._laid = {}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _put(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case Link(target):
            path.symlink_to(target)
        case Odd("pipe"):
            os.mkfifo(path)
        case Odd():
            path.mkdir()
        case Sparse(start, size, islands):
            with path.open("wb") as file:
                for at, values in ((0, start), *islands):
                    file.seek(at)
                    file.write(values)
            try:
                os.truncate(path, size)
            except OSError:  # larger than the file system can count
                os.truncate(path, 1 << 40)
