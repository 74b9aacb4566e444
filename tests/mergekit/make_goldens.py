"""Run mergekit 0.1.5 over the recipes of `cases.py`, and keep what it makes.

In an environment that has mergekit: python -m tests.mergekit.make_goldens
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from safetensors.torch import load_file, save_file

from tests.mergekit.cases import RECIPES, SEED
from tests.mergekit.models import flat, save_models
from tests.mergekit.theirs import runner

GOLDEN = Path(__file__).parent.parent / "golden" / "mergekit_recipes.safetensors"


def main() -> None:
    """Write the file of goldens."""
    found = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        os.chdir(folder)
        run = runner()
        for case, text in RECIPES.items():
            out = folder / "out" / case
            run(yaml.safe_load(text), out, SEED)
            stored = load_file(out / "model.safetensors")
            found[case] = flat(stored)
            print(case, len(stored), found[case].dtype, len(found[case]))
    save_file(found, GOLDEN)
    print(GOLDEN, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
