"""Merge the experts with every method of covmerge, from disk to disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import covmerge
from covmerge.methods import registry

SCALES = tuple(tenths / 10 for tenths in range(1, 11))


@dataclass(frozen=True)
class Variant:
    """One way to merge: a method and its parameters."""

    title: str
    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def slug(self) -> str:
        """Folder name of the merged model."""
        return "-".join([self.method, *(f"{k}={v:g}" for k, v in self.parameters.items())])


@dataclass(frozen=True)
class MergedModel:
    """A merged model on disk."""

    variant: Variant
    folder: Path
    seconds: float

    def heads(self) -> dict[str, Path]:
        """File of each expert's own classifier, by expert."""
        return {file.stem: file for file in sorted((self.folder / "heads").glob("*.safetensors"))}

    def renamed(self, title: str) -> MergedModel:
        """Return the same model under another title."""
        return replace(self, variant=replace(self.variant, title=title))


TITLES = {
    "ace": "ACE, ε=1e-5 (paper)",
    "actmat": "ACTMat",
    "task_arithmetic": "Task Arithmetic, λ=0.3",
}


def variants() -> tuple[Variant, ...]:
    """Every registered method at its defaults, and ACE with the ridge of its released code."""
    defaults = (Variant(TITLES.get(name, name), name) for name in registry.names())
    return (*defaults, Variant("ACE, ε=1e-2 (its code)", "ace", {"eps": 1e-2}))


def task_arithmetic_scales() -> tuple[Variant, ...]:
    """Task Arithmetic at each scale that is tried on validation data."""
    return tuple(
        Variant(f"Task Arithmetic, λ={scale:g}", "task_arithmetic", {"scale": scale})
        for scale in SCALES
    )


def merge(base: Path, experts: Mapping[str, Path], variant: Variant, folder: Path) -> MergedModel:
    """Merge `experts` into `folder`, in place of what an earlier run left there."""
    started = time.perf_counter()
    out = folder / variant.slug
    covmerge.merge(
        base, experts, method=variant.method, out=out, overwrite=True, **variant.parameters
    )
    return MergedModel(variant, out, time.perf_counter() - started)


def remove(model: MergedModel) -> None:
    """Delete a merged model that is not needed any more."""
    shutil.rmtree(model.folder)
