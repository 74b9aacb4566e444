"""What a checkpoint is to the rest of covmerge, what each kind answers for itself, and what all share."""

from __future__ import annotations

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

# What covmerge.json has a hash of, piece by piece: most often the files of a checkpoint.

# Called before each block with the bytes of the piece that have been hashed; it may wait, or raise to stop.
Pace = Callable[[int], None]


@dataclass(frozen=True)
class Content:
    """A piece of a checkpoint that is hashed by itself.

    Attributes:
        name: of the file, or what else is hashed.
        size: bytes that are read for it; 0: next to none.
        hash: reads it, and returns the hash with its kind, such as `sha256:1f2e...`; what was opened
            and has changed since is a CheckpointError.
        early: it comes before the others: what lies beside the weights is small, and may change later
            without harm.
    """

    name: str
    size: int
    hash: Callable[[Pace], str]
    early: bool = False


def at_once(done: int) -> None:
    """Wait for nobody: a `Pace`."""


CARD_NAME = "README.md"  # the model card

LoraForm = Literal["peft", "kohya", "diffusers"]  # whose names an adapter's file has
PEFT_FORM: LoraForm = "peft"

_MAX_NAME = 1000  # rules look for patterns in them; real ones have less than 200
_DISPATCH = "__torch_dispatch__"


@dataclass(frozen=True)
class FactorHeader:
    """One update of low rank; nothing of its content.

    Attributes:
        name: of the base's tensor.
        shape: of the base's tensor as it is stored, its axes after the first taken together: of a
            convolution `(c_out, c_in · window)`, of a bias `(d_out, 1)`, of a stack of matrices
            `(count, d_out · d_in)`.
        rank: number of terms, of each matrix of a stack.
        dtype: in which the factors are stored.
        elements: of the factors that are held while the update, or rows of it, are read.
        transposed: the layer is stored as `(d_in, d_out)`, as embeddings and GPT-2's are.
        table: the layer is an embedding.
        stacked: it is a stack of matrices, or one of those, that share two stored factors.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    dtype: torch.dtype
    elements: int
    transposed: bool = False
    table: bool = False
    stacked: bool = False


# Reads (rows of) a tensor as it is stored.
Read = Callable[[str, range | None], Tensor]


class Packed(Protocol):
    """A tensor that is stored packed, together with its scales."""

    @property
    def header(self) -> TensorHeader:
        """What it is unpacked."""
        ...

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored tensors that it is made of."""
        ...

    def fill(self, out: Tensor, rows: range, read: Read) -> None:
        """Write rows of it, computed in float32, to `out`, which rounds them to its dtype."""
        ...


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is stored quantised, of which a view shows plain tensors.

    Attributes:
        stored: the checkpoint as it is stored.
        packed: the tensors that are stored packed, by their plain names.
        settings: what says the format: `quantization_config`, or what a GGUF file says.
        unused: stored tensors that mean nothing for plain weights: scales of activations.
        derived: whether its tensors have other names or rows than the stored ones.
    """

    stored: Checkpoint
    packed: Mapping[str, Packed]
    settings: Mapping[str, Any]
    unused: frozenset[str]
    derived: bool = False


class Kind(Protocol):
    """What a checkpoint answers of its kind; these are a plain model's answers.

    Attributes:
        is_adapter: whether it is updates of a base, and no model.
        low_rank: updates of low rank, by the base's names.
        replaced: names of the tensors that an adapter has in place of the base's.
        form: whose names an adapter's file has.
        quantisation: how it is stored, where that is quantised.
        untied: names of tensors that its config ties, with the stored ones that they are tied to, where it
            is read untied.
        shared: names of tensors in memory that are one with another, with the name of that.
        order: by layer, the layer of the stored model, where it is read as a stack of slices.
        is_source: whether it is a source of its own, and does not only stand for a base.
        under: of an adapter in memory, some weights of the model that it is in, by their names there.
        decides: whether its weights decide the result.
        is_held: whether its tensors are in the memory of this process.
        is_far: whether it is read from another machine.
        divided: whether the processes of a training saved it, each a part of the tensors.
        weight_names: of its files of weights, in its folder.
    """

    is_adapter: bool = False
    low_rank: Mapping[str, FactorHeader] = MappingProxyType({})
    replaced: Collection[str] = ()
    form: LoraForm = PEFT_FORM
    quantisation: Quantisation | None = None
    untied: Mapping[str, str] | None = None
    shared: Mapping[str, str] = MappingProxyType({})
    order: tuple[int, ...] | None = None
    is_source: bool = True
    under: Mapping[str, Tensor] = MappingProxyType({})
    decides: bool = True
    is_held: bool = False
    is_far: bool = False
    divided: bool = False
    weight_names: Sequence[str] = ()

    def gives(self, name: str) -> bool:
        """Whether a tensor, if the model has such a one, is taken from it."""
        del name
        return True

    def keeps_ties(self, name: str) -> bool:
        """Whether what is tied to a tensor that an adapter changes stays tied to it."""
        del name
        return False

    def held(self, name: str, elements: int) -> int:
        """Return how many elements are held while so many of a tensor in `headers` are read."""
        del name
        return elements

    def read_update(self, name: str, rows: range | None = None) -> LowRank | tuple[LowRank, ...]:
        """Return the factors of rows of an update; of rows of a stack, those of each matrix.

        Raises:
            CheckpointError: there is no such update, or the source changed or ended early.
        """
        del rows
        raise CheckpointError(f"there is no update of '{name}': a model has none, only adapters do")


class Checkpoint(Kind, Protocol):
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

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """How the file itself says that it is quantised, if it does."""
        ...

    def read(self, name: str, rows: range | None = None) -> Tensor: ...

    def close(self) -> None: ...


def refuse_adapter(checkpoint: Checkpoint, why: str, expert: str = "", then: str = "") -> None:
    """Refuse an adapter where whole models are needed.

    Args:
        checkpoint: that is given.
        why: they are needed.
        expert: its name in the recipe, if it has one.
        then: what else is to be done with the model that this makes.
    """
    if checkpoint.is_adapter:
        raise InputError(
            (f"expert '{expert}' ({checkpoint.source})" if expert else checkpoint.source)
            + f" is an adapter, and {why}: "
            "fold it into its base first (`covmerge merge --base BASE --expert lora=ADAPTER OUT`)"
            + then
        )


def check_unchanged(file: StoredFile | Path, before: object, now: object) -> None:
    """Refuse another file than was opened, by its stamp or a hash of it."""
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


def tensor_name(key: object, where: str, then: str = "") -> str:
    """Return a key of a state dict as the name of a tensor; `then` says what is to be done with others."""
    if not isinstance(key, str):
        raise CheckpointError(
            f"{where} has the key {shorten(key)}: tensors are named by strings{then}"
        )
    check_name(key, f"{where}: tensor {shorten(key)}")
    return key


def header_of(name: object, value: object, where: str) -> TensorHeader:
    """Return the header of an entry of a state dict.

    Raises:
        CheckpointError: it is not a dense tensor, with values, of a dtype that can be stored, under
            a name that is a string.
    """
    name = tensor_name(name, where)
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{where}: '{name}' is a {type(value).__name__}, not a tensor: {_instead(name, value)}"
        )
    # A subclass with a dispatch of its own (quantised, distributed) only reports its shape, and a
    # nested tensor, whose layout is strided too, has none.
    other = "NestedTensor" if value.is_nested else type(value).__name__
    odd = value.is_nested or _dispatch(type(value)) is not _dispatch(Tensor)
    if odd or value.layout is not torch.strided or value.is_meta:
        if value.is_meta:
            raise CheckpointError(
                f"{where}: '{name}' is on the device meta, which holds no values: load its weights "
                "first, as from_pretrained without a device map does"
            )
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


def _instead(name: str, value: object) -> str:
    """What to pass where an entry of a state dict is no tensor."""
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
    """Copy (rows of) a tensor to fresh, contiguous memory of the CPU."""
    part = tensor.detach()
    if rows is not None:
        part = part[rows.start : rows.stop]
    return torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part)


def fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the hashes of a checkpoint's content by file name, or the commit; files are read for it."""
    return {content.name: content.hash(at_once) for content in checkpoint.contents()}
