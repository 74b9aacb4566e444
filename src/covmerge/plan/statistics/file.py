"""Statistics files, `*.covstats.safetensors`: small enough to share, and tied to their model.

A safetensors file with `gram/<tensor>`, the mean of z zᵀ over the inputs z of a layer
`(d_in, d_in)`, and `fisher/<tensor>`, the diagonal Fisher information in the shape of the stored
tensor, all float32. Layers with the same input share one matrix. `__metadata__` has the other facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from covmerge.base.errors import InputError, did_you_mean
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.header import SafetensorsFile
from covmerge.files.checkpoints.json_file import parse_object, shorten
from covmerge.files.stores.address import local_path
from covmerge.files.stores.local import local_file
from covmerge.maths.linalg.stored import all_finite

SUFFIX = ".covstats.safetensors"
FORMAT = "1"
FORMAT_KEY, VERSION_KEY, ABOUT_KEY = "covstats", "covmerge", "about"

Kind = Literal["gram", "fisher"]
Protocol = Literal["inputs", "regmean++"]

_PROBED_BYTES = 4096
_HASHED_AT_ONCE = 2**20  # elements
_AGAIN = "collect it again with `covmerge collect`"


class About(BaseModel):
    """The facts about a statistics file's tensors, from its metadata.

    Attributes:
        source: name of the model when the statistics were collected.
        probe: the model's `probe`.
        protocol: which inputs the Gram matrices are of: `inputs` of the expert's own layers, or
            `regmean++`, of its layers behind merged blocks, as covmerge-lab collects them.
        examples: number of examples.
        labels: which labels the Fisher information is for; empty without Fisher information.
        generated: how the examples were made, if the model itself wrote them
            (`covmerge.plan.statistics.Generated`): then there was no external data.
        rows: key -> number of layer inputs (gram) or examples (fisher) behind it.
        aliases: key -> the key whose tensor is used for it.
        totals: kind -> ‖·‖₂ over all its tensors, with every alias counted.
        content: SHA-256 of the tensors.
        notes: notes for the user.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    source: str
    probe: str
    protocol: Protocol
    examples: Annotated[int, Field(ge=1)]
    labels: str
    generated: dict[str, str | int | float] | None = None
    rows: dict[str, Annotated[int, Field(ge=1)]]
    aliases: dict[str, str]
    totals: dict[Kind, Annotated[float, Field(ge=0)]]
    content: str
    notes: list[str]


class StatisticsFile:
    """A statistics file with a checked header; tensors are read when they are asked for.

    Attributes:
        path: the file.
        about: the facts in its metadata.
    """

    def __init__(self, path: Path, file: SafetensorsFile, about: About, metadata: bytes) -> None:
        self.path = path
        self.about = about
        self._file = file
        self._metadata = metadata

    @classmethod
    def open(cls, path: str | Path) -> StatisticsFile:
        """Open a file; only its header is read.

        Raises:
            InputError: the file is missing, malformed, or no statistics file.
        """
        path = local_path(path).expanduser()
        file = SafetensorsFile(local_file(path))
        about = _about(file.metadata(), path)
        _check_tensors(file.headers, about, path)
        return cls(path, file, about, file.header_text())

    def names(self, kind: str) -> tuple[str, ...]:
        """Return names of the tensors, as in the expert's checkpoint, that have this statistic."""
        return tuple(key.removeprefix(f"{kind}/") for key in self.about.rows if _of(key) == kind)

    def rows(self, kind: str, name: str) -> int:
        """Return the number of layer inputs (gram) or examples (fisher) behind a statistic."""
        return self.about.rows[self._key(kind, name)]

    def header(self, kind: str, name: str) -> TensorHeader:
        stored = self._file.headers[self._stored(kind, name)]
        return TensorHeader(name, stored.shape, stored.dtype)

    def total(self, kind: str) -> float:
        """Return ‖·‖₂ of a statistic over all tensors of the expert."""
        if kind not in self.about.totals:
            raise InputError(
                f"{self.path} holds no {kind} statistics, only {', '.join(self.about.totals)}: "
                f"collect them with `covmerge collect --kind {kind}`"
            )
        return self.about.totals[kind]

    def read(self, kind: str, name: str, rows: range | None = None) -> Tensor:
        """Return one statistic, or a contiguous range of its rows, in float32.

        Raises:
            InputError: it is not in the file, or has values that such a statistic cannot have.
        """
        value = self._file.read(self._stored(kind, name), rows)
        if not all_finite(value) or (kind == "fisher" and bool((value < 0).any())):
            raise InputError(
                f"{self.path}: the {kind} statistic of '{name}' holds values that are not finite or "
                f"not positive: {_AGAIN}"
            )
        return value

    def check_model(self, what: str, checkpoint: Checkpoint) -> None:
        """Raise if the statistics were collected on a model with other weights."""
        if probe(checkpoint) != self.about.probe:
            raise InputError(
                f"{self.path} was collected on {shorten(self.about.source)}, which has other weights "
                f"than {what} ({checkpoint.source}): pass the statistics of this "
                f"model, or {_AGAIN}"
            )

    def check_content(self) -> None:
        """Check the hash of all tensors, which reads them once."""
        digest = hashlib.sha256()
        for key, header in self._file.headers.items():  # in the order of the file
            digest.update(key.encode())
            for rows in header.row_blocks(_HASHED_AT_ONCE):
                value = self._file.read(key, rows)
                digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        if self.about.content != f"sha256:{digest.hexdigest()}":
            raise _damaged(self.path, "its tensors are not those whose hash it states")

    def identity(self) -> Json:
        """Return facts that identify the file's content, wherever the file is."""
        # The metadata contains the hash of the tensors.
        fields = {"kind": "statistics", "header": hashlib.sha256(self._metadata).hexdigest()}
        written = self.about.generated
        return fields if written is None else {**fields, "generated": written}

    def close(self) -> None:
        self._file.close()

    def _key(self, kind: str, name: str) -> str:
        key = f"{kind}/{name}"
        if key not in self.about.rows:
            near = did_you_mean(name, self.names(kind))
            raise InputError(f"{self.path} holds no {kind} statistic of '{name}'.{near}")
        return key

    def _stored(self, kind: str, name: str) -> str:
        key = self._key(kind, name)
        return self.about.aliases.get(key, key)


def probe(checkpoint: Checkpoint) -> str:
    """Return a hash that tells a model from its base and its siblings and is cheap to compute.

    It is the SHA-256 of the sorted headers and at most the first 4 KiB of every tensor.

    Example:
        >>> from covmerge.files.checkpoints.open import open_checkpoint
        >>> a, b = ({"w": torch.full((2, 2), value)} for value in (1.0, 2.0))
        >>> probe(open_checkpoint(a)) == probe(open_checkpoint(b))
        False
    """
    digest = hashlib.sha256()
    for name, header in sorted(checkpoint.headers.items()):
        digest.update(f"{name!r} {header.dtype} {header.shape}\n".encode())
        digest.update(_first_bytes(checkpoint, header))
    return f"sha256:{digest.hexdigest()}"


def _first_bytes(checkpoint: Checkpoint, header: TensorHeader) -> bytes:
    rows = None
    if header.shape:
        row_bytes = header.dtype.itemsize * prod(header.shape[1:])
        rows = range(min(header.shape[0], -(-_PROBED_BYTES // max(1, row_bytes))))
    start = checkpoint.read(header.name, rows).reshape(-1).view(torch.uint8)
    return start[:_PROBED_BYTES].numpy().tobytes()


def _about(metadata: Mapping[str, str], path: Path) -> About:
    version = metadata.get(FORMAT_KEY)
    if version is None:
        raise InputError(
            f"{path} is no statistics file (its metadata has no '{FORMAT_KEY}'): pass one that "
            "`covmerge collect` wrote"
        )
    if version != FORMAT:
        raise InputError(
            f"{path} has the format {shorten(version)} of statistics files, this covmerge reads "
            f"{FORMAT}: {_AGAIN}"
        )
    about: dict[str, Any] = parse_object(
        metadata.get(ABOUT_KEY, "").encode(errors="replace"), f"the metadata of {path}"
    )
    try:
        return About.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{shorten(where)}: {first['msg'].lower()}") from error


def _check_tensors(headers: Mapping[str, TensorHeader], about: About, path: Path) -> None:
    """Check that tensors, aliases and rows have matching keys."""
    known = headers.keys() | about.aliases.keys()
    if known != about.rows.keys() or headers.keys() & about.aliases.keys():
        raise _damaged(path, "its tensors and its metadata do not agree")
    for key in about.rows:
        if _of(key) not in about.totals:
            raise _damaged(path, f"{shorten(key)} is of no kind that it lists")
    for key, stored in about.aliases.items():
        if stored not in headers or _of(key) != "gram" or _of(stored) != "gram":
            what = f"{shorten(key)} stands for {shorten(stored)}, which is no Gram matrix in it"
            raise _damaged(path, what)
    for key, header in headers.items():
        square = len(header.shape) == 2 and header.shape[0] == header.shape[1]
        if header.dtype is not torch.float32 or (_of(key) == "gram" and not square):
            raise _damaged(path, f"{shorten(key)} is {header.dtype} of shape {list(header.shape)}")


def _of(key: str) -> str:
    return key.partition("/")[0]


def _damaged(path: Path, problem: str) -> InputError:
    return InputError(f"{path} is a damaged statistics file ({problem}): {_AGAIN}")
