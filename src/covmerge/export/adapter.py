"""A merged adapter as PEFT reads it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint
from covmerge.checkpoints.disk import disk_errors
from covmerge.checkpoints.layout import Layout, plan_shard
from covmerge.checkpoints.strict_json import dumps
from covmerge.checkpoints.writer import ShardWriter
from covmerge.types import Json, LowRank, TensorHeader

_PREFIX = "base_model.model."
_WITHOUT_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")


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


class AdapterWriter:
    """The adapter's files, being filled; a full disk is met at the start.

    Args:
        folder: an existing folder.
        tensors: what the adapter updates.
        whole: what it replaces.
        parameters: names of all tensors of the model.
        dtype: of the stored factors.

    Raises:
        ResourceError: the disk is full.
    """

    file_name = "adapter_model.safetensors"

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[AdaptedTensor],
        whole: Sequence[WholeTensor],
        parameters: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._whole = whole
        self._parameters = parameters
        self.dtype = dtype
        headers = [header for tensor in tensors for header in tensor.headers(dtype)]
        headers += [
            TensorHeader(key, t.stored.shape, t.stored.dtype) for t in whole for key in t.keys
        ]
        shard = plan_shard(self.file_name, headers)
        self._writer = ShardWriter(folder, Layout((shard,)))

    def write(self, tensor: AdaptedTensor, update: LowRank) -> None:
        """Write the factors of one update, given in the base's orientation."""
        for key, factor in zip(tensor.keys, tensor.factors(update), strict=True):
            self._writer.write(key, factor.to(self.dtype).contiguous())

    def write_whole(self, tensor: WholeTensor, value: Tensor) -> None:
        """Write a replaced tensor in its stored dtype."""
        for key in tensor.keys:
            self._writer.write(key, value.contiguous())

    def finish(self, parents: Sequence[Mapping[str, Any]], base: Checkpoint) -> tuple[Path, Path]:
        """Write the configuration: what all parents agree on; without parents, of the base.

        Args:
            parents: configurations of the adapters that were merged.
            base: what the adapter is loaded over.

        Returns:
            Paths of the weights and of the configuration.
        """
        self._writer.flush()
        path = self._folder / "adapter_config.json"
        content = (
            dumps(self._config(parents, base), what="adapter_config", indent=2).encode() + b"\n"
        )
        with disk_errors(path, len(content)):
            path.write_bytes(content)
        return self._folder / self.file_name, path

    def _targets(self, modules: Sequence[str]) -> Json:
        """The layers by name, or as one expression where a name is the end of another's."""
        others = {name.rpartition(".")[0] for name in self._parameters} - set(modules)
        if any(other.endswith(f".{module}") for other in others for module in modules):
            return "|".join(map(re.escape, modules))
        return list(modules)

    def _config(self, parents: Sequence[Mapping[str, Any]], base: Checkpoint) -> dict[str, Json]:
        ranks = {tensor.module: tensor.rank for tensor in self._tensors}
        usual = Counter(ranks.values()).most_common(1)[0][0]
        # The scale alpha / r is 1 in every layer: it is in the factors.
        special: dict[str, Json] = {
            _pattern(module): rank for module, rank in ranks.items() if rank != usual
        }
        name, revision = _named(base) if not parents else (None, None)
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": _agreed(parents, "base_model_name_or_path") or name,
            "revision": _agreed(parents, "revision") or revision,
            "task_type": _task_type(parents, base),
            "inference_mode": True,
            "r": usual,
            "lora_alpha": usual,
            "rank_pattern": special,
            "alpha_pattern": special,
            "target_modules": self._targets(sorted(ranks)),
            "fan_in_fan_out": any(t.transposed and not t.embedding for t in self._tensors),
            "bias": "none" if all(len(t.modules) == len(t.names) for t in self._whole) else "all",
            "modules_to_save": sorted({module for t in self._whole for module in t.modules})
            or None,
            "lora_dropout": 0.0,
        }


def _pattern(module: str) -> str:
    """A key that matches this module alone; PEFT asks for a router by the name of its weight."""
    return rf"^{re.escape(module)}(\.weight)?"


def _named(base: Checkpoint) -> tuple[str | None, str | None]:
    """Return name and revision by which a base can be loaded, if it can."""
    if base.hub is not None:
        return base.hub.name, base.hub.commit
    return (None if base.identity()["kind"] == "memory" else base.source), None


def _task_type(parents: Sequence[Mapping[str, Any]], base: Checkpoint) -> Json:
    """What PEFT calls a language model; to a classifier it would add a head, which is not there."""
    if parents:
        task = _agreed(parents, "task_type")
        return task if task in _WITHOUT_HEAD else None
    architectures = (base.config or {}).get("architectures") or [""]
    return "CAUSAL_LM" if str(architectures[0]).endswith("ForCausalLM") else None


def _agreed(parents: Sequence[Mapping[str, Any]], key: str) -> Json:
    values = [parent.get(key) for parent in parents]
    return values[0] if values and all(value == values[0] for value in values) else None
