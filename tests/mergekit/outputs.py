"""A recipe of mergekit's merged by the command line, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.runs import Ran, covmerge


def merged(recipe: Mapping[str, Any], place: Path, *flags: str, code: int = 0) -> Ran:
    """Merge a recipe into `place`/out."""
    file = place / "their.yml"
    file.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    return covmerge("merge", file, place / "out", *flags, code=code)


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder."""
    return load_file(folder / "model.safetensors")


def loaded(folder: Path) -> Any:
    """The model as transformers loads it; nothing of it may be missing, or too much."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, told = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model
