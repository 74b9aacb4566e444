"""What a checkpoint is to the rest of covmerge, and what its kinds share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.content import Content, at_once
from covmerge.files.checkpoints.json_file import is_text, shorten
from covmerge.files.checkpoints.layout import SAFETENSORS_NAMES
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.store import Stamp, StoredFile

CARD_NAME = "README.md"  # the model card

_MAX_NAME = 1000  # rules look for patterns in them; real ones have less than 200
_DISPATCH = "__torch_dispatch__"


class Checkpoint(Protocol):
    """A set of named tensors: the headers now, the values when they are asked for."""

    @property
    def source(self) -> str:
        """The source as the user wrote it."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every stored tensor, in file order. Planning needs nothing more."""
        ...

    @property
    def config(self) -> Mapping[str, Any] | None:
        """`config.json`, parsed, if there is one."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where companion files (tokenizer, generation config) lie, if anywhere.

        For a repository of the Hub that is known after `materialize`.
        """
        ...

    @property
    def hub(self) -> HubModel | None:
        """The model of the Hugging Face Hub that it is, where that is known."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know about how the source was read."""
        ...

    def readme(self) -> Path | None:
        """Return its model card, if it has one; of a repository of the Hub it is fetched.

        Raises:
            CheckpointError: it cannot be fetched, or is a link that leads out of its folder.
        """
        ...

    def companions(self) -> Path | None:
        """Return the folder with its companion files; of a repository of the Hub they are fetched.

        Its weights are not, and `folder` may still be unknown.

        Raises:
            CheckpointError: they cannot be fetched.
        """
        ...

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Return one tensor, or a contiguous range of its dimension 0, in its stored dtype.

        The tensor is on the CPU, contiguous and the caller's own. Any thread may call this.

        Raises:
            CheckpointError: there is no such tensor or row, or the source changed or ended early.
        """
        ...

    def materialize(self) -> None:
        """Fetch what planning did not need, so that `read` works without a network."""
        ...

    def identity(self) -> dict[str, Json]:
        """Return what tells this source from a changed one, to refuse a resume over the latter.

        Cheap for files (sizes and times) and the Hub (commit); tensors in memory are hashed.
        """
        ...

    def contents(self) -> Sequence[Content]:
        """Return what covmerge.json has a hash of: its files, or the commit; nothing is read for it."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...


class WeightFile(Protocol):
    """One file of weights."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Its tensors, in file order."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is particular about how it was read."""
        ...

    def read(self, name: str, rows: range | None = None) -> Tensor: ...

    def close(self) -> None: ...


def check_unchanged(file: StoredFile | Path, before: Stamp, now: Stamp) -> None:
    """Refuse another file than the headers were read from.

    Raises:
        CheckpointError: the stamps differ.
    """
    if before != now:
        raise CheckpointError(
            f"{file} changed while it was in use: let whatever writes it finish, and start again"
        )


def find_header(
    headers: Mapping[str, TensorHeader], name: str, rows: range | None, where: str
) -> TensorHeader:
    """Return the header of a tensor that is about to be read.

    Raises:
        CheckpointError: there is no such tensor, or `rows` is not a contiguous range inside it.
    """
    if name not in headers:
        raise CheckpointError(f"{where} has no tensor '{name}': its names are those of the headers")
    header = headers[name]
    inside = rows is None or (
        bool(header.shape) and rows.step == 1 and 0 <= rows.start <= rows.stop <= header.shape[0]
    )
    if not inside:
        raise CheckpointError(
            f"{where}: tensor '{name}' of shape {list(header.shape)} has no contiguous {rows} of "
            "rows: ask for rows inside its first dimension"
        )
    return header


def check_name(name: str, where: str) -> None:
    """Refuse a name that no file, terminal or report can hold.

    Raises:
        CheckpointError: it is not text, or longer than 1000 characters.
    """
    if not is_text(name):
        raise CheckpointError(f"{where} has a name that is not valid Unicode: rename it")
    if len(name) > _MAX_NAME:
        raise CheckpointError(
            f"{where} has a name of {len(name)} characters, and {_MAX_NAME} are read: rename it"
        )


def header_of(name: object, value: object, where: str) -> TensorHeader:
    """Return the header of an entry of a state dict.

    Raises:
        CheckpointError: it is not a dense tensor, with values, of a dtype that can be stored, under
            a name that is a string.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{where} has the key {name!r}: tensors are named by strings")
    check_name(name, f"{where}: tensor {shorten(name)}")
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{where}: '{name}' is a {type(value).__name__}, not a tensor: pass a state dict"
        )
    # A subclass with a dispatch of its own (quantised, distributed) only looks like its shape, and a
    # nested tensor, whose layout is strided too, has none.
    other = "NestedTensor" if value.is_nested else type(value).__name__
    odd = value.is_nested or _dispatch(type(value)) is not _dispatch(Tensor)
    if odd or value.layout is not torch.strided or value.is_meta:
        kind = other if odd else f"{value.layout} on {value.device}"
        raise CheckpointError(
            f"{where}: '{name}' is no plain dense tensor with values ({kind}): convert it first"
        )
    if value.dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(
            f"{where}: '{name}' is {value.dtype}, which cannot be stored: convert it to one of "
            f"{', '.join(map(str, SAFETENSORS_NAMES))}"
        )
    return TensorHeader(name, tuple(value.shape), value.dtype)


def _dispatch(kind: type[Tensor]) -> object:
    return next(vars(base)[_DISPATCH] for base in kind.__mro__ if _DISPATCH in vars(base))


def copy_rows(tensor: Tensor, rows: range | None) -> Tensor:
    """Copy (rows of) a tensor to fresh, contiguous memory of the CPU."""
    part = tensor.detach()
    if rows is not None:
        part = part[rows.start : rows.stop]
    return torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part)


def fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the hashes of a checkpoint's content by file name, or the commit; files are read for it.

    Raises:
        CheckpointError: it changed since it was opened, or cannot be read.
    """
    return {content.name: content.hash(at_once) for content in checkpoint.contents()}
