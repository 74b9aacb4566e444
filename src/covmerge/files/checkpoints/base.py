"""The protocol of a checkpoint, the properties that each kind of checkpoint has, and shared helpers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.types import Json, LowRank, TensorHeader
from covmerge.files.checkpoints.json_file import is_text, shorten
from covmerge.files.checkpoints.layout import SAFETENSORS_NAMES
from covmerge.files.stores.hub_cache import HubModel
from covmerge.files.stores.store import StoredFile

# covmerge.json has one hash for each of these pieces, which are mostly the files of a checkpoint.

# Called before each block with the number of bytes hashed so far; it may wait, or raise to stop.
Pace = Callable[[int], None]


@dataclass(frozen=True)
class Content:
    """A piece of a checkpoint that has a hash of its own."""

    name: str  # of the file, or of what else is hashed
    size: int  # number of bytes that are read to hash it; 0: almost none
    # Reads the piece and returns its hash with the kind, such as `sha256:1f2e...`; raises
    # CheckpointError if a file has changed since it was opened.
    hash: Callable[[Pace], str]
    # Whether it is hashed first: files beside the weights are small, and may change later without
    # harm.
    early: bool = False


def at_once(done: int) -> None:
    """Return at once: a `Pace` that never waits."""


CARD_NAME = "README.md"  # the model card

LoraForm = Literal["peft", "kohya", "diffusers"]  # the library whose names an adapter's file has
PEFT_FORM: LoraForm = "peft"

_MAX_NAME = 1000  # rules match patterns in names; real names have fewer than 200 characters
_DISPATCH = "__torch_dispatch__"


@dataclass(frozen=True)
class FactorHeader:
    """The description of one low-rank update, without its values."""

    name: str  # of the base's tensor
    # Shape of the base's tensor as it is stored, all axes after the first as one: `(c_out, c_in ·
    # window)` for a convolution, `(d_out, 1)` for a bias, and `(count, d_out · d_in)` for a stack
    # of matrices.
    shape: tuple[int, int]
    rank: int  # number of terms; for a stack, of each matrix
    dtype: torch.dtype  # of the stored factors
    # Number of elements of the factors that are held while the update, or rows of it, are read.
    elements: int
    # Whether the layer is stored as `(d_in, d_out)`, like embeddings and GPT-2's layers.
    transposed: bool = False
    table: bool = False  # whether the layer is an embedding
    # Whether it is a stack of matrices, or one matrix of a stack with two shared stored factors.
    stacked: bool = False


# Reads a tensor, or some of its rows, as it is stored.
Read = Callable[[str, range | None], Tensor]


class Packed(Protocol):
    """A tensor that is stored packed, together with its scales."""

    @property
    def header(self) -> TensorHeader:
        """Header of the unpacked tensor."""
        ...

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the stored tensors that it consists of."""
        ...

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        """Write rows of the unpacked tensor, computed in float32, to `out`, which rounds to its dtype."""
        ...


@dataclass(frozen=True)
class Quantisation:
    """The quantised form of a checkpoint that a view shows as plain tensors."""

    stored: Checkpoint
    packed: Mapping[str, Packed]  # the tensors that are stored packed, by their plain names
    # The settings that name the format: `quantization_config`, or those of a GGUF file.
    settings: Mapping[str, Any]
    # Stored tensors without meaning for plain weights, such as scales of activations.
    unused: frozenset[str]
    derived: bool = False  # whether the plain tensors have other names or rows than the stored ones


class Kind(Protocol):
    """The properties that tell the kind of a checkpoint; the defaults are those of a plain model."""

    is_adapter: bool = False  # whether it has updates of a base and is no model
    # Low-rank updates, by the base's names.
    low_rank: Mapping[str, FactorHeader] = MappingProxyType({})
    replaced: Collection[str] = ()  # names of the base's tensors that an adapter replaces
    form: LoraForm = PEFT_FORM  # the library whose names an adapter's file has
    quantisation: Quantisation | None = None  # the stored form, if that is quantised
    # Names of tensors that the config ties, with the stored tensors they are tied to, if the model
    # is read untied.
    untied: Mapping[str, str] | None = None
    # Names of tensors in memory that are the same as another one, with the name of that one.
    shared: Mapping[str, str] = MappingProxyType({})
    # For each layer, the layer of the stored model, if it is read as a stack of slices.
    order: tuple[int, ...] | None = None
    is_source: bool = True  # whether it is a source of its own, and not only a stand-in for a base
    # For an adapter in memory, some weights of the model that has it, by their names there.
    under: Mapping[str, Tensor] = MappingProxyType({})
    decides: bool = True  # whether its weights affect the result
    is_held: bool = False  # whether its tensors are in the memory of this process
    is_far: bool = False  # whether it is read from another machine
    # Whether the processes of a training saved it, each a part of the tensors.
    divided: bool = False
    weight_names: Sequence[str] = ()  # names of its files of weights, in its folder

    def gives(self, name: str) -> bool:
        """Return whether a tensor, if the model has it, is taken from this checkpoint."""
        return True

    def keeps_ties(self, name: str) -> bool:
        """Whether what is tied to a tensor that an adapter changes stays tied to it."""
        return False

    def owner(self, name: str) -> Kind:
        """Return the checkpoint that stores a tensor: an expert, if this one stands for a base."""
        return self

    def held(self, name: str, elements: int) -> int:
        """Return how many elements are held in memory while `elements` elements of a tensor are read."""
        return elements

    def readme(self) -> Path | None:
        """Return the path of its model card, or None; a card on the Hub is fetched.

        Raises:
            CheckpointError: the card cannot be fetched, or is a link that leads out of its folder.
        """
        return None

    def materialize(self) -> None:
        """Fetch all that planning did not need, so that `read` works without a network."""

    def close(self) -> None:
        """Release files and memory."""

    def read_update(self, name: str, rows: range | None = None) -> LowRank | tuple[LowRank, ...]:
        """Return the factors of rows of an update; for a stack, the factors of each matrix in `rows`.

        Raises:
            CheckpointError: there is no such update, or the source changed or ended early.
        """
        raise CheckpointError(f"there is no update of '{name}': a model has none, only adapters do")


class Checkpoint(Kind, Protocol):
    """A set of named tensors: headers are known at once, values are read when they are asked for."""

    @property
    def source(self) -> str:
        """The source as the user wrote it."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The header of every stored tensor, in file order; planning needs only these."""
        ...

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The parsed `config.json`, or None."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder of companion files (tokenizer, generation config), or None.

        For a repository of the Hub it is known only after `materialize`.
        """
        ...

    @property
    def hub(self) -> HubModel | None:
        """The model of the Hugging Face Hub that this checkpoint is, if that is known."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of the report about how the source was read."""
        ...

    def companions(self) -> Path | None:
        """Return the folder with its companion files; those of a repository of the Hub are fetched.

        Weights are not fetched, and `folder` may still be unknown.
        """
        ...

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Return one tensor, or a contiguous range of its first axis, in its stored dtype.

        The tensor is on the CPU, contiguous, and belongs to the caller. Any thread may call this.

        Raises:
            CheckpointError: there is no such tensor or row, or the source changed or ended early.
        """
        ...

    def identity(self) -> dict[str, Json]:
        """Return facts that differ once the source has changed, so that a resume can be refused.

        They are cheap for files (sizes and times) and the Hub (commit); tensors in memory are hashed.
        """
        ...

    def contents(self) -> Sequence[Content]:
        """Return the pieces whose hashes covmerge.json has, files or the commit; nothing is read yet."""
        ...


class WeightFile(ABC):
    """A file of weights; by default no file is open between reads."""

    headers: Mapping[str, TensorHeader]  # of its tensors, in file order
    notes: tuple[str, ...] = ()  # about how it was read
    settings: Mapping[str, Any] | None = None  # the file's own quantisation settings

    @abstractmethod
    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""

    def close(self) -> None:
        """Release files and memory."""
        return None


def refuse_adapter(checkpoint: Checkpoint, why: str, expert: str = "", then: str = "") -> None:
    """Raise if a checkpoint is an adapter, where a whole model is needed, and say why.

    `expert` is its name in the recipe. `then` says what else to do with the model that it is folded into.
    """
    if checkpoint.is_adapter:
        raise InputError(
            (f"expert '{expert}' ({checkpoint.source})" if expert else checkpoint.source)
            + f" is an adapter, and {why}: "
            "fold it into its base first (`covmerge merge --base BASE --expert lora=ADAPTER OUT`)"
            + then
        )


def check_unchanged(file: StoredFile | Path, before: object, now: object) -> None:
    """Raise if a file's stamp or hash is not the one from when it was opened."""
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
    """Raise if a name cannot be written to a file, terminal or report.

    Raises:
        CheckpointError: the name is not text, or longer than 1000 characters.
    """
    if not is_text(name):
        raise CheckpointError(f"{where} has a name that is not valid Unicode: rename it")
    if len(name) > _MAX_NAME:
        raise CheckpointError(
            f"{where} has a name of {len(name)} characters, and {_MAX_NAME} are read: rename it"
        )


def tensor_name(key: object, where: str, then: str = "") -> str:
    """Return a key of a state dict as a tensor's name; `then` is the advice for other keys."""
    if not isinstance(key, str):
        raise CheckpointError(
            f"{where} has the key {shorten(key)}: tensors are named by strings{then}"
        )
    check_name(key, f"{where}: tensor {shorten(key)}")
    return key


def header_of(name: object, value: object, where: str) -> TensorHeader:
    """Return the header of an entry of a state dict.

    Raises:
        CheckpointError: the entry is not a dense tensor with values, its dtype cannot be stored, or
            its name is no string.
    """
    name = tensor_name(name, where)
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{where}: '{name}' is a {type(value).__name__}, not a tensor: {_instead(name, value)}"
        )
    # Tensors of a subclass with its own dispatch (quantised, distributed) only report their shape.
    # A nested tensor has no shape, although its layout is strided.
    other = "NestedTensor" if value.is_nested else type(value).__name__
    odd = value.is_nested or _dispatch(type(value)) is not _dispatch(Tensor)
    if odd or value.layout is not torch.strided or value.is_meta:
        if value.is_meta:
            raise CheckpointError(
                f"{where}: '{name}' is on the device meta, which holds no values: load its weights "
                "first, as from_pretrained without a device map does"
            )
        kind = other if odd else f"{value.layout} on {value.device}"
        if hasattr(value, "full_tensor"):
            raise CheckpointError(
                f"{where}: '{name}' is a {kind}, of which each process has a part: pass "
                "{name: tensor.full_tensor()} of all of them, which every process has to call"
            )
        raise CheckpointError(
            f"{where}: '{name}' is no plain dense tensor with values ({kind}): convert it first"
        )
    header = TensorHeader(name, tuple(value.shape), value.dtype)
    check_storable(header, where)
    return header


def check_storable(header: TensorHeader, where: str) -> None:
    """Raise if a tensor's dtype cannot be stored in safetensors."""
    if header.dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(
            f"{where}: '{header.name}' is {header.dtype}, which cannot be stored: convert it to one of "
            f"{', '.join(map(str, SAFETENSORS_NAMES))}"
        )


def _instead(name: str, value: object) -> str:
    """Return advice on what to pass instead of an entry that is no tensor."""
    if isinstance(value, Mapping):
        return f"where its tensors lie below '{name}', pass that entry alone"
    if "_packed_params" in name:  # of torch.ao
        return "pass the model as it was before it was quantised"
    if hasattr(value, "__array__"):
        return "pass torch.from_numpy of each array"
    return "leave it out, and pass tensors alone"


def _dispatch(kind: type[Tensor]) -> object:
    return next(vars(base)[_DISPATCH] for base in kind.__mro__ if _DISPATCH in vars(base))


def copy_rows(tensor: Tensor, rows: range | None) -> Tensor:
    """Copy a tensor, or some of its rows, to fresh, contiguous memory of the CPU."""
    part = tensor.detach()
    if rows is not None:
        part = part[rows.start : rows.stop]
    return torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part)


def fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the hashes of a checkpoint's pieces by name, or the commit; this reads the files."""
    return {content.name: content.hash(at_once) for content in checkpoint.contents()}
