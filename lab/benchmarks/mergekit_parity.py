"""Recipes of mergekit beside mergekit itself, in turns: time, memory, tensors equal bit for bit.

    python -m benchmarks.mergekit_parity --mergekit VENV/bin/python --recipes DIR --models DIR --as gpt2

Models are named by the recipes relative to --models. What is measured is put into results/mergekit.json
under the name --as, recipe by recipe; `python -m benchmarks.performance` makes the page's table of it.
Peaks are of the resident set, which counts pages of mapped files, and of what is the process's own, seen
every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from benchmarks.measure import machine, spawn, spread

RESULTS = Path(__file__).parent / "results" / "mergekit.json"
_FLAGS = re.compile(r"^# flags: ([^;\n]*)", re.MULTILINE)
_THEIRS = "from mergekit.scripts.run_yaml import main; main()"


def measured(argv: Sequence[str], log: Path, env: dict[str, str]) -> dict[str, float]:
    """Run a program; what it took, with the most memory that was its own."""
    over, most = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.05):
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    own = child.memory_info()
                    most[0] = max(most[0], own.rss - own.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return {**spawn(argv, log=log, env=env), "own_bytes": most[0]}
    finally:
        over.set()
        watcher.join()


def tensors(folder: Path) -> dict[str, Path]:
    """Names of stored tensors, with the file that each is in."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def read(files: dict[str, Path], name: str) -> torch.Tensor:
    """Return one tensor."""
    with safe_open(files[name], "pt") as opened:
        return opened.get_tensor(name)


def compare(theirs: Path, ours: Path) -> dict[str, Any]:
    """Say how many tensors are equal, and how far the worst is off."""
    left, right = tensors(theirs), tensors(ours)
    if left.keys() != right.keys():
        return {"differs": f"other tensors: {sorted(left.keys() ^ right.keys())[:3]}"}
    equal, worst, where = 0, 0.0, ""
    for name in left:
        a, b = read(left, name), read(right, name)
        if a.dtype != b.dtype or a.shape != b.shape:
            return {"differs": f"'{name}': {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"}
        if torch.equal(a, b):
            equal += 1
            continue
        off = float((a.double() - b.double()).abs().max())
        if off > worst:
            worst, where = off, name
    return {"equal": equal, "tensors": len(left), "worst": worst, "where": where}


def beside(recipe: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Merge one recipe with both, in turns, and compare what they made."""
    flags = _FLAGS.search(recipe.read_text("utf-8"))
    own = flags[1].split() if flags else []
    theirs, ours = Path("out/theirs"), Path("out/ours")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(given.threads)}
    asked = [str(recipe), str(theirs), "--no-copy-tokenizer", "--no-write-model-card", *own]
    tools = {
        "mergekit": [given.mergekit, "-c", _THEIRS, *asked],
        "covmerge": [sys.executable, "-m", "covmerge", "merge", str(recipe), str(ours), *own],
    }
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}

    def run(tool: str) -> dict[str, float]:
        shutil.rmtree(theirs if tool == "mergekit" else ours, ignore_errors=True)
        if not given.warm:
            shutil.rmtree("lora_cache", ignore_errors=True)
        return measured(tools[tool], Path(f"out/{tool}.log"), env)

    if given.warm:
        run("mergekit")  # folds the adapters
    for _ in range(given.rounds):
        for tool in tools:
            runs[tool].append(run(tool))
    result = compare(theirs, ours)
    return {**{tool: spread(own) for tool, own in runs.items()}, **result}


def main() -> None:
    """Measure recipe by recipe; what is done stays if the next one fails."""
    options = argparse.ArgumentParser()
    options.add_argument("--mergekit", required=True, help="Python of an environment with mergekit")
    options.add_argument("--recipes", type=Path, required=True)
    options.add_argument("--models", type=Path, required=True)
    options.add_argument("--as", dest="name", required=True, help="what the models are called")
    options.add_argument("--only", default="", help="a part of the recipes' names")
    options.add_argument(
        "--warm", action="store_true", help="mergekit finds its folded adapters there"
    )
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args()
    recipes = sorted(given.recipes.resolve().glob("*.yml"))
    os.chdir(given.models)
    Path("out").mkdir(exist_ok=True)
    for recipe in recipes:
        if given.only not in recipe.stem:
            continue
        found = beside(recipe, given)
        kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
        kept["machine"] = {**machine(), "threads": given.threads, "rounds": given.rounds}
        name = recipe.stem + (", folded before" if given.warm else "")
        kept.setdefault("models", {}).setdefault(given.name, {})[name] = found
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
