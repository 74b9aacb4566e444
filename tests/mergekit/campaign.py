"""Recipes drawn at random, merged by mergekit 0.1.5 and by covmerge, and held against each other.

    python -m tests.mergekit.campaign --mergekit VENV/bin/python --count 300 --seed 0

mergekit runs in a process of its own that is kept. What is not equal bit for bit must be a row of
docs/mergekit.md; anything else is a fault, and ends with exit code 1. `--of tokens` draws recipes with
tokenizers, `--of modules` such with modules. With `--keep` the first recipes of each method that are equal
become what `test_generated.py` holds covmerge to; with `--out` the table is in a file of JSON too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.mergekit import generator, models, module_generator, token_generator
from tests.mergekit.differences import EQUAL, FAULT, Merged, Outcome, compared
from tests.mergekit.kept import Kept
from tests.mergekit.ours import merge

HOME = Path(__file__).parent.parent.parent
# What recipes are drawn of: who saves the models, and who draws.
KINDS = {
    "models": (models.save_models, generator.drawn),
    "tokens": (token_generator.save_models, token_generator.drawn),
    "modules": (models.save_models, module_generator.drawn),
}


class Theirs:
    """A mergekit that is kept running in a folder of models."""

    def __init__(self, python: str, models: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME)}
        self._process = subprocess.Popen(
            [python, "-m", "tests.mergekit.theirs"],
            cwd=models,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._answer()

    def merge(self, recipe: dict[str, Any], out: Path, seed: int) -> Merged:
        """Merge a recipe into a folder that is removed afterwards."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"recipe": recipe, "out": str(out), "seed": seed}))
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        error = self._answer()
        merged = Merged(error, {}) if error else Merged.read(recipe, out)
        shutil.rmtree(out, ignore_errors=True)
        return merged

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("mergekit's process has ended: run it by itself to see why")
        return json.loads(line)


@contextmanager
def _beside(python: str, save_models: Callable[[Path], None]) -> Iterator[tuple[Theirs, Path]]:
    """Both in one folder of models, which is the working directory."""
    before = Path.cwd()
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder)
        os.chdir(folder)
        theirs = Theirs(python, folder)
        try:
            yield theirs, folder
        finally:
            theirs.end()
            os.chdir(before)


def run(
    python: str, kind: str, seeds: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any], Merged, Outcome]]:
    """Merge the recipes of some seeds by both: seed, recipe, what mergekit made, and how they compare."""
    save_models, drawn = KINDS[kind]
    with _beside(python, save_models) as (theirs, folder):
        for seed in seeds:
            recipe = drawn(Random(seed))
            wanted = theirs.merge(recipe, folder / "theirs", seed)
            yield seed, recipe, wanted, compared(recipe, wanted, merge(recipe, folder, seed))


def _note(out: Path, asked: argparse.Namespace, counts: Counter[tuple[str, str]]) -> None:
    """Put a table into the file, beside those of other kinds."""
    found: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    command = f"--of {asked.of} --count {asked.count} --seed {asked.seed}"
    found[asked.of] = {
        "command": f"python -m tests.mergekit.campaign {command}",
        "recipes": [
            {"outcome": kind, "row": row, "count": number}
            for (kind, row), number in sorted(counts.items())
        ],
    }
    out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mergekit", required=True, help="a Python that has mergekit")
    parser.add_argument("--of", choices=KINDS, default="models", help="what recipes are drawn of")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file that keeps a table of each kind")
    asked = parser.parse_args()
    if asked.out is not None and not asked.out.parent.is_dir():
        parser.error(f"--out {asked.out}: there is no folder {asked.out.parent}")
    counts: Counter[tuple[str, str]] = Counter()
    kept = Kept(asked.of)
    seeds = range(asked.seed, asked.seed + asked.count)
    for seed, recipe, wanted, outcome in run(asked.mergekit, asked.of, seeds):
        counts[outcome.kind, outcome.row] += 1
        if outcome.kind == FAULT:
            print(f"{seed}: {outcome}\n  {json.dumps(recipe)}", flush=True)
        if outcome.kind == EQUAL:
            kept.add(seed, recipe, wanted.tensors)
    print("| outcome | row of docs/mergekit.md | recipes |\n|---|---|---|")
    for (kind, row), number in sorted(counts.items()):
        print(f"| {kind} | {row} | {number} |")
    if asked.out is not None:
        _note(asked.out, asked, counts)
    if asked.keep:
        kept.save()
    return 1 if any(kind == FAULT for kind, _ in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
