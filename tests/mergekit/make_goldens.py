"""Run mergekit 0.1.5 over the recipes of `cases.py`, and keep what it makes.

In an environment that has mergekit: python -m tests.mergekit.make_goldens
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from safetensors.torch import load_file, save_file

from tests.mergekit.cases import RECIPES, SEED, flat, save_models

GOLDEN = Path(__file__).parent.parent / "golden" / "mergekit_recipes.safetensors"


def main() -> None:
    """Write the file of goldens."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    found = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        os.chdir(folder)
        for case, text in RECIPES.items():
            out = folder / "out" / case
            options = MergeOptions(
                random_seed=SEED,
                lora_merge_cache=str(folder / "cache"),
                copy_tokenizer=False,
                write_model_card=False,
                quiet=True,
            )
            # To fold an adapter draws random numbers, and only where there is no cache of it yet.
            for _ in range(2 if "lora" in case else 1):
                theirs = MergeConfiguration.model_validate(yaml.safe_load(text))
                run_merge(theirs, str(out), options)
            stored = load_file(out / "model.safetensors")
            found[case] = flat(stored)
            print(case, len(stored), found[case].dtype, len(found[case]))
    save_file(found, GOLDEN)
    print(GOLDEN, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
