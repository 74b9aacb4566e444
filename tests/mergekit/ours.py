"""covmerge, merging a recipe of mergekit's as the command line does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from covmerge.base.findings import FAULTS
from covmerge.errors import CovmergeError
from covmerge.front.api import run_recipe
from covmerge.front.cli.flags import read_recipe
from covmerge.plan.recipe import Recipe
from covmerge.run.engine.options import RunOptions
from tests.mergekit.differences import Merged


def merge(
    recipe: Mapping[str, Any], folder: Path, seed: int, options: RunOptions | None = None
) -> Merged:
    """Merge a recipe into `folder`/ours, which is removed; whether its experts fit is not judged."""
    out = folder / "ours"
    try:
        run_recipe(_read(recipe, folder, seed), out, options)
        return Merged.read(recipe, out)
    except CovmergeError as error:
        return Merged(f"{type(error).__name__}: {error}", {})
    finally:
        shutil.rmtree(out, ignore_errors=True)


def merge_in_memory(
    recipe: Mapping[str, Any], folder: Path, seed: int, options: RunOptions | None = None
) -> Mapping[str, Tensor]:
    """Return the tensors of the merge, without a check on them.

    Raises:
        CovmergeError: it is refused.
    """
    tensors = run_recipe(_read(recipe, folder, seed), None, options).tensors
    assert tensors is not None
    return tensors


def _read(recipe: Mapping[str, Any], folder: Path, seed: int) -> Recipe:
    """As the command line reads a file of it, which it leaves in the folder."""
    file = folder / "their.yml"
    file.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    return read_recipe(file, dict(seed=seed, allow=tuple(FAULTS)))
