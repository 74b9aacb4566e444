"""Compiling a mergekit recipe to a covmerge recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from covmerge.base.identifiers import EXPERT_NAME, EXPERT_NAME_LENGTH
from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.methods import named
from covmerge.plan.recipe.mergekit.mixtures import compile_moe, is_mergekit_moe
from covmerge.plan.recipe.mergekit.models import KEYS, Named, Places, Reference, tokens_of
from covmerge.plan.recipe.mergekit.parameters import own_weight, parameters
from covmerge.plan.recipe.mergekit.pieces import Piece, Theirs, by_module, read_theirs
from covmerge.plan.recipe.mergekit.reading import ImportLog, Part
from covmerge.plan.recipe.strict_yaml import Origin

_COMPILING_KEYS = (
    "merge_method",
    "base_model",
    "models",
    "slices",
    "modules",
    "parameters",
    "dtype",
    "out_dtype",
    *KEYS,
)


def compile_mergekit(
    data: Mapping[str, Any], origin: Origin, log: ImportLog, places: Places | None = None
) -> dict[str, Any]:
    """Return the covmerge recipe that does what a mergekit recipe says.

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
    places = places or Places()
    if is_mergekit_moe(data):
        return compile_moe(data, origin, log, places)
    part = Part(data, (), origin, log)
    part.check_keys(_COMPILING_KEYS)
    theirs = read_theirs(part, named(part), places)
    settings = [parameters(theirs, piece) for piece in theirs.pieces]
    if theirs.modular:
        settings = [_by_module(theirs, settings)]
    alike = all(one == settings[0] for one in settings)
    found: dict[str, Any] = {
        "base": theirs.start and theirs.places.located(theirs.start.model),
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
    """Return a model's weight, for methods without a parameter for weights; None: the default."""
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
    """Return the parameters of all modules as one set for the recipe."""
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
    """Return the parameters that make the method behave like mergekit's."""
    fixed = dict(theirs.method.fixed)
    if theirs.method.around and theirs.base is not None:
        fixed["around"] = "base"
    if theirs.method.ordered:
        fixed["drawn"] = "in_order"
    dtype = theirs.part.dtype("dtype")
    if theirs.is_theirs and dtype != "float32":
        fixed["arithmetic"] = dtype or "stored"
    return fixed


def _dtypes(part: Part) -> dict[str, Any]:
    dtype, stored = part.dtype("dtype"), part.dtype("out_dtype")
    found: dict[str, Any] = {}
    if dtype == "float64":
        found["dtype"] = dtype
    if stored or dtype:
        found["output"] = {"dtype": stored or dtype}
    return found


# Several mergekit recipes in one file: stages that name each other's outputs.


@dataclass(frozen=True)
class Stage:
    """One recipe of the file; its output has a name for the other recipes, but for the last one."""

    name: str | None
    part: Part

    @classmethod
    def of(cls, data: Any, origin: Origin, log: ImportLog) -> Stage:
        """Return the recipe of a document."""
        given = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        part = Part({k: v for k, v in given.items() if k != "name"}, (), origin, log)
        if not isinstance(data, dict):
            part.refuse("a document is no mapping; each is a recipe of mergekit's")
        if "experts" in given:
            part.refuse(
                "several documents in a file are stages of mergekit-multi, which have no `experts`: give "
                "each recipe a file, and merge one after the other",
                "experts",
            )
        if "name" not in given:
            return cls(None, part)
        name = given["name"]
        named = isinstance(name, str) and re.fullmatch(EXPERT_NAME, name)
        if not named or len(name) > EXPERT_NAME_LENGTH:
            part.refuse(
                f"`name` is {shown(name)}, and a folder is called so: use up to {EXPERT_NAME_LENGTH} "
                "letters, digits, '.', '_' or '-', and no '.' at the start",
                "name",
            )
        return cls(name, part)

    @cached_property
    def sources(self) -> set[str]:
        part = replace(self.part, log=ImportLog(lenient=True))
        theirs = read_theirs(part, named(part), Places())
        found = {source.model for piece in theirs.pieces for source in piece.sources}
        found |= set() if theirs.base is None else {theirs.base}
        return {path for model in found for path in (model.model, model.lora) if path is not None}


def in_order(documents: Sequence[Stage]) -> list[Stage]:
    """Return the recipes so that each comes after those whose outputs it names, the unnamed one last."""
    stages: dict[str, Stage] = {}
    last: list[Stage] = []
    for stage in documents:
        if stage.name is None:
            last.append(stage)
        elif any(stage.name.casefold() == name.casefold() for name in stages):
            # They would be one folder on many disks.
            stage.part.refuse(f"the name {stage.name!r} is taken by another document", "name")
        else:
            stages[stage.name] = stage
    if len(last) > 1:
        documents[-1].part.refuse(
            f"{len(last)} of the {len(documents)} documents have no `name`: one alone may be without, "
            "which makes the output"
        )
    return [stages[name] for name in _sorted(stages)] + last


def _sorted(stages: dict[str, Stage]) -> Iterable[str]:
    needed = {name: sorted(stage.sources & stages.keys()) for name, stage in stages.items()}
    try:
        return list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        round_trip = cast("list[str]", error.args[1])
        stages[round_trip[0]].part.refuse(
            f"stages that need each other's output: {' → '.join(reversed(round_trip))}", "name"
        )
