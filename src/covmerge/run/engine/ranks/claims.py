"""Items that are claimed by files: who makes the link first has the item."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from covmerge.base.errors import InputError
from covmerge.files.stores.disk import disk_errors
from covmerge.files.stores.regular_file import open_raw
from covmerge.run.engine.executor import own_first
from covmerge.run.engine.ranks.rank import Rank

_MOST_BYTES = 200  # of the name of a holding


class Holding:
    """What one rank has claimed of one stage.

    A claim is a hard link to a file that says whose it is: made in one step on every file system that
    clusters share, with its content. The first claim of an item is `<stage>-<item>.0`; the one that takes
    over from a rank that is gone is `.1`, and so on.

    Attributes:
        name: `<stage>-<who>-<number>`.
    """

    def __init__(self, folder: Path, stage: int | str, who: str, number: int) -> None:
        self.name = f"{stage}-{who}-{number}"
        self._folder = folder
        self._stage = stage
        self._holders: dict[int, tuple[str, int]] = {}
        self._claims = folder / "claims"
        self._claims.mkdir(exist_ok=True)
        self._renew()

    def unclaimed(
        self, sizes: Mapping[int, int], rank: Rank, done: Container[int]
    ) -> Iterator[int]:
        """Claim items that nobody has, when asked for one more: the rank's share, then those of others."""
        indexes = list(sizes)
        for place in own_first(list(sizes.values()), rank.number, rank.world):
            index = indexes[place]
            if index not in done and self._take(f"{self._stage}-{index}.0"):
                yield index

    def left(
        self, indexes: Iterable[int], done: Container[int], is_there: Callable[[str], bool]
    ) -> Iterator[int]:
        """Claim items that nobody has, or whose holder is gone before they were done.

        `is_there` says whether the rank that has a holding, by its name, will do what it has claimed.
        """
        return (
            index for index in indexes if index not in done and self._take_left(index, is_there)
        )

    def _take_left(self, index: int, is_there: Callable[[str], bool]) -> bool:
        # Looked up once: whose it is only changes when somebody takes it over.
        holder, before = self._holders.pop(index, None) or self._holder(index)
        if holder and is_there(holder):
            self._holders[index] = holder, before
            return False
        return self._take(f"{self._stage}-{index}.{before + 1}")

    def _holder(self, index: int) -> tuple[str, int]:
        """The holding that has an item, and how many had it before; "" and -1 of one that none has."""
        name, before = "", -1
        while (found := self._read(f"{self._stage}-{index}.{before + 1}")) is not None:
            name, before = found, before + 1
        return name, before

    def _take(self, claim: str) -> bool:
        path = self._claims / claim
        try:
            os.link(self._tag, path)
        except FileExistsError:
            # NFS says this of a request that it repeated although the first one was carried out.
            return self._read(claim) == self.name
        except OSError as error:
            if error.errno == errno.EMLINK:  # a file has no more names than, say, 65000
                self._renew()
                return self._take(claim)
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise InputError(
                    f"the file system of {self._folder} has no hard links, by which ranks claim items: "
                    "choose an output elsewhere"
                ) from error
            with disk_errors(path):
                raise
        return True

    def _read(self, claim: str) -> str | None:
        try:
            with open_raw(self._claims / claim, follow=False) as file:
                return file.read(_MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None

    def _renew(self) -> None:
        self._tag = self._folder / f"{self.name}-{token_hex(4)}.tag"
        with disk_errors(self._tag):
            self._tag.write_text(self.name)


def who_has(holding: str) -> str:
    """Return the rank of a holding, by the holding's name.

    Example:
        >>> who_has("0-3.1f2e-0")
        '3.1f2e'
    """
    return holding.partition("-")[2].rpartition("-")[0]


def settle(path: Path, content: bytes) -> bool:
    """Make a file that several may want to make, each with another content; False: another has."""
    made = path.with_name(f".{path.name}.{token_hex(4)}")
    with disk_errors(path):
        try:
            made.write_bytes(content)
            os.link(made, path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                made.unlink()
    return True
