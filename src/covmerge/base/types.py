"""The types that every part of covmerge shares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from math import hypot, prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics
from covmerge.base.diagnostics import Json as Json

_T = TypeVar("_T")


class Role(str, Enum):
    """The role of a tensor in its model; `covmerge.files.tensors` decides it."""

    LINEAR = "linear"  # (d_out, d_in)
    CONV1D = "conv1d"  # GPT-2's Conv1D: a linear layer stored as (d_in, d_out)
    CONV = "conv"  # convolution kernel (c_out, c_in / groups, *window)
    EMBEDDING = "embedding"  # (rows, dim): token, position, type, relative bias
    OUTPUT = "output"  # the output embedding of a language model (vocabulary, dim)
    EXPERT_STACK = "expert_stack"  # 3-D: one matrix per expert of a mixture of experts
    NORM = "norm"
    BIAS = "bias"
    BUFFER = "buffer"
    HEAD = "head"  # task head: kept per expert
    OTHER = "other"  # any other parameter: class token, scale, state-space A, ...

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Module:
    """A part of a model with a folder of its own, as sentence-transformers writes them."""

    folder: str  # its path in the model's folder, with `/` between the parts
    # its config.json, if it has one
    config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names in the whole model."""
        return f"{self.folder.replace('/', '.')}."

    @property
    def is_of_transformers(self) -> bool:
        """Whether transformers loads the module, by its config, also from several files of weights."""
        return "model_type" in (self.config or {})


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape and dtype of a stored tensor, without its values."""

    name: str  # the tensor's name in its checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    # whether it is stored complex; then its last axis has the real and the imaginary part
    complex: bool = False
    # the part of the model that it belongs to; None: it is in the model's own folder
    module: Module | None = None

    @property
    def as_stored(self) -> TensorHeader:
        """The header of the tensor in its file: the name in its module, and complex if it is stored so."""
        stored = self if self.module is None else self.in_module
        if not self.complex:
            return stored
        return replace(stored, shape=self.shape[:-1], dtype=self.dtype.to_complex(), complex=False)

    @property
    def in_module(self) -> TensorHeader:
        """The header with the name that the tensor has in its module."""
        if self.module is None:
            return self
        return replace(self, name=self.name.removeprefix(self.module.prefix), module=None)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return self.numel * self.dtype.itemsize

    def nbytes_of(self, rows: range) -> int:
        """Return the bytes of some rows of the first axis."""
        return len(rows) * prod(self.shape[1:]) * self.dtype.itemsize

    def row_blocks(self, elements: int, multiple: int = 1) -> Iterator[range | None]:
        """Yield ranges of the first axis with about `elements` elements each; None for a scalar.

        The number of rows of every range but the last is a multiple of `multiple`.

        Example:
            >>> list(TensorHeader("w", (5, 4), torch.float32).row_blocks(8))
            [range(0, 2), range(2, 4), range(4, 5)]
        """
        if not self.shape:
            yield None
            return
        rows = elements // max(1, prod(self.shape[1:]))
        step = max(1, rows // multiple) * multiple
        # An empty tensor still has one block, so that it is written.
        for start in range(0, max(1, self.shape[0]), step):
            yield range(start, min(start + step, self.shape[0]))


@dataclass(frozen=True)
class LowRank:
    """An update as its factors, Δ = left · right, not multiplied out, as in an adapter.

    Attributes:
        left: `(d_out, r)`, with any scale of the adapter multiplied in.
        right: `(r, d_in)`, of the dtype and device of `left`.
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of Δ, `(d_out, d_in)`."""
        return torch.Size((self.left.shape[0], self.right.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors."""
        return self.left.dtype

    @property
    def device(self) -> torch.device:
        """Device of the factors."""
        return self.left.device

    def to(self, target: torch.dtype | torch.device) -> LowRank:
        """Return the same update in another dtype or on another device."""
        return LowRank(self.left.to(target), self.right.to(target))

    @property
    def rank(self) -> int:
        """Number of terms, which is at least the rank of Δ."""
        return self.right.shape[0]

    @property
    def mT(self) -> LowRank:  # noqa: N802 - as torch calls it
        """The transposed update, `(d_in, d_out)`."""
        return LowRank(self.right.mT, self.left.mT)

    def zero(self) -> LowRank:
        """Return an update of this shape without terms, which changes nothing."""
        return LowRank(self.left[:, :0], self.right[:0])

    def dense(self) -> Tensor:
        """Return the product left · right."""
        return self.left @ self.right

    def times(self, number: float) -> LowRank:
        """Return the update times a number. A small one multiplies the larger factor, against underflow."""
        left_is_larger = bool(self.left.abs().sum() >= self.right.abs().sum())
        if left_is_larger == (abs(number) <= 1.0):
            return LowRank(self.left * number, self.right)
        return LowRank(self.left, self.right * number)

    @staticmethod
    def sum(updates: Sequence[LowRank], coefficients: Sequence[float]) -> LowRank:
        """Return Σ c_t Δ_t as one update that has the terms of all.

        Example:
            >>> one = LowRank(torch.ones(2, 1), torch.ones(1, 3))
            >>> LowRank.sum([one, one], [0.5, 2.0]).dense()[0].tolist()
            [2.5, 2.5, 2.5]
        """
        terms = [update.times(c) for update, c in zip(updates, coefficients, strict=True)]
        lefts, rights = [term.left for term in terms], [term.right for term in terms]
        return LowRank(torch.cat(lefts, dim=1), torch.cat(rights))

    def square_norm(self) -> float:
        """Return ‖Δ‖²_F = Tr (leftᵀ left)(right rightᵀ), without multiplying out."""
        left, right = self.left.double(), self.right.double()
        return float(((left.mT @ left) * (right @ right.mT)).sum().clamp_min(0.0))


@dataclass(frozen=True)
class Rounding:
    """The error that rounding adds to a matrix: a matrix E of independent entries."""

    edge: float = 0.0  # the largest singular value of E
    energy: float = 0.0  # ‖E‖²_F
    # ‖·‖²_F that rounding of the update before it was stored may add to `energy`
    before: float = 0.0
    # relative precision of the arithmetic that made the matrix; 0: the matrix is exact
    eps: float = 0.0
    # for a sum, the largest singular value of the error of summing its terms, which are larger than
    # the sum where they cancel
    floor: float = 0.0

    def times(self, factor: float) -> Rounding:
        """Return the rounding of the matrix times a number, whose error is factor · E."""
        square = factor**2
        return Rounding(
            abs(factor) * self.edge,
            square * self.energy,
            square * self.before,
            self.eps,
            abs(factor) * self.floor,
        )

    @staticmethod
    def together(parts: Iterable[Rounding]) -> Rounding:
        """Return the rounding of a sum of matrices with independent errors, or of matrices side by side."""
        errors = list(parts)
        return Rounding(
            hypot(*(e.edge for e in errors)),
            sum(e.energy for e in errors),
            sum(e.before for e in errors),
            max((e.eps for e in errors), default=0.0),
            hypot(*(e.floor for e in errors)),
        )


@dataclass(frozen=True)
class Frame:
    """Orthonormal bases U, Q that hold all updates of a layer: Δ_t = U · core_t · Qᵀ."""

    shape: tuple[int, int]  # `(d_out, d_in)` of the layer
    ones_out: Tensor  # Uᵀ𝟏 `(p,)`, where 𝟏 lies in the span of U
    ones_in: Tensor  # Qᵀ𝟏 `(q,)`


class Uniform(Protocol):
    """The random numbers of one tensor of one expert, as in `covmerge.maths.linalg.random.Stream`."""

    def uniform(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        """Return float32 numbers in [0, 1) on the CPU, equal for equal seed, tensor and expert."""
        ...


@dataclass(frozen=True)
class Measured:
    """What data say of one expert's tensor, read from a statistics file (`covmerge collect`)."""

    # the mean input Gram matrix E[z zᵀ] `(d_in, d_in)`, or the diagonal Fisher information in the
    # shape of the update; of the updates' dtype and device
    value: Tensor
    rows: int  # the number of layer inputs, or of examples, in the mean
    total: float  # ‖·‖₂ of this statistic over all tensors of the expert


def _renamed(old: str, new: str) -> None:
    said = f"LinearGroup.{old} is now LinearGroup.{new}; the old name goes with the next release"
    warnings.warn(said, DeprecationWarning, stacklevel=3)


@dataclass(frozen=True)
class LinearGroup:
    """One linear layer of every expert, as a method sees it: oriented as `(d_out, d_in)`.

    Attributes:
        updates: Δ_t = W_t − W_0 in the experts' order, each `(d_out, d_in)`, all of one floating
            dtype (float32 or float64) and one device. A method must not modify them. Empty for
            methods that see the models.
        weights: one positive number per expert; 1 is neutral.
        streams: random numbers per expert, for methods with a `seed`; empty for the others.
        expert_statistics: per expert, the statistics of its data in the layer, for methods registered with
            `data`; empty for the others.
        thresholds: per expert, the threshold that the global pass found, for methods registered with a
            `global_pass`; None: there was no pass, and this group is all of the model.
        shared: results that several methods compute from the same group, by key; None: nothing is stored.
        frame: the bases in which updates of low rank are written, so that `updates` are their cores
            `(p, q)`; None: `updates` are the updates themselves. A method that declares `factored` treats a
            core as the layer itself, takes sizes from `shape`, and 𝟏 as `frame.ones_out`, `frame.ones_in`.
        factors: per expert, the factors of its update, in the coordinates of `updates`; empty where the
            updates came multiplied out.
        rounding: per expert, the error that rounding of its stored weights adds to its update
            (`covmerge.maths.measures.rounding`); empty: the updates are exact.
        base: W_0, oriented like the updates, of their dtype and device, for methods registered with
            `needs_base`; None for the others. It must not be modified.
        models: W_t bit for bit (W_0 + Δ_t is rounded), for methods that are registered as seeing the
            `weights` instead of the updates; empty for the others. They must not be modified.
        known: per expert, the result of the pass over its whole tensor for these rows, for methods
            registered with a `tensor_pass`; empty: this group is the whole tensor.
        base_norm: ‖W_0‖_F, for methods registered with `base_norm`, of a layer that is one of a sequence of
            blocks; None: the layer is in no such sequence, or its weights were not read.
    """

    updates: tuple[Tensor, ...]
    weights: tuple[float, ...]
    streams: tuple[Uniform, ...] = ()
    expert_statistics: tuple[Measured, ...] = ()
    thresholds: tuple[float, ...] | None = None
    shared: dict[str, Any] | None = None
    frame: Frame | None = None
    factors: tuple[LowRank, ...] = ()
    rounding: tuple[Rounding, ...] = ()
    base: Tensor | None = None
    models: tuple[Tensor, ...] = ()
    known: tuple[Any, ...] = ()
    base_norm: float | None = None

    @property
    def measured(self) -> tuple[Measured, ...]:
        """Deprecated name of `expert_statistics`, for one release."""
        _renamed("measured", "expert_statistics")
        return self.expert_statistics

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a method sees of each expert: its update, or its weights."""
        return self.models or self.updates

    @property
    def given(self) -> tuple[Tensor, ...]:
        """All tensors of the group that a method must not modify."""
        factors = [half for update in self.factors for half in (update.left, update.right)]
        statistics = [one.value for one in self.expert_statistics]
        return (*self.tensors, *factors, *statistics, *([] if self.base is None else [self.base]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer, `(d_out, d_in)`, or the shape of the updates where they are no matrices."""
        return tuple(self.tensors[0].shape) if self.frame is None else self.frame.shape

    def times(self, factors: Sequence[float]) -> LinearGroup:
        """Return the group with each expert's update, factors and rounding multiplied by a number.

        Example:
            >>> group = LinearGroup((torch.ones(1, 2), torch.ones(1, 2)), (1.0, 1.0))
            >>> [update.tolist() for update in group.times([2.0, 0.5]).updates]
            [[[2.0, 2.0]], [[0.5, 0.5]]]
        """
        return replace(
            self,
            updates=tuple(u * f for u, f in zip(self.updates, factors, strict=True)),
            rounding=tuple(
                error.times(f) for error, f in zip(self.rounding, factors, strict=False)
            ),
            factors=tuple(
                LowRank(update.left * f, update.right)
                for update, f in zip(self.factors, factors, strict=False)
            ),
            shared=None,  # results stored there belong to the updates before
        )

    def once(self, key: str, make: Callable[[], _T]) -> _T:
        """Return `make()`, stored under `key` for other methods that run on this group."""
        if self.shared is None:
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def _takes_the_old_name(made: Callable[..., None]) -> Callable[..., None]:
    """Accept `measured=` for `expert_statistics=`, for one release."""

    @wraps(made)
    def init(self: LinearGroup, *args: Any, **given: Any) -> None:
        if "measured" in given:
            _renamed("measured", "expert_statistics")
            given["expert_statistics"] = given.pop("measured")
        made(self, *args, **given)

    return init


LinearGroup.__init__ = _takes_the_old_name(LinearGroup.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Merged:
    """The result of a method.

    Attributes:
        delta: the merged update W̄ − W_0 `(d_out, d_in)`; a method that sees weights returns W̄ here.
        diagnostics: the method's diagnostics, of the type that it is registered with, or a mapping of
            facts without a summary.
        masks: one boolean tensor of the update's shape per expert, from methods that write masks beside
            the model; empty for the others.
        weights: W̄ itself, which `Method` fills in for methods that see weights, because W_0 + delta
            rounds; None for the others.
    """

    delta: Tensor
    diagnostics: Diagnostics | Mapping[str, Json] = field(default_factory=Diagnostics)
    masks: tuple[Tensor, ...] = ()
    weights: Tensor | None = None

    @property
    def stats(self) -> Mapping[str, Json]:
        """The method's diagnostics, as covmerge.json has them."""
        diagnostics = self.diagnostics
        return diagnostics.as_json() if isinstance(diagnostics, Diagnostics) else diagnostics

    def times(self, scale: float, base: Tensor | None = None) -> Merged:
        """Return the result with the update times a number; `base` is needed where `weights` is known."""
        if scale == 1.0:
            return self
        delta = self.delta * scale
        if self.weights is None:
            return replace(self, delta=delta)
        assert base is not None
        return replace(self, delta=delta, weights=base + delta)
