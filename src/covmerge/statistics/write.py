"""Write statistics files: whole, or not at all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint, ShardWriter
from covmerge.checkpoints.layout import Layout, plan_shard
from covmerge.checkpoints.strict_json import dumps
from covmerge.errors import InputError
from covmerge.linalg.finite import all_finite
from covmerge.statistics.file import (
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
from covmerge.stores.disk import disk_errors, fsync_path
from covmerge.stores.scratch import scratch_folder
from covmerge.types import TensorHeader
from covmerge.version import __version__


@dataclass(frozen=True)
class Statistic:
    """One collected statistic.

    Attributes:
        names: the tensors that it belongs to, more than one where layers have the same input.
        total: the sum over all rows, of any floating dtype, on any device.
        rows: layer inputs, or examples, that it is the sum of.
        weight: of all rows together; None: each counts 1.
    """

    names: tuple[str, ...]
    total: Tensor
    rows: int
    weight: float | None = None

    @property
    def mean(self) -> Tensor:
        """The statistic: formed when asked for, because the sums fill the memory as they are."""
        return self.total / (self.rows if self.weight is None else self.weight)


@dataclass(frozen=True)
class Contents:
    """What goes into one file."""

    checkpoint: Checkpoint
    statistics: Mapping[Kind, Sequence[Statistic]]
    examples: int
    protocol: Protocol = "inputs"
    labels: str = ""
    generated: Mapping[str, str | int | float] | None = None
    notes: Sequence[str] = ()


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output before any work is done for it.

    Raises:
        InputError: another suffix, a missing folder, or a file that is there and may not be
            replaced; only statistics files ever are.
    """
    if not out.name.endswith(SUFFIX):
        raise InputError(f"the output {out} does not end with {SUFFIX}: name it so")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent} to write {out.name} to: create it")
    if not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise InputError(f"{out} exists: choose another output, or pass --overwrite")
    try:
        StatisticsFile.open(out).close()
    except InputError as error:
        raise InputError(
            f"{out} is not replaced, because it is no statistics file ({error}): choose another "
            "output"
        ) from error


def write_statistics(files: Mapping[Path, Contents], *, overwrite: bool) -> None:
    """Write files of one folder: all of them appear at the end, or none.

    Raises:
        InputError: see `check_output`, which is asked again before they appear.
        ResourceError: the disk is full.
    """
    folder = next(iter(files)).parent
    with (
        disk_errors(folder),
        scratch_folder(folder, ".covstats-") as unfinished,
    ):
        for out, contents in files.items():
            _write(unfinished, out.name, contents)
        for out in files:
            check_output(out, overwrite=overwrite)
        with _all_or_none(files):
            for out in files:
                (unfinished / out.name).replace(out)
        fsync_path(folder)


@contextmanager
def _all_or_none(files: Mapping[Path, Contents]) -> Generator[None]:
    new = [out for out in files if not out.exists()]
    try:
        yield
    except BaseException:
        for out in new:
            out.unlink(missing_ok=True)
        raise


def _write(folder: Path, file_name: str, contents: Contents) -> None:
    stored = {
        f"{kind}/{statistic.names[0]}": statistic
        for kind, statistics in contents.statistics.items()
        for statistic in statistics
    }
    if not all(contents.statistics.values()):
        raise InputError(
            f"{contents.checkpoint.source}: none of its layers was called with an input, so there "
            "is nothing to write: are the examples of the kind that the model takes?"
        )
    metadata = {
        FORMAT_KEY: FORMAT,
        VERSION_KEY: __version__,
        ABOUT_KEY: dumps(_about(contents, stored).model_dump(exclude_none=True), what="statistics"),
    }
    headers = [
        TensorHeader(key, tuple(statistic.total.shape), torch.float32)
        for key, statistic in stored.items()
    ]
    writer = ShardWriter(folder, Layout((plan_shard(file_name, headers, metadata),)))
    for key, statistic in stored.items():
        writer.write(key, _as_stored(statistic))
    writer.flush()


def _about(contents: Contents, stored: Mapping[str, Statistic]) -> About:
    rows: dict[str, int] = {}
    aliases: dict[str, str] = {}
    content = hashlib.sha256()
    for key, statistic in stored.items():
        kind = key.partition("/")[0]
        keys = [f"{kind}/{name}" for name in statistic.names]
        rows |= dict.fromkeys(keys, statistic.rows)
        aliases |= dict.fromkeys(keys[1:], key)
        content.update(key.encode())
        content.update(_as_stored(statistic).reshape(-1).view(torch.uint8).numpy().data)
    return About(
        source=contents.checkpoint.source,
        probe=probe(contents.checkpoint),
        protocol=contents.protocol,
        examples=contents.examples,
        labels=contents.labels,
        generated=None if contents.generated is None else dict(contents.generated),
        rows=rows,
        aliases=aliases,
        totals={kind: _total(found) for kind, found in contents.statistics.items()},
        content=f"sha256:{content.hexdigest()}",
        notes=list(contents.notes),
    )


def _total(statistics: Sequence[Statistic]) -> float:
    return math.sqrt(sum(len(s.names) * float(s.mean.double().square().sum()) for s in statistics))


def _as_stored(statistic: Statistic) -> Tensor:
    value = statistic.mean.to("cpu", torch.float32).contiguous()
    if not all_finite(value):
        raise InputError(
            f"the statistic of '{statistic.names[0]}' is not finite: the model overflows on these "
            "examples. Do they fit it?"
        )
    return value
