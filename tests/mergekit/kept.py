"""Recipes that were drawn and merged by mergekit 0.1.5, with what is kept of what it made."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.mergekit.models import flat

GOLDEN = Path(__file__).parent.parent / "golden"
FILES = {  # by what the recipes are drawn of
    "models": GOLDEN / "mergekit_generated.safetensors",
    "tokens": GOLDEN / "mergekit_generated_tokens.safetensors",
    "modules": GOLDEN / "mergekit_generated_modules.safetensors",
}
_OF_EACH = 1  # recipes with models of a method, and with slices
_STEP = 16  # every so manieth entry is kept beside the hash of all


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def sampled(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return some entries of all tensors."""
    return flat(tensors)[::_STEP].clone()


class Kept:
    """What is gathered in a campaign: some recipes of each method, with models and with slices.

    Args:
        drawn_of: a key of `FILES`.
    """

    def __init__(self, drawn_of: str) -> None:
        self._file = FILES[drawn_of]
        self._cases: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, Tensor] = {}
        self._counts: Counter[tuple[str | bool, ...]] = Counter()

    def add(self, seed: int, recipe: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take a recipe, if there are not enough of its kind."""
        kind = (recipe["merge_method"], "slices" in str(recipe), *recipe.get("modules", ()))
        if self._counts[kind] < _OF_EACH:
            self._counts[kind] += 1
            self._cases[str(seed)] = {"recipe": recipe, "sha256": digest(tensors)}
            self._samples[str(seed)] = sampled(tensors)

    def save(self) -> None:
        """Write the file of goldens."""
        metadata = {
            "cases": json.dumps(self._cases),
            "torch": torch.__version__.split("+")[0],
        }
        save_file(self._samples, self._file, metadata=metadata)


def goldens(drawn_of: str = "models") -> Iterator[tuple[int, dict[str, Any], str, Tensor]]:
    """Return what was kept: seed, recipe, hash and some entries."""
    with safe_open(FILES[drawn_of], "pt") as file:
        for seed, case in json.loads(file.metadata()["cases"]).items():
            yield int(seed), case["recipe"], case["sha256"], file.get_tensor(seed)
