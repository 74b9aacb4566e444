"""The models of a mergekit recipe, or its slices or modules, each with its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.methods import METHODS, TheirMethod
from covmerge.plan.recipe.mergekit.models import (
    KEYS,
    RESERVED,
    Places,
    Reference,
    names_of,
    reference,
)
from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.strict_yaml import unquoted
from covmerge.plan.recipe.varied import BY_NAME, is_varied

# mergekit's `modules`: parts of a composite model that are merged from separate lists of models.

WHOLE = "default"  # mergekit's name for the only module of a model that is not composite
# Modules with all the tensors of a model that no other module has; their names share no pattern.
_REST = ("text_decoder", "shared", WHOLE)
_VISION = ("*vision_tower.*", "*vision_model.*", "*visual.*")  # a model has only one of these
# Patterns of the tensor names of each module; earlier modules have precedence.
_PATTERNS: Mapping[str, Sequence[str]] = {
    "multi_modal_projector": (
        *("*multi_modal_projector.*", "*visual.merger.*"),
        "*visual.deepstack_merger_list.*",
    ),
    "vision_tower": _VISION,
    "vision_model": _VISION,
    "encoder": ("encoder.*", "model.encoder.*"),
    "decoder": ("decoder.*", "model.decoder.*"),
}
# Modules whose tensors must be excluded from another module, even if the recipe omits them.
_BESIDE = {
    "text_decoder": ("multi_modal_projector", "vision_tower"),
    "vision_tower": ("multi_modal_projector",),
    "vision_model": ("multi_modal_projector",),
    "shared": ("encoder", "decoder"),
}


def by_module(part: Part, values: Mapping[str, Any], elsewhere: Any) -> Any:
    """Return modules' values as one value: a plain one if all are equal, else one by name.

    A list has one value for each model. Tensors of modules that the recipe omits have the value
    `elsewhere`; None: any value will do.
    """
    lists = {n: cast("list[Any]", value) for n, value in values.items() if isinstance(value, list)}
    if lists:
        each = zip(*lists.values(), strict=True)
        alike = ({**values, **dict(zip(lists, one, strict=True))} for one in each)
        return [by_module(part, one, elsewhere) for one in alike]
    if any(is_varied(value) and BY_NAME in value for value in values.values()):
        part.refuse(
            "filters beside several modules: leave them out, print the recipe (`covmerge import-mergekit`) "
            "and write them into its `by_name`",
            "modules",
        )
    rest = next((name for name in values if name in _REST), None)
    if elsewhere is None:
        elsewhere = next(iter(values.values())) if rest is None else values[rest]
    known = {name: values[name] for name in values if name != rest}
    patterns = [_patterns(name) for name in known]
    beside = [other for name in values for other in _BESIDE.get(name, ())]
    known |= {name: elsewhere for name in beside if _patterns(name) not in patterns}
    otherwise = elsewhere if rest is None else values[rest]
    entries = [
        {"match": _patterns(name), "value": known[name]} for name in sorted(known, key=_order)
    ]
    while entries and entries[-1]["value"] == otherwise:
        entries.pop()
    return {BY_NAME: [*entries, {"value": deepcopy(otherwise)}]} if entries else otherwise


def _patterns(name: str) -> list[str]:
    """Return the patterns of a module's names; unknown modules are named by the first part of names."""
    return list(_PATTERNS.get(name, (f"{name}*",)))


def _order(name: str) -> tuple[int, int]:
    known = list(_PATTERNS)
    return (known.index(name), 0) if name in known else (len(known), -len(name))


@dataclass(frozen=True)
class Source:
    """A model in a slice; without slices, `layers` is None."""

    model: Reference
    part: Part
    layers: tuple[int, int] | None


@dataclass(frozen=True)
class Piece:
    """Models that are merged together, of a slice or of all layers."""

    part: Part  # the slice, or an empty one
    sources: Sequence[Source]
    start: int = 0  # number of its first layer in the output
    module: str | None = None  # None: there are no modules, or only one
    outer: Sequence[Part] = ()  # between the slice and the recipe

    @property
    def renumbers(self) -> bool:
        """Whether a layer has another number in its model than in the output."""
        return any(s.layers is not None and s.layers[0] != self.start for s in self.sources)


@dataclass(frozen=True)
class Theirs:
    """A mergekit recipe after reading."""

    part: Part
    method: TheirMethod
    places: Places
    base: Reference | None
    pieces: Sequence[Piece]  # slices or modules; for a recipe with `models`, one without layers

    @property
    def name(self) -> str:
        """Name of the method in mergekit."""
        return str(self.part.data["merge_method"])

    @property
    def is_theirs(self) -> bool:
        return self.name in METHODS

    @property
    def sliced(self) -> bool:
        return self.pieces[0].sources[0].layers is not None

    @property
    def modular(self) -> bool:
        """Whether its modules are parts of the model."""
        return self.pieces[0].module is not None

    def merged(self, piece: Piece) -> list[Source]:
        """Return the models that are merged, without the base if updates are differences from it."""
        one_more = self.method.base == "one_more"
        return [source for source in piece.sources if one_more or source.model != self.base]

    def around(self, piece: Piece) -> list[Part]:
        """Return the `parameters` shared by a piece's models, from the nearest place outwards."""
        return [part.part("parameters") for part in (piece.part, *piece.outer, self.part)]

    @cached_property
    def models(self) -> dict[Reference, str]:
        """All models that are merged, with their names."""
        merged = [[s.model for s in self.merged(piece)] for piece in self.pieces]
        every = self._in_order(merged) if self.modular else [m for one in merged for m in one]
        of_tokens = any(self.part.data.get(key) is not None for key in KEYS)
        return names_of(every, RESERVED if of_tokens else ())

    def _in_order(self, merged: Sequence[Sequence[Reference]]) -> list[Reference]:
        """Return an order that fits all modules; it affects rounding and the random numbers drawn."""
        after: dict[Reference, set[Reference]] = {}
        for one in merged:
            for place, model in enumerate(one):
                after.setdefault(model, set()).update(one[:place])
        try:
            return list(TopologicalSorter(after).static_order())
        except CycleError:
            self.part.refuse(
                "two modules name the same models in another order: name them in one order in all",
                "modules",
            )

    @cached_property
    def start(self) -> Reference | None:
        """The base of covmerge's recipe: mergekit's base, or else the model that adapters belong to."""
        adapted = {model.model for model in self.models if model.lora is not None}
        if self.base is not None:
            adapted.add(self.base.model)
        if len(adapted) > 1:
            self.part.refuse(
                f"adapters are of the base, and here of several models ({', '.join(sorted(adapted))}): "
                "fold each into its own first (`covmerge merge --base MODEL --expert lora=ADAPTER OUT`), "
                "and name OUT"
            )
        if self.base is not None and self.base.lora is not None:
            self.part.refuse(
                f"base_model {self.base} has an adapter: fold it into the model first (`covmerge merge "
                f"--base {self.base.model} --expert lora={self.base.lora} OUT`), and name OUT",
                "base_model",
            )
        return Reference(adapted.pop()) if adapted else None


def read_theirs(part: Part, method: TheirMethod, places: Places) -> Theirs:
    """Read models, slices or modules, and check their number against what the method needs."""
    way = _way(part, "models", "slices", "modules")
    base = _base(part, way)
    pieces = _modules(part, base) if way == "modules" else _pieces(part, base, way)
    theirs = Theirs(part, method, places, base, pieces)
    for piece in pieces:
        _check(theirs, piece)
    return theirs


def _base(part: Part, way: str) -> Reference | None:
    """Return the recipe's base, which slices may repeat, or name if the recipe does not."""
    said = None if part.data.get("base_model") is None else reference(part, "base_model")
    modules = part.part("modules")
    places = [part] if way == "slices" else [modules.part(name) for name in modules.data]
    slices = [entry for one in places if one.data.get("slices") for entry in one.parts("slices")]
    bases = [
        said if entry.data.get("base_model") is None else reference(entry, "base_model")
        for entry in slices
    ]
    base = bases[0] if bases and said is None else said
    for entry, named in zip(slices, bases, strict=True):
        if named != base:
            entry.refuse(
                f"the base of this slice is {named or 'not said'}, and that of the recipe or of the first "
                f"slice {base or 'not said'}: one base says whose config, embeddings and buffers the "
                "output has. Make it the same in all, or the recipe's `base_model`",
                "base_model",
            )
    return base


def _way(part: Part, *known: str) -> str:
    ways = [key for key in known if part.data.get(key) is not None]
    if len(ways) != 1:
        listed = " and ".join(f"`{key}`" for key in known)
        part.refuse(f"exactly one of {listed} is needed, and there are {ways or 'none'}")
    return ways[0]


def _pieces(part: Part, base: Reference | None, way: str) -> list[Piece]:
    return _slices(part) if way == "slices" else [_models(part, base)]


def _modules(part: Part, base: Reference | None) -> list[Piece]:
    """Return the pieces of all modules; a module that is the whole model counts as the recipe itself."""
    modules = part.part("modules")
    if not modules.data:
        part.refuse("`modules` has no module; each is a name with `models` or `slices`", "modules")
    found: list[Piece] = []
    for name in modules.data:
        module = modules.part(name)
        module.check_keys(("models", "slices", "parameters"))
        whole = name == WHOLE and len(modules.data) == 1
        way = _way(module, "models", "slices")
        if way == "slices" and not whole:
            module.refuse(
                "layers of one of several modules are not stacked anew: write `models`, which takes each "
                "model's own layers",
                "slices",
            )
        called = None if whole else str(name)
        pieces = _pieces(module, base, way)
        found += [replace(piece, module=called, outer=(module,)) for piece in pieces]
    return found


def _models(part: Part, base: Reference | None) -> Piece:
    nothing = Part({}, (), part.origin, part.log)
    sources: list[Source] = []
    for entry in part.parts("models"):
        entry.check_keys(("model", "parameters"))
        sources.append(Source(reference(entry, "model"), entry, None))
    if base is not None and base not in [source.model for source in sources]:
        sources.append(Source(base, nothing, None))
    return Piece(nothing, sources)


def _slices(part: Part) -> list[Piece]:
    found: list[Piece] = []
    start = 0
    for entry in part.parts("slices"):
        entry.check_keys(("sources", "base_model", "parameters", "residual_weight"))
        if "residual_weight" in entry.data:
            entry.log.notes.append(
                "`residual_weight` changes nothing: mergekit reads it and never uses it"
            )
        sources = [_source(source) for source in entry.parts("sources")]
        found.append(Piece(entry, sources, start))
        first, end = sources[0].layers or (0, 0)
        start += end - first
    return found


def _source(part: Part) -> Source:
    part.check_keys(("model", "layer_range", "parameters"))
    given: object = part.data.get("layer_range")
    layers = _range(given)
    if layers is None:
        part.refuse(
            f"layer_range is {shown(given)}; it is [first, end), such as [0, 8]", "layer_range"
        )
    return Source(reference(part, "model"), part, layers)


def _check(theirs: Theirs, piece: Piece) -> None:
    models = [source.model for source in piece.sources]
    twice = next((model for model in models if models.count(model) > 1), None)
    if twice is not None:
        piece.part.refuse(f"{twice} is named twice: a model is one input of a merge")
    if theirs.method.base == "required" and theirs.base not in models:
        what = (
            "`base_model`, the model that the others were fine-tuned from"
            if theirs.base is None
            else f"the base {theirs.base} among its sources"
        )
        piece.part.refuse(f"{theirs.name} needs {what}")
    least, most = theirs.method.experts
    merged = theirs.merged(piece)
    if len(merged) < least or (most is not None and len(merged) > most):
        number = str(least) if least == most else f"{least} or more"
        piece.part.refuse(
            f"{theirs.name} merges {number} models beside a base, and there are {len(merged)}: "
            f"{', '.join(str(source.model) for source in merged)}"
        )


def _range(value: object) -> tuple[int, int] | None:
    ends = [unquoted(end) for end in cast("list[object]", value)] if isinstance(value, list) else []
    whole = [end for end in ends if isinstance(end, int) and not isinstance(end, bool)]
    return (whole[0], whole[1]) if len(ends) == len(whole) == 2 else None
