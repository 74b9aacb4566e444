"""The tensors in an adapter's file and their keys in the formats of PEFT, Kohya's scripts and diffusers.

Other libraries' adapters are read under PEFT's keys (`as_peft`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import LowRank, TensorHeader
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint, LoraForm
from covmerge.files.checkpoints.pieces import Assembled, StoredTensor, transposed

ADAPTER_NAME = "adapter_model.safetensors"
LORA_NAME = "pytorch_lora_weights.safetensors"  # a file by itself, which diffusers looks for

KOHYA_FORM: LoraForm = "kohya"
DIFFUSERS_FORM: LoraForm = "diffusers"

PREFIX = "base_model.model."


def as_peft(stored: Checkpoint, names: Mapping[str, str], turned: Container[str] = ()) -> Assembled:
    """Return a view of another library's factors under PEFT's names, A `(r, d_in)` and B `(d_out, r)`.

    `names` has the stored names, by PEFT's. `turned` has PEFT's names of the matrices that are stored
    transposed.
    """
    held = {name: StoredTensor(old, stored.headers[old].shape) for name, old in names.items()}
    made = {name: transposed(one, 0, 1) if name in turned else one for name, one in held.items()}
    return Assembled(stored, made)


def refuse_tensor(header: TensorHeader, where: str, what: str, step: str) -> NoReturn:
    """Raise an error about a tensor of another library that PEFT has no name for."""
    raise CheckpointError(
        f"{where}: '{header.name}' of shape {list(header.shape)} is a tensor of {what}: {step}"
    )


@dataclass(frozen=True)
class AdaptedTensor:
    """One tensor that the adapter updates.

    Attributes:
        name: its name in the model that the adapter is loaded over; in formats other than PEFT's it
            begins with the part of a pipeline.
        shape: its shape in the base.
        rank: rank of its update.
        embedding: whether it is an embedding, for whose factors PEFT has other names.
        transposed: whether the base stores `(d_in, d_out)`, as GPT-2 does.
        form: the format of the file.
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
        """Names of the two factors, the input side first, and of alpha if the format has one."""
        if self.form == KOHYA_FORM:
            ends = ("lora_down.weight", "lora_up.weight", "alpha")
            return tuple(f"{self.module}.{end}" for end in ends)
        prefix = PREFIX if self.form == PEFT_FORM else ""
        kind = "lora_embedding_{}" if self.embedding else "lora_{}.weight"
        return tuple(f"{prefix}{self.module}.{kind.format(side)}" for side in "AB")

    def factors(self, update: LowRank) -> tuple[Tensor, ...]:
        """Return the tensors stored under the keys, given the update in the base's orientation.

        The scale alpha / rank is 1, because the factors contain the scale.
        """
        alpha = (torch.tensor(float(self.rank)),) if self.form == KOHYA_FORM else ()
        return *self._factors(update), *alpha

    def _factors(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        if self.embedding or self.transposed:
            return update.left.mT.contiguous(), update.right.mT.contiguous()
        if len(self.shape) > 2:  # a convolution: A has its window, and B a window of size 1
            one = (1,) * len(self.shape[2:])
            left = update.left.reshape(self.shape[0], self.rank, *one)
            return update.right.reshape(self.rank, *self.shape[1:]), left
        return update.right.contiguous(), update.left.contiguous()

    def headers(self, dtype: torch.dtype) -> tuple[TensorHeader, ...]:
        """Return headers of the tensors under the keys; alpha is float32, which is exact for every rank."""
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
        names: its names in the model that the adapter is loaded over: several if the tensor is tied.
        stored: its shape and dtype.
        modules: the modules that PEFT replaces with it; empty for a bias, which is replaced alone.
        beside_factors: whether its module has factors too, so that PEFT's wrapper is around the layer.
    """

    names: tuple[str, ...]
    stored: TensorHeader
    modules: tuple[str, ...] = ()
    beside_factors: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the tensor in the file."""
        layer = ".base_layer" if self.beside_factors else ""
        split = (name.rpartition(".") for name in self.names)
        return tuple(f"{PREFIX}{module}{layer}.{leaf}" for module, _, leaf in split)
