"""What an adapter's file holds of a model's tensors, and by which keys: PEFT's, Kohya's, diffusers'."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from covmerge.base.types import LowRank, TensorHeader
from covmerge.files.checkpoints.base import PEFT_FORM, LoraForm

ADAPTER_NAME = "adapter_model.safetensors"
LORA_NAME = "pytorch_lora_weights.safetensors"  # a file by itself, which diffusers looks for

KOHYA_FORM: LoraForm = "kohya"
DIFFUSERS_FORM: LoraForm = "diffusers"

PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdaptedTensor:
    """One tensor that the adapter updates.

    Attributes:
        name: its name in the model that the adapter is loaded over; in the other forms than PEFT's it
            begins with the part of a pipeline.
        shape: as the base stores it.
        rank: rank of its update.
        embedding: whether it is an embedding, whose factors PEFT calls by other names.
        transposed: whether the base stores `(d_in, d_out)`, as GPT-2 does.
        form: of the file.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    embedding: bool = False
    transposed: bool = False
    form: LoraForm = PEFT_FORM

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.name.removesuffix(".weight")

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the two factors, the one at the inputs first, and of alpha where there is one."""
        if self.form == KOHYA_FORM:
            ends = ("lora_down.weight", "lora_up.weight", "alpha")
            return tuple(f"{self.module}.{end}" for end in ends)
        prefix = PREFIX if self.form == PEFT_FORM else ""
        kind = "lora_embedding_{}" if self.embedding else "lora_{}.weight"
        return tuple(f"{prefix}{self.module}.{kind.format(side)}" for side in "AB")

    def factors(self, update: LowRank) -> tuple[Tensor, ...]:
        """Return what lies under the keys, given the update in the base's orientation.

        The scale alpha / rank is 1: it is in the factors.
        """
        alpha = (torch.tensor(float(self.rank)),) if self.form == KOHYA_FORM else ()
        return *self._factors(update), *alpha

    def _factors(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """A and B."""
        if self.embedding or self.transposed:
            return update.left.mT.contiguous(), update.right.mT.contiguous()
        if len(self.shape) > 2:  # a convolution: A has its window, and B one of a single place
            one = (1,) * len(self.shape[2:])
            left = update.left.reshape(self.shape[0], self.rank, *one)
            return update.right.reshape(self.rank, *self.shape[1:]), left
        return update.right.contiguous(), update.left.contiguous()

    def headers(self, dtype: torch.dtype) -> tuple[TensorHeader, ...]:
        """Headers of what lies under the keys; alpha is float32, which has every rank."""
        rows, columns = self.shape[0], prod(self.shape[1:])
        probe = LowRank(
            torch.empty(rows, self.rank, device="meta", dtype=dtype),
            torch.empty(self.rank, columns, device="meta", dtype=dtype),
        )
        return tuple(
            TensorHeader(key, tuple(part.shape), part.dtype)
            for key, part in zip(self.keys, self.factors(probe), strict=True)
        )


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
        return tuple(f"{PREFIX}{module}{layer}.{leaf}" for module, _, leaf in split)
