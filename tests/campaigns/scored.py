"""`compare --score` and `search`, ended by kill -9 and gone on with by --resume.

    python -m tests.campaigns.scored --trials 60 --seed 0

The kill comes between two steps that the process does to files, or half way through a write. Models that
are there after it are whole ones. What `--resume` ends with has the models and scores of a computation in
float64, and nothing else beside them. With failures the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.campaigns.disturbed import At, Child, kill_self
from tests.campaigns.faults import BrokenError

SCORE = """
import sys
from safetensors.numpy import load_file
print(-sum(float(abs(t - 1).sum()) for t in load_file(sys.argv[1] + "/model.safetensors").values()))
"""
RECIPE = """
base: {home}/base.safetensors
experts:
  a: {{source: {home}/a.safetensors, weight: {{search: [0.1, 1.5]}}}}
  b: {{source: {home}/b.safetensors, weight: {{search: [0.1, 1.5]}}}}
method: task_arithmetic
parameters: {{scale: {{search: [0.1, 1]}}}}
"""
COMPARED = {
    "average": 0.5,
    "task_arithmetic-scale=0.3": 0.3,
}  # with the factor of the sum of updates
SEARCHED = 3
COMMANDS = ("compare", "search")
_OFF = 1e-3  # of a score of several hundred, whose weights are stored in float32

Model = Mapping[str, Tensor]


class Scene:
    """A base and two experts, and the two commands.

    Args:
        home: where they are.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "tmp").mkdir()
        draw = torch.Generator().manual_seed(0)
        sizes = {"model.layers.0.mlp.up_proj.weight": (16, 16), "model.norm.weight": (16,)}
        self._base = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
        self._updates = [
            {name: 0.1 * torch.randn(size, generator=draw) for name, size in sizes.items()}
            for _ in "ab"
        ]
        save_file(self._base, home / "base.safetensors")
        for name, update in zip("ab", self._updates, strict=True):
            save_file(
                {n: t + update[n] for n, t in self._base.items()}, home / f"{name}.safetensors"
            )
        (home / "score.py").write_text(SCORE)
        (home / "recipe.yml").write_text(RECIPE.format(home=home))

    def arguments(self, command: str) -> list[str]:
        """The command line."""
        scorer = ["--score", f"{sys.executable} {self.home}/score.py {{model}}"]
        out = ["--out", str(self.home / command)]
        if command == "search":
            more = ["--trials", str(SEARCHED), "--together", "2"]
            return ["search", str(self.home / "recipe.yml"), *scorer, *more, *out]
        sources = ["--base", f"{self.home}/base.safetensors"]
        for name in "ab":
            sources += ["--expert", f"{name}={self.home}/{name}.safetensors"]
        methods = ["--methods", "average,task_arithmetic(scale=0.3)"]
        return ["compare", *sources, *methods, *scorer, *out]

    def merged(self, scale: float, weights: tuple[float, float]) -> Model:
        """The sum of the updates on the base, in float64."""
        parts = list(zip(weights, self._updates, strict=True))
        return {
            name: base.double() + scale * sum(w * update[name].double() for w, update in parts)
            for name, base in self._base.items()
        }

    def check_model(self, folder: Path, wanted: Model) -> None:
        found = load_file(folder / "model.safetensors")
        for name, tensor in wanted.items():
            if not torch.allclose(found[name].double(), tensor, rtol=0, atol=1e-6):
                raise BrokenError(f"wrong but finished: {folder.name}, {name}")

    def check_present(self, command: str) -> None:
        """Check the models of `compare` that are there: each is a whole one."""
        if command == "compare":
            for name, factor in COMPARED.items():
                if (self.home / command / name).exists():
                    self.check_model(self.home / command / name, self.merged(factor, (1, 1)))

    def check(self, command: str) -> None:
        """Check all that the command leaves."""
        out = self.home / command
        left = {path.name for path in self.home.iterdir() if path.name.startswith(".")}
        names = {path.name for path in out.iterdir()}
        expected = {"best", "best.yml", "search.db", "trials.csv"}
        if command == "compare":
            expected = {*COMPARED, "covmerge.json", "scores.csv", "scores.json", "scores.tex"}
        if left or names != expected:
            raise BrokenError(f"{sorted(left)} beside {sorted(names)}")
        getattr(self, f"_check_{command}")(out)

    def _check_compare(self, out: Path) -> None:
        self.check_present("compare")
        scores = {row["model"]: float(row["score"]) for row in _rows(out / "scores.csv")}
        wanted = {name: _score(self.merged(factor, (1, 1))) for name, factor in COMPARED.items()}
        _same(scores, wanted)

    def _check_search(self, out: Path) -> None:
        trials = [row for row in _rows(out / "trials.csv") if row["trial"] != "no trial"]
        if len(trials) != SEARCHED:
            raise BrokenError(f"{len(trials)} trials")
        models = {row["trial"]: self._of(row) for row in trials}
        scores = {row["trial"]: float(row["score"]) for row in trials}
        _same(scores, {trial: _score(model) for trial, model in models.items()})
        self.check_model(out / "best", models[max(scores, key=scores.__getitem__)])

    def _of(self, row: Mapping[str, str]) -> Model:
        weights = (float(row["experts.a.weight"]), float(row["experts.b.weight"]))
        return self.merged(float(row["parameters.scale"]), weights)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _score(model: Model) -> float:
    return -sum(float((tensor - 1).abs().sum()) for tensor in model.values())


def _same(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    if found.keys() != wanted.keys() or any(abs(found[n] - wanted[n]) > _OFF for n in wanted):
        raise BrokenError(f"wrong but finished: scores {found} for {wanted}")


def trial(scene: Scene, command: str, at: At) -> str:
    """Kill a run at a step, and go on with it."""
    shutil.rmtree(scene.home / command, ignore_errors=True)
    ended = Child(scene.home, scene.arguments(command), at=at).wait()
    scene.check_present(command)
    again = Child(scene.home, [*scene.arguments(command), "--resume"]).wait()
    if again.named and "leave out --resume" in again.said:  # nothing was there yet
        again = Child(scene.home, scene.arguments(command)).wait()
    if again.code:
        raise BrokenError(f"--resume ended with {again.code}: {again.said}")
    scene.check(command)
    return "killed, and gone on with" if ended.code < 0 else "ended before the kill"


def main(given: list[str] | None = None) -> int:
    """Print what became of the trials, by command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=COMMANDS, action="append")
    asked = parser.parse_args(given)
    broken = 0
    print(
        "| command | trials | killed, and gone on with | wrong but finished, or broken |\n|---|---|---|---|"
    )
    for command in asked.command or COMMANDS:
        counts: Counter[str] = Counter()
        with TemporaryDirectory() as folder:
            scene = Scene(Path(folder))
            child = Child(scene.home, scene.arguments(command), counted=True)
            if (undisturbed := child.wait()).code:
                raise SystemExit(undisturbed.said)
            scene.check(command)
            steps, writes = child.steps()
            for number in range(asked.trials):
                random = Random(json.dumps([asked.seed, command, number]))
                torn = random.random() < 0.25
                at = At(random.randrange(1, (writes if torn else steps) + 1), kill_self, torn=torn)
                try:
                    counts[trial(scene, command, at)] += 1
                except Exception:
                    counts["broken"] += 1
                    print(
                        f"{command}, trial {number}, {at}:\n{traceback.format_exc()}",
                        file=sys.stderr,
                    )
        went = counts["killed, and gone on with"]
        print(f"| `{command}` | {asked.trials} | {went} | {counts['broken']} |", flush=True)
        broken += counts["broken"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
