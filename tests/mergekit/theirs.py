"""mergekit 0.1.5, kept running: a recipe a line comes in, and a line goes out that says how it went.

In an environment that has mergekit, and in the folder of the models: python -m tests.mergekit.theirs
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mergekit.stable import name_in_order, sort_stably


def runner() -> Callable[[dict[str, Any], Path, int], None]:
    """Return what merges a recipe into a folder, with a seed; adapters are folded before, once.

    Of equal magnitudes at a threshold it keeps those that a stable sort puts first, and models are in the
    recipe's order where it takes them in that of a set.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    sort_stably()
    name_in_order()

    def run(recipe: dict[str, Any], out: Path, seed: int) -> None:
        options = MergeOptions(
            random_seed=seed,
            lora_merge_cache="cache",
            copy_tokenizer=False,
            write_model_card=False,
            quiet=True,
        )
        run_merge(MergeConfiguration.model_validate(recipe), str(out), options)

    # To fold an adapter draws random numbers, and only where there is no cache of it yet.
    for adapter in sorted(Path("gpt2").glob("lora*")):
        folding = {
            "merge_method": "passthrough",
            "models": [{"model": f"./gpt2/base+./{adapter}"}],
        }
        run(folding, Path("cache") / adapter.name, 0)
    return run


def main() -> None:
    """Answer lines of {recipe, out, seed} with the error of each, or null."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed on the way is no answer
    run = runner()
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        error = None
        try:
            run(asked["recipe"], Path(asked["out"]), asked["seed"])
        except Exception as found:  # whatever mergekit ends with is what is asked for
            error = f"{type(found).__name__}: {found}"
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
