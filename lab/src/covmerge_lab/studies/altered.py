"""Experts that nobody trained: longer, shorter, drawn at random, or rounded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

# Its annotations are partial.
_files: Any = safetensors.torch

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]  # of the updates by name, or of an adapter's factors

_A, _B = ".lora_A.", ".lora_B."


def lengthened(expert: Path, base: Path, out: Path, *, times: float) -> Path:
    """Write an expert whose update is `times` that of another; its head is the other's.

    Args:
        expert: folder of a whole model or of an adapter.
        base: folder of the base.
        out: folder that is made.
        times: s in W₀ + sΔ.
    """

    def change(tensors: Tensors) -> Tensors:
        return {n: t if _A in n else times * t for n, t in tensors.items()}

    return _write(expert, base, out, change)


def random_like(expert: Path, base: Path, out: Path) -> Path:
    """Write an expert whose every update, or BA, has the norm of another's and random entries."""

    def change(tensors: Tensors) -> Tensors:
        draw = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(t.shape, generator=draw) for n, t in tensors.items()}
        for name, tensor in tensors.items():
            other = name.replace(_A, _B)
            if _A in name:
                wanted, found = (x[other] @ x[name] for x in (tensors, drawn))
                drawn[other] *= _norm(wanted) / _norm(found)
            elif _B not in name:
                drawn[name] *= _norm(tensor) / _norm(drawn[name])
        return drawn

    return _write(expert, base, out, change)


@dataclass(frozen=True)
class Rounded:
    """An expert that is stored in bfloat16.

    Attributes:
        folder: of it.
        unchanged: share of the weights, of tensors that it changed, that are the base's after rounding.
        error: what rounding did to the update, over the update, in norm.
    """

    folder: Path
    unchanged: float
    error: float


def base_in_half(base: Path, out: Path) -> Path:
    """Write the base in bfloat16."""
    shutil.copytree(base, out)
    file = out / "model.safetensors"
    _files.save_file(_in_half(_files.load_file(file)), file, {"format": "pt"})
    return out


def expert_in_half(expert: Path, base: Path, out: Path) -> Rounded:
    """Write an expert in bfloat16 as if it had been trained from the base in bfloat16: W₀ + Δ, rounded.

    Args:
        expert: folder of a whole model.
        base: folder of the base, in float32.
        out: folder that is made.
    """
    shutil.copytree(expert, out)
    (file,) = out.glob("*model.safetensors")
    tensors: Tensors = {n: t.float() for n, t in _files.load_file(file).items()}
    starts = _named_as(tensors, _files.load_file(base / "model.safetensors"))
    stored = _in_half(tensors)
    same = count = 0
    lost = length = 0.0
    for name, start in starts.items():
        begun, update = start.to(torch.bfloat16).float(), tensors[name] - start
        if not update.any():
            continue
        stored[name] = (begun + update).to(torch.bfloat16)
        kept = stored[name].float() - begun
        same += int((kept == 0).sum())
        count += update.numel()
        lost += float((kept - update).square().sum())
        length += float(update.square().sum())
    _files.save_file(stored, file, {"format": "pt"})
    return Rounded(out, same / count, sqrt(lost / length))


def _in_half(tensors: Mapping[str, Tensor]) -> Tensors:
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}


def _norm(tensor: Tensor) -> Tensor:
    return tensor.square().sum().sqrt()


def _write(expert: Path, base: Path, out: Path, change: Change) -> Path:
    shutil.copytree(expert, out)
    (file,) = out.glob("*model.safetensors")
    tensors: Tensors = {n: t.float() for n, t in _files.load_file(file).items()}
    if (out / "adapter_config.json").exists():
        factors = {n: t for n, t in tensors.items() if _A in n or _B in n}
        tensors |= change(factors)
    else:
        starts = _named_as(tensors, _files.load_file(base / "model.safetensors"))
        updates = {name: tensors[name] - start for name, start in starts.items()}
        tensors |= {name: starts[name] + update for name, update in change(updates).items()}
    _files.save_file(tensors, file, {"format": "pt"})
    return out


def _named_as(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Tensors:
    """Return the base's weights under an expert's names, which may have a prefix of the task's model."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        short = next((name[i:] for i in _starts(name) if name[i:] in base), None)
        if short is not None and base[short].shape == tensor.shape and tensor.is_floating_point():
            found[name] = base[short].float()
    return found


def _starts(name: str) -> list[int]:
    return [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
