"""Run mergekit 0.1.5 over the recipes of `token_cases.py`, and keep what it makes, and its tokens.

In an environment that has mergekit: python -m tests.mergekit.make_token_goldens
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from safetensors.torch import load_file, save_file

from tests.mergekit.cases import SEED
from tests.mergekit.stable import sort_stably
from tests.mergekit.token_cases import RECIPES, by_token, ids_of, save_models

GOLDEN = Path(__file__).parent.parent / "golden" / "mergekit_tokens.safetensors"


def main() -> None:
    """Write the file of goldens."""
    sort_stably()
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    found = {}
    told = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        os.chdir(folder)
        for case, text in RECIPES.items():
            out = folder / "out" / case
            options = MergeOptions(random_seed=SEED, write_model_card=False, quiet=True)
            run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options)
            ids = ids_of(out)
            stored = load_file(out / "model.safetensors")
            found[case], found[f"{case} padding"] = by_token(stored, ids)
            size = json.loads((out / "config.json").read_text())["vocab_size"]
            told[case] = json.dumps({"ids": ids, "vocab_size": size})
            print(case, len(stored), size, len(ids))
    save_file(found, GOLDEN, metadata=told)
    print(GOLDEN, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
