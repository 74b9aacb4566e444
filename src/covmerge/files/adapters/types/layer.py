"""The description of an adapter type: its tensors for a layer, and how it changes the layer's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import LowRank, TensorHeader

if TYPE_CHECKING:
    from covmerge.files.adapters.config import AdapterConfig

linalg: Any = torch.linalg  # torch has no types for it
Shape = tuple[int, ...]
_Parts = Mapping[str, TensorHeader]
ALPHA = "alpha"


@dataclass(frozen=True)
class Layer:
    """One layer that an adapter changes.

    Attributes:
        where: the adapter, for errors.
        name: name of the module.
        shape: shape of the weight, `(d_out, d_in)` or `(d_out, d_in, *window)`; an embedding's is
            `(d, rows)`.
        parts: the adapter's tensors for the layer, by their meaning.
        config: configuration of the adapter; None: its file has none.
        read: function that reads one of the parts in the dtype of the computation.
        base: function that reads rows of the base's weight, flattened to `(rows, d_in · window)`.
        base_bias: function that reads the base's bias.
        stored: the dtype of the base's stored weight.
        widest: the largest `d_out` and `d_in` of all layers of the adapter.
        count: number of layers of the adapter.
        rows: the rows of the weight that are wanted.
        is_rest: whether `base` reads a weight that the adapter's file stores, from the trained model.
    """

    where: str
    name: str
    shape: Shape
    parts: _Parts
    config: AdapterConfig | None
    read: Callable[[TensorHeader], Tensor]
    base: Callable[[slice], Tensor]
    base_bias: Callable[[], Tensor]
    stored: torch.dtype
    widest: tuple[int, int] = (0, 0)
    count: int = 0
    rows: slice = field(default_factory=lambda: slice(None))
    is_rest: bool = False

    @property
    def d_out(self) -> int:
        """Number of rows of the weight."""
        return self.shape[0]

    @property
    def d_in(self) -> int:
        """Number of columns of the weight, without the window of a convolution."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """Number of columns of the weight as a matrix."""
        return prod(self.shape[1:])

    @property
    def weight(self) -> Tensor:
        """The wanted rows of the base's weight."""
        return self.base(self.rows)

    def __getitem__(self, part: str) -> Tensor:
        """Read one part."""
        return self.read(self.parts[part])

    def __contains__(self, part: str) -> bool:
        """Return whether the adapter has this part for the layer."""
        return part in self.parts

    def size(self, part: str, axis: int) -> int:
        """Return the length of one axis of a part, or 0 if there is no such part or axis."""
        header = self.parts.get(part)
        return 0 if header is None or len(header.shape) <= axis else header.shape[axis]

    def rank(self, part: str, axis: int) -> int:
        """Return the configuration's rank; for a file without one, the length of an axis of a part."""
        return self.size(part, axis) if self.config is None else self.config.rank(self.name)

    def vector(self, part: str, length: int) -> Shape:
        """Return a part's shape if it is a vector of `length` numbers along any axis, else `(length,)`."""
        shape = self.parts[part].shape if part in self.parts else ()
        return shape if prod(shape) == length == max(shape, default=1) else (length,)

    def option(self, name: str, default: object = None) -> Any:
        """Return a field of the configuration, or the default."""
        return default if self.config is None else self.config.fields.get(name, default)

    def is_older(self, kind: AdapterType) -> bool:
        """Return whether the adapter was saved by an older PEFT that computed this type differently."""
        if self.config is None or kind.older is None:
            return False
        return kind.older[0] not in self.config.fields

    def integer(self, name: str, default: int, least: int = 0) -> int:
        """Return a field that must be a whole number of at least `least`."""
        value: object = self.option(name, default)
        if type(value) is not int or value < least:
            self._refuse_option(name, f"which is a whole number of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a field that must be a finite number."""
        value: object = self.option(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            self._refuse_option(name, "which is a finite number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that must be true or false."""
        value: object = self.option(name, default)
        if not isinstance(value, bool):
            self._refuse_option(name, "which is true or false")
        return value

    def scaling(self, rank: int) -> float:
        """Return alpha / rank, with alpha from the file or the configuration; 1 if neither has it."""
        if ALPHA in self.parts:
            return float(self[ALPHA]) / rank
        return 1.0 if self.config is None else self.config.scale(self.name, rank)

    def refuse(self, why: str) -> NoReturn:
        """Raise an error about this layer."""
        raise CheckpointError(f"{self.where}: '{self.name}' {why}")

    def _refuse_option(self, name: str, why: str) -> NoReturn:
        assert self.config is not None
        self.config.refuse(name, why)


@dataclass(frozen=True, eq=False)
class AdapterType:
    """One type of adapters: how it changes a layer.

    Either one of `update`, `factors` and `weight` is set, or only `whole`.

    Attributes:
        name: PEFT's `peft_type`, or LyCORIS's name of the algorithm.
        equation: the layer's new weight as a function of its weight W, for the docs.
        ends: ends of the tensors' names, each with its part; longer ends come first.
        shapes: the tensors that a layer must have, with their shapes; other tensors are refused.
        update: the wanted rows of the update, as a matrix.
        factors: the whole update as low-rank factors.
        weight: the wanted rows of the new weight.
        rest: the weight without the adapter's update, for types with which PEFT changes the base
            itself.
        bias: the new bias, if the type changes the bias too.
        has_bias: whether it changes the bias of a given layer.
        rank: the rank of the factors.
        matrix: the shape of the weight as a matrix if the shapes of the parts determine it, else None.
        fields: the type's own fields of `adapter_config.json`, read or without effect after training;
            all types have `init_weights`.
        shared: names of tensors that layers share, each with its part; if a name ends in a dot, the
            rest of the tensor's name belongs to the part's name.
        of_layer: the shared tensors that a layer uses, by the layer's name.
        alpha: the field with the number that is divided by the rank.
        leaf: the tensor of a layer that it changes.
        vectors: whether that tensor may have a single axis.
        whole: ends of names of whole tensors, with the name of the tensor that they replace.
        by_rows: whether some rows can be computed from the same rows of the base.
        integers: parts that are whole numbers; all other parts are floating.
        flags: parts that are zero or one, in any dtype.
        keeps_ties: whether tensors tied to the changed tensor stay tied to it.
        adds_bias: whether a layer without a bias would get one.
        marks: parts that no other type of files without configuration has.
        beside: ends of names that are parts only if one of the `marks` is there too.
        refused: a field and its value with which the effect is not determined, and the reason.
        older: a field that older PEFTs did not write, and what they computed differently.
    """

    name: str
    equation: str
    ends: Mapping[str, str]
    shapes: Callable[[Layer], Mapping[str, Shape]] = lambda _: {}
    update: Callable[[Layer], Tensor] | None = None
    factors: Callable[[Layer], LowRank] | None = None
    weight: Callable[[Layer], Tensor] | None = None
    rest: Callable[[Layer], Tensor] | None = None
    bias: Callable[[Layer], Tensor] | None = None
    has_bias: Callable[[Layer], bool] = lambda _: True
    rank: Callable[[Layer], int] | None = None
    matrix: Callable[[Mapping[str, Shape]], tuple[int, int] | None] | None = None
    fields: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict[str, str])
    of_layer: Callable[[str, _Parts], _Parts] = lambda _, shared: shared
    whole: Mapping[str, str] = field(default_factory=dict[str, str])
    by_rows: bool = True
    integers: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    keeps_ties: bool = False
    adds_bias: bool = False
    marks: frozenset[str] = frozenset()
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: tuple[str, object, str] | None = None
    older: tuple[str, str] | None = None
    alpha: str = ""
    leaf: str = "weight"
    vectors: bool = False

    def shared_part(self, name: str) -> str | None:
        """Return the part of a tensor that layers share, or None if it is not shared."""
        name = name.removeprefix("base_model.")
        for key, part in self.shared.items():
            if name == key or (key.endswith(".") and name.startswith(key)):
                return part + name.removeprefix(key)
        return None

    @property
    def needs_base(self) -> bool:
        """Whether the update depends on the base's values."""
        return self.weight is not None or self.bias is not None


def check_shapes(kind: AdapterType, layer: Layer) -> None:
    """Check the names, dtypes and shapes of a layer's tensors, before any of them is read."""
    expected = kind.shapes(layer)
    for part in expected:  # first, because ranks, and so the expected shapes, come from other parts
        if part not in layer:
            names = ", ".join(f"'{header.name}'" for header in layer.parts.values())
            ends = (end.lstrip(".") for end, of in kind.ends.items() if of == part)
            layer.refuse(
                f"has {names} and no '{next(ends, part)}' beside it: the file is incomplete, fetch it again"
            )
    for part, shape in expected.items():
        header = layer.parts[part]
        if header.numel == 0 and 0 not in shape[-1:]:
            layer.refuse(
                f"has '{header.name}' of shape {list(header.shape)}, as the parts of a sharded model are: "
                "save the adapter again from gathered weights"
            )
        wrong = header.dtype.is_floating_point == (part in kind.integers)
        if (wrong and part not in kind.flags) or header.complex:
            layer.refuse(f"has '{header.name}' of dtype {header.dtype}: fetch the adapter again")
        if _without_ones(header.shape) != _without_ones(shape):
            layer.refuse(
                f"is {list(layer.shape)} in the base, and '{header.name}' is of shape "
                f"{list(header.shape)} where {list(shape)} belongs: pass the base that the adapter was "
                "trained on, or fetch the adapter again"
            )
    for part, header in layer.parts.items():
        if part not in expected:
            layer.refuse(
                f"has '{header.name}', which {kind.name} has no use for beside "
                f"{', '.join(sorted(expected))}: the file is damaged, fetch it again"
            )


def _without_ones(shape: Shape) -> Shape:
    """Drop trailing ones: some libraries store a linear layer as a convolution with a window of 1."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def alpha_of(layer: Layer) -> dict[str, Shape]:
    """Return the shape of alpha, one number, if the file has it."""
    return {ALPHA: layer.vector(ALPHA, 1)} if ALPHA in layer else {}


def check_places(layer: Layer, places: Tensor, count: int) -> None:
    """Check that all places are between 0 and `count` − 1."""
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < count:
        layer.refuse(
            f"is {list(layer.shape)} in the base, and its places go from {int(places.min())} to "
            f"{int(places.max())} of {count}: pass the base that the adapter was trained on"
        )


def lengths(tensor: Tensor, *axes: int) -> Tensor:
    """Return the lengths of vectors along some axes; these axes keep the length 1."""
    return cast("Tensor", linalg.vector_norm(tensor, dim=axes, keepdim=True))


def cayley(skew: Tensor) -> Tensor:
    """Return (I − Q)(I + Q)⁻¹ for skew-symmetric matrices Q `(n, b, b)`."""
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return cast("Tensor", linalg.solve(eye + skew, eye - skew, left=False))


def block_diagonal_times(weight: Tensor, blocks: Tensor) -> Tensor:
    """Return W · blockdiag(blocks) without building that matrix; shapes `(d_out, n·b)` and `(n, b, b)`."""
    count, size, _ = blocks.shape
    apart = weight.reshape(len(weight), count, size).transpose(0, 1)
    return torch.bmm(apart, blocks).transpose(0, 1).reshape(weight.shape)
