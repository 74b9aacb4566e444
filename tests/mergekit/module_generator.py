"""Recipes of mergekit with modules, drawn at random over the models of `models.py`.

Half of them are of T5's three parts, each with models and parameters of its own; half say `default`, which
is all of a model that has one part, and may have slices. Nothing here imports mergekit or covmerge.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.mergekit.generator import DTYPES, METHODS, say_parameters, slices
from tests.mergekit.models import EXPERTS, SETS

PARTS = ("shared", "encoder", "decoder")


def drawn(random: Random) -> dict[str, Any]:
    """Return a recipe; one of T5 in twelve has filters, which are refused beside several modules."""
    name = random.choice(list(METHODS))
    method = METHODS[name]
    parts = random.random() < 0.5
    folder = "t5" if parts else random.choice(list(SETS))
    based = method.base == "required" or (method.base == "optional" and random.random() < 0.5)
    base = f"./{folder}/base"
    recipe: dict[str, Any] = {"merge_method": name, **({"base_model": base} if based else {})}
    experts = [f"./{folder}/t{t}" for t in range(EXPERTS)]
    random.shuffle(experts)
    least, most = method.experts
    modules: dict[str, dict[str, Any]] = {}
    pieces: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    for part in PARTS if parts else ("default",):
        # In one order in all modules: in several they are refused.
        models = sorted(random.sample(experts, random.randint(least, most)), key=experts.index)
        module: dict[str, Any] = {}
        if not parts and random.random() < 0.4:
            found = module["slices"] = slices(random, method, models, base if based else None)
            pieces += found
            sources += [own for piece in found for own in piece["sources"]]
        else:
            listed = module["models"] = [{"model": model} for model in models]
            if based and random.random() < 0.3:
                listed.insert(0, {"model": base})
            sources += listed
        modules[part] = module
    recipe["modules"] = modules
    filters = not parts or random.random() < 1 / 12
    say_parameters(random, method, recipe, [*modules.values(), *pieces], sources, filters)
    for key, share in (("dtype", 0.4), ("out_dtype", 0.15)):
        if random.random() < share:
            recipe[key] = random.choice(DTYPES)
    return recipe
