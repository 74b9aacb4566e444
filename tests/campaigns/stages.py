"""Recipes of mergekit in several documents: stages that name each other, and stages of an earlier run.

    python -m tests.campaigns.stages --count 200

Each stage is computed again in float64, in an order that its names give.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
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
            base = random.choice((models[0], *(name for name in known if name not in chosen)))
            own |= {"merge_method": "task_arithmetic", "base_model": base}
        if random.random() < 0.3:
            own["parameters"] = {"normalize": random.random() < 0.5}
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


def _named(stage: Stage) -> list[str]:
    """The models that a stage takes."""
    base = [stage["base_model"]] if "base_model" in stage else []
    return [*base, *(part["model"] for part in stage["models"])]


def _alike(one: Tensors, other: Tensors) -> bool:
    return all(torch.allclose(own, other[key], atol=1e-5) for key, own in one.items())


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
        ready = [s for s in waiting if all(name in made or name in models for name in _named(s))]
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
        linear = own["merge_method"] == "linear"
        divided = own.get("parameters", {}).get("normalize", linear)
        start_of = own.get("base_model")
        others = [p for p in own["models"] if p["model"] != start_of]  # the base has no update
        total = sum(p["parameters"]["weight"] for p in others) if divided else 1.0
        if not linear and any(_alike(of(p["model"]), of(own["base_model"])) for p in others):
            return "a model that is the base under another name"
        base = {k: 0.0 * w for k, w in sources[0].items()} if linear else of(own["base_model"])
        made[name] = {
            key: start + sum(w * (source[key] - start) for w, source in pairs) / total
            for key, start in base.items()
        }
    return made[""]


def merge(folder: Path, random: Random) -> outcomes.Verdict:
    """Merge stages: as they are, with names that go wrong, or after a run that did not come to its end.

    Between the two runs a file of a stage is lost or damaged, or a weight or a model is changed.
    """
    made = outcomes.models(random)
    models: dict[str, Tensors] = {}
    for name, tensors in made.items():
        (folder / name).mkdir()
        plain(folder / name / "model.safetensors", tensors)
        models[str(folder / name)] = tensors
    stages = drawn(random, [*models])
    kind = random.choice(("right", "right", "names", "half", "changed"))
    if random.random() < 0.3:  # a folder beside the recipe that is called as a stage is
        (folder / "stage0").mkdir()
        plain(folder / "stage0" / "model.safetensors", {k: 0 * w for k, w in made["a"].items()})
    if kind == "names":
        stages = broken(stages, random)
    recipe, out = folder / "their.yml", folder / "out"
    if kind in ("half", "changed"):
        _write(recipe, stages)
        _begin(recipe, out)
    resumed = ["--resume"] if kind == "half" or random.random() < 0.5 else []
    if kind == "half":
        _damage(out, random)
    elif kind == "changed":
        _change(stages, models, random)
    values = result(stages, models)
    _write(recipe, random.sample(stages, len(stages)) if kind == "right" else stages)
    ended = command("merge", recipe, out, *resumed)
    names = {"their.yml", "stage", "'nowhere'", *made}
    return verdict(ended, out, values, names, right=kind == "right" and not isinstance(values, str))


def _write(recipe: Path, stages: list[Stage]) -> None:
    recipe.write_text("---\n".join(yaml.safe_dump(own) for own in stages))


def _begin(recipe: Path, out: Path) -> None:
    """Leave the outputs of the stages, and no output of the last."""
    ended = command("merge", recipe, out)
    if ended.code == 0:
        out.rename(out.with_name("away"))


def _change(stages: list[Stage], models: dict[str, Tensors], random: Random) -> None:
    """Change a weight of a stage, or a model, after the outputs of stages were made."""
    if random.random() < 0.5:
        part = random.choice(random.choice(stages)["models"])
        part["parameters"]["weight"] += 0.25
        return
    name = random.choice([*models])
    models[name] = {key: own + 0.5 for key, own in models[name].items()}
    plain(Path(name) / "model.safetensors", models[name])


def _damage(out: Path, random: Random) -> None:
    """Lose or damage a file of a stage."""
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
