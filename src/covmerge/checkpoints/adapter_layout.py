"""What PEFT's adapter_model.safetensors holds of a model's tensors, and by which keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from covmerge.types import LowRank, TensorHeader

ADAPTER_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdaptedTensor:
    """One tensor that the adapter updates.

    Attributes:
        name: its name in the model that the adapter is loaded over.
        shape: as the base stores it.
        rank: rank of its update.
        embedding: whether it is an embedding, whose factors PEFT calls by other names.
        transposed: whether the base stores `(d_in, d_out)`, as GPT-2 does.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    embedding: bool = False
    transposed: bool = False

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.name.removesuffix(".weight")

    @property
    def keys(self) -> tuple[str, str]:
        """Names of the two factors, the one at the inputs first."""
        kind = "lora_embedding_{}" if self.embedding else "lora_{}.weight"
        first, second = (f"{_PREFIX}{self.module}.{kind.format(side)}" for side in "AB")
        return first, second

    def factors(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """Return A and B, given the update in the base's orientation."""
        if self.embedding or self.transposed:
            return update.left.mT.contiguous(), update.right.mT.contiguous()
        if len(self.shape) == 4:
            window = (self.rank, *self.shape[1:])
            return update.right.reshape(window), update.left.reshape(self.shape[0], self.rank, 1, 1)
        return update.right.contiguous(), update.left.contiguous()

    def headers(self, dtype: torch.dtype) -> tuple[TensorHeader, TensorHeader]:
        """Headers of the two factors."""
        rows, columns = self.shape[0], prod(self.shape[1:])
        probe = LowRank(
            torch.empty(rows, self.rank, device="meta"),
            torch.empty(self.rank, columns, device="meta"),
        )
        first, second = (
            TensorHeader(key, tuple(factor.shape), dtype)
            for key, factor in zip(self.keys, self.factors(probe), strict=True)
        )
        return first, second


@dataclass(frozen=True)
class WholeTensor:
    """One tensor that the adapter replaces.

    Attributes:
        names: its names in the model that the adapter is loaded over: several where it is tied.
        stored: its shape and dtype.
        modules: the modules that PEFT replaces with it; a bias is replaced by itself.
        beside_factors: whether its module has factors too, which PEFT puts around the layer.
    """

    names: tuple[str, ...]
    stored: TensorHeader
    modules: tuple[str, ...] = ()
    beside_factors: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in the file."""
        layer = ".base_layer" if self.beside_factors else ""
        split = (name.rpartition(".") for name in self.names)
        return tuple(f"{_PREFIX}{module}{layer}.{leaf}" for module, _, leaf in split)
