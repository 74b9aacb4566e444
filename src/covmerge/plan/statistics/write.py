"""Writing statistics files, completely or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint
from covmerge.base.types import TensorHeader
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.header import LENGTH_BYTES
from covmerge.files.checkpoints.json_file import dumps
from covmerge.files.checkpoints.layout import plan_shard
from covmerge.files.stores.disk import UNFINISHED, disk_errors, finished_name, fsync_path
from covmerge.files.stores.lock import held_file, remove_abandoned
from covmerge.maths.linalg.stored import all_finite
from covmerge.plan.statistics.file import (
    ABOUT_KEY,
    FORMAT,
    FORMAT_KEY,
    SUFFIX,
    VERSION_KEY,
    About,
    Kind,
    Protocol,
    StatisticsFile,
    probe,
)

_ROOM = 2**18  # bytes for the facts in a file's metadata
_PIECE = 2**22  # numbers computed at once
_NUMBERS = 256  # bytes for shape, offsets and rows of a tensor


@dataclass(frozen=True)
class Statistic:
    """One collected statistic."""

    # Names of the tensors that have it; several if layers have the same input.
    names: tuple[str, ...]
    total: Tensor  # the sum over all rows, in any floating dtype, on any device
    rows: int  # number of layer inputs, or examples, in the sum
    weight: float | None = None  # sum of the weights of all rows; None: each row counts 1

    @property
    def mean(self) -> Tensor:
        """The statistic; it is computed when asked for, because the sums alone fill the memory."""
        return self.total / self._count

    def parts(self) -> Iterator[Tensor]:
        """Yield pieces of the statistic in the form in which it is stored, float32 on the CPU."""
        for part in torch.split(self.total.flatten(), _PIECE):
            yield (part / self._count).to("cpu", torch.float32)

    @property
    def _count(self) -> float:
        return self.rows if self.weight is None else self.weight


@dataclass(frozen=True)
class Contents:
    """The contents of one statistics file."""

    checkpoint: Checkpoint
    statistics: Mapping[Kind, Sequence[Statistic]]
    examples: int
    protocol: Protocol = "inputs"
    labels: str = ""
    generated: Mapping[str, str | int | float] | None = None
    notes: Sequence[str] = ()


def check_output(out: Path, *, overwrite: bool) -> None:
    """Raise if an output is not allowed, before any work is done; only statistics files are replaced."""
    if not out.name.endswith(SUFFIX):
        raise InputError(f"the output {out} does not end with {SUFFIX}: name it so")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} to write {out.name} to: create it")
    if not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise InputError(f"{out} exists: choose another output, or pass {Hint('overwrite')}")
    try:
        StatisticsFile.open(out).close()
    except InputError as error:
        raise InputError(
            f"{out} is not replaced, because it is no statistics file ({error}): choose another "
            "output"
        ) from error


class GrowingFile:
    """A statistics file that is written one statistic after another; each kind must get at least one.

    Its header is known only at the end, so room is left for it: a header may end in spaces. `names` are
    all tensors that it may have statistics of.
    """

    def __init__(
        self, path: Path, checkpoint: Checkpoint, kinds: Iterable[Kind], names: Iterable[str]
    ) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._totals: dict[Kind, float] = dict.fromkeys(kinds, 0.0)
        self._headers: list[TensorHeader] = []
        self._rows: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        self._content = hashlib.sha256()
        self._room = _ROOM + len(self._totals) * sum(map(_room_of, (*names, checkpoint.source)))
        with disk_errors(path):
            self._file = path.open("wb")
            self._file.seek(LENGTH_BYTES + self._room)

    def add(self, kind: Kind, statistic: Statistic) -> None:
        keys = [f"{kind}/{name}" for name in statistic.names]
        header = TensorHeader(keys[0], tuple(statistic.total.shape), torch.float32)
        self._content.update(keys[0].encode())
        for part in statistic.parts():
            if not all_finite(part):
                raise InputError(
                    f"the statistic of '{statistic.names[0]}' is not finite: the model overflows on "
                    "these examples. Do they fit it?"
                )
            data = part.view(torch.uint8).numpy().data
            with disk_errors(self._path, header.nbytes):
                self._file.write(data)
            self._content.update(data)
            self._totals[kind] += len(keys) * float(part.double().square().sum())
        self._headers.append(header)
        self._rows |= dict.fromkeys(keys, statistic.rows)
        self._aliases |= dict.fromkeys(keys[1:], keys[0])

    def finish(self, contents: Contents) -> About:
        """Write the metadata of the contents, whose statistics were added, and return it."""
        found = {key.partition("/")[0] for key in self._rows}
        if found != self._totals.keys():
            raise InputError(
                f"{self._checkpoint.source}: none of its layers was called with an input, so there "
                "is nothing to write"
            )
        about = About(
            source=self._checkpoint.source,
            probe=probe(self._checkpoint),
            protocol=contents.protocol,
            examples=contents.examples,
            labels=contents.labels,
            generated=None if contents.generated is None else dict(contents.generated),
            rows=self._rows,
            aliases=self._aliases,
            totals={kind: math.sqrt(total) for kind, total in self._totals.items()},
            content=f"sha256:{self._content.hexdigest()}",
            notes=list(contents.notes),
        )
        metadata = {
            FORMAT_KEY: FORMAT,
            VERSION_KEY: __version__,
            ABOUT_KEY: dumps(about.model_dump(exclude_none=True), what="statistics"),
        }
        shard = plan_shard(self._path.name, self._headers, metadata)
        header = shard.header[LENGTH_BYTES:].ljust(self._room)
        if len(header) > self._room:
            raise InputError(
                f"what {self._path.name} says of itself takes {len(header)} bytes, and {self._room} were "
                "left for it: its notes, or how its examples were made, are too long"
            )
        with disk_errors(self._path):
            self._file.seek(0)
            self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return about

    def close(self) -> None:
        with suppress(OSError):  # an error in writing what is not needed any more
            self._file.close()


def _room_of(name: str) -> int:
    """Return the bytes that a header may need for a tensor: its name four times, escaped, and numbers."""
    return 4 * len(json.dumps(json.dumps(name))) + _NUMBERS


@contextmanager
def files_in(folder: Path, *, overwrite: bool) -> Generator[Callable[[Path], Path]]:
    """Give the place to write each of a folder's new files to; at the end, all appear there or none."""
    unfinished: dict[Path, Path] = {}
    with ExitStack() as stack:

        def place(out: Path) -> Path:
            with disk_errors(folder):
                for other in folder.glob(UNFINISHED):
                    if finished_name(other.name) == out.name:
                        remove_abandoned(other)
                while True:
                    path = out.with_name(f".{out.name}.{token_hex(4)}.unfinished")
                    if stack.enter_context(held_file(path)):
                        break  # no other process took it for abandoned just then
            unfinished[out] = path
            return path

        yield place
        for out in unfinished:
            check_output(out, overwrite=overwrite)
        with disk_errors(folder), _all_or_none(unfinished):
            for out, path in unfinished.items():
                path.replace(out)
            fsync_path(folder)


def write_statistics(files: Mapping[Path, Contents], *, overwrite: bool) -> dict[Path, About]:
    """Write files of one folder, and return their metadata."""
    abouts: dict[Path, About] = {}
    with files_in(next(iter(files)).parent, overwrite=overwrite) as place:
        for out, contents in files.items():
            found = contents.statistics
            names = [n for group in found.values() for statistic in group for n in statistic.names]
            with closing(GrowingFile(place(out), contents.checkpoint, found, names)) as file:
                for kind, group in found.items():
                    for statistic in group:
                        file.add(kind, statistic)
                abouts[out] = file.finish(contents)
    return abouts


@contextmanager
def _all_or_none(outs: Iterable[Path]) -> Generator[None]:
    new = [out for out in outs if not out.exists()]
    try:
        yield
    except BaseException:
        for out in new:
            out.unlink(missing_ok=True)
        raise
