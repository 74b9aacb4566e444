"""Recipes of mergekit beside mergekit itself: tensors equal bit for bit, and the worst difference else.

    python lab/benchmarks/mergekit_parity.py --mergekit VENV/bin/python --recipes DIR --models DIR

Models are named by the recipes relative to --models. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

_FLAGS = re.compile(r"^# flags: ([^;]*)", re.MULTILINE)
_THEIRS = "from mergekit.scripts.run_yaml import main; main()"


def run(command: list[str], folder: Path) -> tuple[float, str]:
    """Run a program; return its seconds, and what it said if it failed."""
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    said = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
    return time.perf_counter() - start, said


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


def compare(theirs: Path, ours: Path) -> str:
    """Say how many tensors are equal, and how far the worst is off."""
    left, right = tensors(theirs), tensors(ours)
    if left.keys() != right.keys():
        return f"other tensors: {sorted(left.keys() ^ right.keys())[:3]} | |"
    equal, worst, where = 0, 0.0, ""
    for name in left:
        a, b = read(left, name), read(right, name)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"'{name}': {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)} | |"
        if torch.equal(a, b):
            equal += 1
            continue
        off = float((a.double() - b.double()).abs().max())
        if off > worst:
            worst, where = off, name
    return f"{equal} of {len(left)} | {f'{worst:.1e} ({where})' if where else '0'} |"


def main() -> None:
    """Compare recipe by recipe."""
    options = argparse.ArgumentParser()
    options.add_argument("--mergekit", required=True, help="Python of an environment with mergekit")
    options.add_argument("--recipes", type=Path, required=True)
    options.add_argument("--models", type=Path, required=True)
    options.add_argument("--only", default="", help="a part of the recipes' names")
    given = options.parse_args()
    print("| recipe | tensors equal bit for bit | worst difference | mergekit s | covmerge s |")
    print("|---|---|---|---|---|", flush=True)
    for recipe in sorted(given.recipes.resolve().glob("*.yml")):
        if given.only not in recipe.stem:
            continue
        flags = _FLAGS.search(recipe.read_text())
        own = flags[1].split() if flags else []
        theirs, ours = given.models / "out" / "theirs", given.models / "out" / "ours"
        asked = [str(recipe), "out/theirs", "--no-copy-tokenizer", "--no-write-model-card", *own]
        slow, said = run([given.mergekit, "-c", _THEIRS, *asked], given.models)
        if said:
            print(f"| {recipe.stem} | mergekit: {said} | | {slow:.0f} | |", flush=True)
            continue
        command = [sys.executable, "-m", "covmerge", "merge", str(recipe), "out/ours"]
        fast, said = run([*command, *own, "--overwrite"], given.models)
        result = f"covmerge: {json.dumps(said)} | |" if said else compare(theirs, ours)
        print(f"| {recipe.stem} | {result} {slow:.0f} | {fast:.0f} |", flush=True)


if __name__ == "__main__":
    main()
