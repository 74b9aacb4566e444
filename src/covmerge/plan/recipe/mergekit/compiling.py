"""From a mergekit recipe to a recipe of covmerge's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.methods import named
from covmerge.plan.recipe.mergekit.models import Places, Reference
from covmerge.plan.recipe.mergekit.modules import by_module
from covmerge.plan.recipe.mergekit.moe import compile_moe, is_mergekit_moe
from covmerge.plan.recipe.mergekit.parameters import own_weight, parameters
from covmerge.plan.recipe.mergekit.pieces import Piece, Theirs, read_theirs
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.mergekit.tokenizers import KEYS, Named, tokens_of
from covmerge.plan.recipe.strict_yaml import Origin

_KEYS = (
    *(
        "merge_method",
        "base_model",
        "models",
        "slices",
        "modules",
        "parameters",
        "dtype",
        "out_dtype",
    ),
    *KEYS,
)
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def compile_mergekit(
    data: Mapping[str, Any], origin: Origin, log: ImportLog, places: Places | None = None
) -> dict[str, Any]:
    """Return the recipe of covmerge's that does what a recipe of mergekit's says.

    Args:
        data: mergekit's recipe.
        origin: where it came from, for messages.
        log: how strictly it is read; notes and warnings are added to it.
        places: where models are looked for, beside the working directory.

    Raises:
        RecipeError: what cannot be read, is unknown, or is refused, with the next step.

    Example:
        >>> theirs = {
        ...     "merge_method": "linear",
        ...     "models": [{"model": "org/a", "parameters": {"weight": 1}},
        ...                {"model": "org/b", "parameters": {"weight": 2}}],
        ... }
        >>> ours = compile_mergekit(theirs, Origin("example"), ImportLog())
        >>> ours["base"], ours["experts"], ours["parameters"]["weight"]
        (None, {'a': 'org/a', 'b': 'org/b'}, [1, 2])
    """
    if is_mergekit_moe(data):
        return compile_moe(data, origin, log, places)
    part = Part(data, (), origin, log)
    part.check_keys(_KEYS)
    theirs = read_theirs(part, named(part), places or Places())
    settings = [parameters(theirs, piece) for piece in theirs.pieces]
    if theirs.modular:
        settings = [_by_module(theirs, settings)]
    alike = all(one == settings[0] for one in settings)
    found: dict[str, Any] = {
        "base": theirs.base_path,
        "experts": {name: _expert(theirs, model) for model, name in theirs.models.items()},
        "method": theirs.method.ours,
        "parameters": {**_fixed(theirs), **(settings[0] if alike else {})},
    }
    if theirs.sliced:
        found["slices"] = [
            {**_layers(theirs, piece), **({} if alike else {"parameters": one})}
            for piece, one in zip(theirs.pieces, settings, strict=True)
        ]
    if theirs.base is not None and theirs.base in theirs.models:
        found["allow"] = ["unchanged-expert"]  # the base is one of the models
    return {**found, **tokens_of(part, Named(theirs.models, theirs.start)), **_dtypes(part)}


def _expert(theirs: Theirs, model: Reference) -> Any:
    source = theirs.places.located(model.lora or model.model)
    weight = _weight(theirs, model)
    return source if weight is None else {"source": source, "weight": weight}


def _weight(theirs: Theirs, model: Reference) -> Any:
    """What a model counts for beside the parameters of the method; None: as the others."""
    weights = [(piece, own_weight(theirs, piece, model)) for piece in theirs.pieces]
    if not theirs.modular:
        return next((weight for _, weight in weights if weight is not None), None)
    values = {
        str(piece.module): (1.0 if weight is None else weight)
        if model in [source.model for source in theirs.merged(piece)]
        else 0.0
        for piece, weight in weights
    }
    found = by_module(theirs.part, values, elsewhere=0.0)
    return None if found == 1.0 else found


def _by_module(theirs: Theirs, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters of all modules as those of the recipe."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in settings for key in one):
        values = {
            str(piece.module): one[key]
            for piece, one in zip(theirs.pieces, settings, strict=True)
            if key in one
        }
        if len(values) < len(settings):
            theirs.part.refuse(
                f"`{key}` is said of some modules alone ({', '.join(values)}): say it of all",
                "modules",
            )
        found[key] = by_module(theirs.part, values, None)
    return found


def _layers(theirs: Theirs, piece: Piece) -> dict[str, Any]:
    experts = {theirs.models[s.model]: list(s.layers or ()) for s in theirs.merged(piece)}
    if theirs.start is None:
        return {"experts": experts}
    base = next((s.layers for s in piece.sources if s.model == theirs.base), None)
    return {"experts": experts, **({} if base is None else {"base": list(base)})}


def _fixed(theirs: Theirs) -> dict[str, Any]:
    """Parameters that make the method theirs."""
    fixed = dict(theirs.method.fixed)
    if theirs.method.around and theirs.base is not None:
        fixed["around"] = "base"
    if theirs.method.ordered:
        fixed["drawn"] = "in_order"
    dtype = _dtype(theirs.part, "dtype")
    if theirs.is_theirs and dtype != "float32":
        fixed["arithmetic"] = dtype or "stored"
    return fixed


def _dtypes(part: Part) -> dict[str, Any]:
    """What is computed in, and stored."""
    dtype, stored = _dtype(part, "dtype"), _dtype(part, "out_dtype")
    found: dict[str, Any] = {}
    if dtype == "float64":
        found["dtype"] = dtype
    if stored or dtype:
        found["output"] = {"dtype": stored or dtype}
    return found


def _dtype(part: Part, key: str) -> str | None:
    value = part.data.get(key)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        part.refuse(f"{key} is {shown(value)}; it is one of {', '.join(_DTYPES)}", key)
    return name
