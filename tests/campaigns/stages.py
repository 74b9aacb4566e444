"""Recipes of mergekit in several documents: stages that name each other, clashing names, half-made stages.

    python -m tests.campaigns.stages --count 200

Each stage is computed again in float64, in an order that its names give.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import yaml
from torch import Tensor

from tests.campaigns import formats, outcomes
from tests.campaigns.merged import command, plain, verdict
from tests.campaigns.outcomes import Tensors

Stage = dict[str, Any]


def drawn(random: Random, models: list[str]) -> list[Stage]:
    """Stages of which each may take models and earlier stages; the last has no name."""
    stages: list[Stage] = []
    for number in range(random.choice((2, 2, 3, 4))):
        known = [*models, *(own["name"] for own in stages)]
        chosen = random.sample(known, 2)
        if stages and stages[-1]["name"] not in chosen:
            chosen[0] = stages[-1]["name"]
        parts = [
            {"model": m, "parameters": {"weight": random.choice((0.3, 0.5, 1.0))}} for m in chosen
        ]
        own: Stage = {"name": f"stage{number}", "merge_method": "linear", "models": parts}
        if random.random() < 0.5:
            own |= {"merge_method": "task_arithmetic", "base_model": models[0]}
        stages.append({**own, "dtype": "float32"})
    del stages[-1]["name"]
    return stages


def broken(stages: list[Stage], random: Random) -> list[Stage]:
    """The same with a name that clashes, leads nowhere, in a circle or out of the folder."""
    first, last = stages[0], stages[-1]
    match random.randrange(5):
        case 0:
            return [*stages[:-1], {**first}, last]
        case 1:
            first["models"][0]["model"] = random.choice(("nowhere", stages[-2]["name"]))
        case 2:
            name, first["name"] = (
                first["name"],
                random.choice(("../up", ".", "a/b", "", "x" * 300, "\u0000")),
            )
            for part in last["models"]:
                part["model"] = first["name"] if part["model"] == name else part["model"]
        case 3:
            last["name"] = first["name"]
        case _:
            last["models"].append({"model": last["models"][0]["model"]})
    return stages


def result(stages: list[Stage], models: dict[str, Tensors]) -> dict[str, Tensor] | str:
    """What the last stage is in float64, or why it is none."""
    names = [str(own.get("name", "")) for own in stages]
    usual = all(name and name == Path(name).name and name.isprintable() for name in names[:-1])
    if not usual or names[-1] or len({*names}) < len(names) or any(len(own) > 100 for own in names):
        return "names that are none, or twice the same"
    made: dict[str, dict[str, Tensor]] = {}

    def of(name: str) -> dict[str, Tensor]:
        if name in made:
            return made[name]
        return {key: own.double() for key, own in models[name].items()}

    waiting = list(stages)
    while waiting:
        ready = [
            s
            for s in waiting
            if all(p["model"] in made or p["model"] in models for p in s["models"])
        ]
        if not ready:
            return "a model that nobody makes"
        own = ready[0]
        waiting.remove(own)
        weights = [part["parameters"]["weight"] for part in own["models"] if "parameters" in part]
        if len(weights) < len(own["models"]):
            return "a model without a weight"
        sources = [of(part["model"]) for part in own["models"]]
        pairs = list(zip(weights, sources, strict=True))
        name = own.get("name", "")
        if own["merge_method"] == "linear":
            made[name] = {
                key: sum(w * source[key] for w, source in pairs) / sum(weights)
                for key in sources[0]
            }
        else:
            base = of(own["base_model"])
            made[name] = {
                key: start + sum(w * (source[key] - start) for w, source in pairs)
                for key, start in base.items()
            }
    return made[""]


def merge(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge stages: as they are, with names that go wrong, or after a run that was left half finished."""
    made = outcomes.models(random)
    models: dict[str, Tensors] = {}
    for name, tensors in made.items():
        (folder / name).mkdir()
        plain(folder / name / "model.safetensors", tensors)
        models[str(folder / name)] = tensors
    stages = drawn(random, [*models])
    kind = random.choice(("right", "names", "half"))
    if kind == "names":
        stages = broken(stages, random)
    values = result(stages, models)
    written = random.sample(stages, len(stages)) if kind == "right" else stages
    recipe, out = folder / "their.yml", folder / "out"
    recipe.write_text("---\n".join(yaml.safe_dump(own) for own in written))
    if kind == "half":
        _half(recipe, out, random)
    resumed = ["--resume"] if kind == "half" else []
    ended = command("merge", recipe, out, *resumed)
    names = {"their.yml", "stage", "'nowhere'", *made}
    return verdict(ended, out, values, names, right=kind == "right")


def _half(recipe: Path, out: Path, random: Random) -> None:
    """Leave a run of which the last output is away and a file of a stage is lost or damaged."""
    command("merge", recipe, out)
    out.rename(out.with_name("away"))
    files = [own for own in sorted(out.with_name("out.stages").rglob("*")) if own.is_file()]
    if not files:
        return
    path = random.choice([own for own in files if own.suffix in (".json", ".safetensors")])
    match random.randrange(3):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case _:
            path.write_bytes(formats.change(path.name, path.read_bytes(), random))


KINDS: dict[str, outcomes.Kind] = {"recipes of several documents": merge}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
