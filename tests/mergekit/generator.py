"""Recipes of mergekit, drawn at random over the models of `models.py`.

`drawn` takes anything with the methods of `random.Random`: a seeded one in the campaign, hypothesis' own in
the tests, which makes what fails smaller. Nothing here imports mergekit or covmerge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.mergekit.models import ADAPTERS, EXPERTS, LAYERS, SETS

Draw = Callable[[Random], Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Texts that filters look for, of both architectures; the last one is in no name.
FILTERS = ("mlp", "attn", "norm", "proj", "embed", "lm_head", "weight", "ln_", "layers.1", "zzz")


def between(low: float, high: float) -> Draw:
    """A number with two digits, as people write them."""
    return lambda random: round(low + (high - low) * random.random(), 2)


def one_of(*values: Any) -> Draw:
    """One of some values."""
    return lambda random: random.choice(values)


_SWITCH = one_of(True, False)
_WEIGHT, _DENSITY = between(-0.3, 1.2), one_of(0.0, 0.1, 0.33, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Drawn:
    """What may be said of a method.

    Attributes:
        base: whether it needs one, may have one, or has no use for it.
        experts: the fewest and the most models beside the base.
        shared: parameters that all models share.
        each: parameters of each model; those of `needed` must be said.
    """

    base: str = "required"
    experts: tuple[int, int] = (1, EXPERTS)
    shared: Mapping[str, Draw] = field(default_factory=dict[str, Draw])
    each: Mapping[str, Draw] = field(default_factory=dict[str, Draw])
    needed: Sequence[str] = ()


def _delta(**more: Draw) -> Drawn:
    switches = {"normalize": _SWITCH, "rescale": _SWITCH, "int8_mask": _SWITCH}
    shared = {**switches, "lambda": one_of(0.3, 0.7, 1, 1.0, 1.5)}
    return Drawn(
        shared=shared, each={"weight": _WEIGHT, "density": _DENSITY, **more}, needed=("weight",)
    )


METHODS: Mapping[str, Drawn] = {
    "task_arithmetic": _delta(),
    "ties": _delta(),
    "dare_linear": _delta(),
    "dare_ties": _delta(),
    "della": _delta(density=one_of(0.3, 0.5, 0.7, 1.0), epsilon=between(0.05, 0.25)),
    "della_linear": _delta(density=one_of(0.3, 0.5, 0.7, 1.0), epsilon=between(0.05, 0.25)),
    "breadcrumbs": _delta(gamma=between(0, 0.2)),
    "breadcrumbs_ties": _delta(gamma=between(0, 0.2)),
    "linear": Drawn(
        "optional", (1, EXPERTS), {"normalize": _SWITCH}, {"weight": _WEIGHT}, ("weight",)
    ),
    "slerp": Drawn(experts=(1, 1), shared={"t": between(0, 1)}, needed=("t",)),
    "nearswap": Drawn(experts=(1, 1), shared={"t": between(0, 0.2)}, needed=("t",)),
    "nuslerp": Drawn(
        "optional",
        (2, 2),
        {"nuslerp_flatten": _SWITCH, "nuslerp_row_wise": _SWITCH},
        {"weight": between(0.1, 1)},
        ("weight",),
    ),
    "multislerp": Drawn(
        "optional",
        (2, EXPERTS),
        {"normalize_weights": _SWITCH, "eps": one_of(1e-8, 1e-4)},
        {"weight": between(0.1, 1)},
        ("weight",),
    ),
    "karcher": Drawn(
        "optional", (2, EXPERTS), {"max_iter": one_of(1, 10), "tol": one_of(1e-5, 1e-3)}
    ),
    "passthrough": Drawn("none", (1, 1), each={"scale": between(0, 1.5)}),
    "model_stock": Drawn(experts=(2, EXPERTS), shared={"filter_wise": _SWITCH}),
    "sce": Drawn(shared={"select_topk": between(0.1, 1), "int8_mask": _SWITCH}),
    "ram": Drawn(shared={"epsilon": one_of(1e-5, 0.02)}),
    "ramplus_tl": Drawn(
        shared={"epsilon": one_of(1e-5, 0.02), "r": between(0, 0.3), "alpha": between(0, 0.5)}
    ),
    "arcee_fusion": Drawn(experts=(1, 1)),
}
# Parameters that one value holds for, of all tensors.
_PLAIN = ("nuslerp_flatten", "nuslerp_row_wise", "max_iter")


def drawn(random: Random) -> dict[str, Any]:
    """Return a recipe; one in twelve has a slip, of which mergekit may think nothing."""
    name = random.choice(list(METHODS))
    method = METHODS[name]
    folder = random.choice(list(SETS))
    models = [f"./{folder}/t{t}" for t in range(EXPERTS)]
    least, most = method.experts
    models = random.sample(models, random.randint(least, most))
    if folder == "gpt2" and random.random() < 0.25 and method.base == "required":
        models[0] = f"./gpt2/base+./gpt2/lora{random.randrange(ADAPTERS)}"
    recipe: dict[str, Any] = {"merge_method": name}
    base = method.base == "required" or (method.base == "optional" and random.random() < 0.4)
    if base:
        recipe["base_model"] = f"./{folder}/base"
    sliced = "+" not in models[0] and random.random() < 0.35
    if sliced:
        recipe["slices"] = slices(random, method, models, recipe.get("base_model"))
    else:
        listed = [{"model": model} for model in models]
        if base and random.random() < 0.3:
            listed.insert(random.randint(0, len(listed)), {"model": recipe["base_model"]})
        recipe["models"] = listed
    _parameters(random, method, recipe)
    for key, share in (("dtype", 0.5), ("out_dtype", 0.25)):
        if random.random() < share:
            recipe[key] = random.choice(DTYPES)
    if random.random() < 1 / 12:
        _slip(random, recipe)
    return recipe


def slices(
    random: Random, method: Drawn, models: Sequence[str], base: str | None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _ in range(random.randint(1, 3)):
        count = random.randint(method.experts[0], len(models))
        own = random.sample(list(models), count)
        if base is not None:
            own.insert(random.randint(0, count), base)
        length = random.randint(1, LAYERS)
        aligned = random.random() < 0.7
        start = random.randint(0, LAYERS - length)
        sources: list[dict[str, Any]] = []
        for model in own:
            first = start if aligned else random.randint(0, LAYERS - length)
            sources.append({"model": model, "layer_range": [first, first + length]})
        found.append({"sources": sources})
    return found


def _parameters(random: Random, method: Drawn, recipe: dict[str, Any]) -> None:
    pieces: list[dict[str, Any]] = recipe.get("slices", [])
    sources = [own for piece in pieces for own in piece["sources"]] or recipe["models"]
    say_parameters(random, method, recipe, pieces, sources)


def say_parameters(
    random: Random,
    method: Drawn,
    recipe: dict[str, Any],
    pieces: Sequence[dict[str, Any]],
    sources: Sequence[dict[str, Any]],
    filters: bool = True,
) -> None:
    """Say the parameters at some of the places that they may be said at: recipe, pieces and models."""
    for name, draw in {**method.shared, **method.each}.items():
        needed = name in method.needed
        if not needed and random.random() < 0.5:
            continue
        places = [recipe] if random.random() < 0.5 else []
        places += [piece for piece in pieces if random.random() < 0.3]
        if name in method.each:
            everywhere = not places and needed
            places += [own for own in sources if everywhere or random.random() < 0.4]
        elif not places and needed:
            places = [recipe]
        for place in places:
            place.setdefault("parameters", {})[name] = _setting(random, name, draw, filters)


def _setting(random: Random, name: str, draw: Draw, filters: bool) -> Any:
    if name in _PLAIN or random.random() < 0.6:
        return draw(random)
    if not filters or random.random() < 0.4:
        return _gradient(random, draw)
    conditions: list[dict[str, Any]] = []
    for text in random.sample(FILTERS, random.randint(1, 3)):
        conditions.append({"filter": text, "value": _value(random, draw)})
    if random.random() < 0.8:
        conditions.append({"value": _value(random, draw)})
    return conditions


def _value(random: Random, draw: Draw) -> Any:
    return _gradient(random, draw) if random.random() < 0.3 else draw(random)


def _gradient(random: Random, draw: Draw) -> Any:
    values = [draw(random) for _ in range(random.randint(2, 5))]
    # Those of truth values are in test_compiling.py.
    return values[0] if isinstance(values[0], bool) else values


def _slip(random: Random, recipe: dict[str, Any]) -> None:
    """Make a mistake that people make."""
    slips: list[Callable[[], Any]] = [
        lambda: recipe.update(paramters={"weight": 1}),
        lambda: recipe.setdefault("parameters", {}).update(wieght=0.5),
        lambda: recipe.pop("base_model", None),
        lambda: recipe.pop("parameters", None),
        lambda: recipe.update(base_model="./llama/base"),
        lambda: recipe.update(dtype=random.choice(["int8", "fp16", "float8"])),
        lambda: recipe.update(merge_method=recipe["merge_method"][:-1]),
        lambda: _first(recipe).setdefault("parameters", {}).update({"lambda": 2.0, "t": 0.1}),
        lambda: _first(recipe).update(model="./llama/none"),
        lambda: _first(recipe).update(layer_range=[0, LAYERS + 1]),
        lambda: recipe.setdefault("parameters", {}).update({"lambda": 0}),
    ]
    random.choice(slips)()


def _first(recipe: dict[str, Any]) -> dict[str, Any]:
    if "slices" in recipe:
        return recipe["slices"][0]["sources"][0]
    return recipe["models"][0]
