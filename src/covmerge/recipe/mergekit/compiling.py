"""From a mergekit recipe to a recipe of covmerge's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from covmerge.errors import did_you_mean
from covmerge.methods import registry
from covmerge.recipe.mergekit.methods import METHODS, TheirMethod
from covmerge.recipe.mergekit.models import Reference, located, names_of, reference
from covmerge.recipe.mergekit.reading import Part, Told
from covmerge.recipe.mergekit.settings import filters, setting
from covmerge.recipe.mergekit.tokenizers import KEYS, RESERVED, Named, asks_for_tokens, tokens_of
from covmerge.recipe.strict_yaml import Origin

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
_REFUSED = {
    "modules": "models of several modules are not sliced by module here: write `models:`, which merges all "
    "of their tensors, and leave some to the base by covmerge's `rules`",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class _Source:
    """A model in a slice, or in all of the output: its layers are then None."""

    model: Reference
    part: Part
    layers: tuple[int, int] | None


@dataclass(frozen=True)
class _Slice:
    """What is merged from the same models; `part` is the recipe's, where it has no slices."""

    part: Part
    sources: Sequence[_Source]


def compile_mergekit(
    data: Mapping[str, Any], origin: Origin, told: Told, beside: Path | None = None
) -> dict[str, Any]:
    """Return the recipe of covmerge's that does what a recipe of mergekit's says.

    Args:
        data: mergekit's recipe.
        origin: where it came from, for messages.
        told: how strictly it is read; notes and warnings are added to it.
        beside: the recipe's folder, for paths that the working directory does not have.

    Raises:
        RecipeError: what cannot be read, is unknown, or is refused, with the next step.

    Example:
        >>> theirs = {
        ...     "merge_method": "linear",
        ...     "models": [{"model": "org/a", "parameters": {"weight": 1}},
        ...                {"model": "org/b", "parameters": {"weight": 2}}],
        ... }
        >>> ours = compile_mergekit(theirs, Origin("example"), Told())
        >>> ours["base"], ours["experts"], ours["parameters"]["weight"]
        (None, {'a': 'org/a', 'b': 'org/b'}, [1, 2])
    """
    return _Compiler(Part(data, (), origin, told), beside).recipe()


class _Compiler:
    def __init__(self, part: Part, beside: Path | None) -> None:
        part.check_keys(_KEYS)
        for key, reason in _REFUSED.items():
            if part.data.get(key) is not None:
                part.refuse(f"`{key}`: {reason}", key)
        self._part = part
        self._beside = beside
        self._method = self._named_method()
        given = part.data.get("base_model")
        self._base = None if given is None else reference(part, "base_model")
        self._slices = self._read_slices()

    def recipe(self) -> dict[str, Any]:
        """The recipe, without what it need not say."""
        own = [self._parameters(piece) for piece in self._slices]
        alike = all(parameters == own[0] for parameters in own)
        fixed = self._fixed
        sliced = self._slices[0].sources[0].layers is not None
        found: dict[str, Any] = {
            "base": None if self._start is None else located(self._start.model, self._beside),
            "experts": self._experts(),
            "method": self._method.ours,
            "parameters": {**fixed, **(own[0] if alike else {})},
        }
        if sliced:
            found["slices"] = [
                {**self._layers(piece), **({} if alike else {"parameters": parameters})}
                for piece, parameters in zip(self._slices, own, strict=True)
            ]
        if self._base is not None and self._base in self._models:
            found["allow"] = ["unchanged-expert"]  # the base is one of the models
        return {**found, **self._tokens(), **self._dtypes()}

    def _tokens(self) -> dict[str, Any]:
        """Tokenizer and chat template."""
        return tokens_of(self._part, Named(self._models, self._start))

    @property
    def _theirs(self) -> bool:
        """Whether the method is one of mergekit's."""
        return self._part.data["merge_method"] in METHODS

    def _named_method(self) -> TheirMethod:
        name = self._part.data.get("merge_method")
        if isinstance(name, str) and name in METHODS:
            return METHODS[name]
        if isinstance(name, str) and name in registry.names():
            return _own_method(name)
        known = [*METHODS, *registry.names()]
        hint = did_you_mean(str(name), known)
        self._part.refuse(
            f"merge_method is {name!r}; it is one of mergekit's ({', '.join(sorted(METHODS))}) or of "
            f"covmerge's (`covmerge methods`).{hint}",
            "merge_method",
        )

    def _read_slices(self) -> list[_Slice]:
        """The slices; of a recipe with `models`, one without layers."""
        part = self._part
        ways = [key for key in ("models", "slices") if part.data.get(key) is not None]
        if len(ways) != 1:
            part.refuse(
                f"exactly one of `models` and `slices` is needed, and there are {ways or 'none'}"
            )
        if ways == ["slices"]:
            return [self._slice(own) for own in part.parts("slices")]
        sources: list[_Source] = []
        for own in part.parts("models"):
            own.check_keys(("model", "parameters"))
            sources.append(_Source(reference(own, "model"), own, None))
        if self._base is not None and self._base not in [source.model for source in sources]:
            sources.append(_Source(self._base, Part({}, (), part.origin, part.told), None))
        return [self._checked(_Slice(Part({}, (), part.origin, part.told), sources))]

    def _slice(self, own: Part) -> _Slice:
        own.check_keys(("sources", "base_model", "parameters", "residual_weight"))
        if "residual_weight" in own.data:
            own.told.notes.append(
                "`residual_weight` changes nothing: mergekit reads it and never uses it"
            )
        if own.data.get("base_model") is not None and reference(own, "base_model") != self._base:
            own.refuse(
                "a slice with a base of its own: make the recipe's `base_model` that of all slices",
                "base_model",
            )
        sources: list[_Source] = []
        for source in own.parts("sources"):
            source.check_keys(("model", "layer_range", "parameters"))
            layers: object = source.data.get("layer_range")
            if not _is_range(layers):
                source.refuse(
                    f"layer_range is {layers!r}; it is [first, end), such as [0, 8]", "layer_range"
                )
            first, end = cast("Sequence[int]", layers)
            sources.append(_Source(reference(source, "model"), source, (first, end)))
        return self._checked(_Slice(own, sources))

    def _checked(self, piece: _Slice) -> _Slice:
        models = [source.model for source in piece.sources]
        twice = next((model for model in models if models.count(model) > 1), None)
        if twice is not None:
            piece.part.refuse(f"{twice} is named twice: a model is one input of a merge")
        if self._method.base == "required" and self._base not in models:
            what = (
                "`base_model`" if self._base is None else f"the base {self._base} among its sources"
            )
            piece.part.refuse(f"{self._part.data['merge_method']} needs {what}")
        least, most = self._method.experts
        count = len(self._merged(piece))
        if count < least or (most is not None and count > most):
            number = str(least) if least == most else f"{least} or more"
            piece.part.refuse(
                f"{self._part.data['merge_method']} merges {number} models beside a base, and there are "
                f"{count}: {', '.join(str(source.model) for source in self._merged(piece))}"
            )
        return piece

    def _merged(self, piece: _Slice) -> list[_Source]:
        """The models that are merged: without the base, where that is what they are differences to."""
        one_more = self._method.base == "one_more"
        return [own for own in piece.sources if one_more or own.model != self._base]

    @cached_property
    def _models(self) -> dict[Reference, str]:
        """All models that are merged, with their names."""
        merged = [own.model for piece in self._slices for own in self._merged(piece)]
        return names_of(merged, RESERVED if asks_for_tokens(self._part) else ())

    @cached_property
    def _start(self) -> Reference | None:
        """The base of ours: theirs, or what adapters are of."""
        adapted = {model.model for model in self._models if model.lora is not None}
        if self._base is not None:
            adapted.add(self._base.model)
        if len(adapted) > 1:
            self._part.refuse(
                f"adapters are of the base, and here of several models ({', '.join(sorted(adapted))}): "
                "fold each into its own first (`covmerge merge --base MODEL --expert lora=ADAPTER OUT`), "
                "and name OUT"
            )
        if self._base is not None and self._base.lora is not None:
            self._part.refuse(
                f"base_model {self._base} has an adapter: fold it into the model first (`covmerge merge "
                f"--base {self._base.model} --expert lora={self._base.lora} OUT`), and name OUT",
                "base_model",
            )
        return Reference(adapted.pop()) if adapted else None

    def _experts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for model, name in self._models.items():
            source = located(model.lora or model.model, self._beside)
            weight = self._own_weight(model)
            found[name] = source if weight is None else {"source": source, "weight": weight}
        return found

    def _own_weight(self, model: Reference) -> Any:
        """A model's weight, for methods of covmerge's that have no parameter of this name."""
        if self._theirs or registry.get(self._method.ours).has("weight"):
            return None
        around = self._part.part("parameters")
        for piece in self._slices:
            for own in piece.sources:
                parts = [own.part.part("parameters"), piece.part.part("parameters"), around]
                if own.model == model and any("weight" in part.data for part in parts):
                    return setting("weight", parts, 1.0, str(model))
        return None

    def _layers(self, piece: _Slice) -> dict[str, Any]:
        experts = {self._models[own.model]: list(own.layers or ()) for own in self._merged(piece)}
        if self._start is None:
            return {"experts": experts}
        base = next((own.layers for own in piece.sources if own.model == self._base), None)
        return {"experts": experts, **({} if base is None else {"base": list(base)})}

    @property
    def _fixed(self) -> dict[str, Any]:
        """Parameters that make the method theirs."""
        fixed = dict(self._method.fixed)
        if self._method.around and self._base is not None:
            fixed["around"] = "base"
        if self._method.ordered:
            fixed["drawn"] = "in_order"
        if self._theirs:
            dtype = self._dtype("dtype")
            if dtype != "float32":
                fixed["arithmetic"] = dtype or "stored"
        return fixed

    def _parameters(self, piece: _Slice) -> dict[str, Any]:
        """The method's parameters in a slice, all of them."""
        around = [piece.part.part("parameters"), self._part.part("parameters")]
        if not self._theirs:
            return self._own_parameters(piece, around)
        merged = self._merged(piece)
        self._check_parameters(piece, around)
        found = {
            own.ours: setting(name, around, own.default, f"{self._part.data['merge_method']}")
            for name, own in self._method.shared.items()
            if own.ours is not None
        }
        for name, own in self._method.each.items():
            values = {
                self._models[source.model]: setting(
                    name, [source.part.part("parameters"), *around], own.default, str(source.model)
                )
                for source in merged
            }
            found[str(own.ours)] = self._for_each(values)
        return _with_words(self._method, self._part, found)

    def _own_parameters(self, piece: _Slice, around: Sequence[Part]) -> dict[str, Any]:
        """The parameters of a method of covmerge's; what belongs to mergekit's methods is left out."""
        method = registry.get(self._method.ours)
        of_mergekit = {name for own in METHODS.values() for name in (*own.shared, *own.each)}
        found: dict[str, Any] = {}
        left_out: set[str] = set()
        of_models = [source.part.part("parameters") for source in piece.sources]
        for part in (*reversed(around), *of_models):
            for key in part.data:
                if method.has(key) and part not in of_models:
                    found[key] = setting(key, around, None, method.name)
                elif key in of_mergekit:
                    left_out.add(key)
                else:
                    known = [parameter.name for parameter in method.parameters]
                    part.leave_out(
                        f"{method.name} has no parameter {key!r}.{did_you_mean(key, known)}", key
                    )
        if left_out - {"weight"}:
            self._part.told.notes.append(
                f"{', '.join(sorted(left_out - {'weight'}))}: parameters of mergekit's methods, which "
                f"{method.name} has not; they are left out"
            )
        return found

    def _for_each(self, values: Mapping[str, Any]) -> Any:
        """One value if all models have the same, else a list with one of each model of the recipe."""
        first = next(iter(values.values()))
        if all(value == first for value in values.values()):
            return first
        return [values.get(name, first) for name in self._models.values()]

    def _check_parameters(self, piece: _Slice, around: Sequence[Part]) -> None:
        """Refuse parameters that the method has not, or not where they stand."""
        name = self._part.data["merge_method"]
        shared, each = self._method.shared, self._method.each
        for part in around:
            for key in part.data:
                if key not in shared and key not in each:
                    hint = did_you_mean(key, [*shared, *each])
                    part.leave_out(f"{name} has no parameter {key!r}.{hint}", key)
        for source in piece.sources:
            part = source.part.part("parameters")
            for key in part.data:
                if key in shared and key not in each:
                    part.leave_out(
                        f"{key!r} of a model: it is one for all, under `parameters`.", key
                    )
                elif key not in each:
                    part.leave_out(
                        f"{name} has no parameter {key!r}.{did_you_mean(key, each)}", key
                    )
                elif source.layers is not None:
                    self._check_filters(part, key)

    def _check_filters(self, part: Part, key: str) -> None:
        """Refuse filters by the number of a layer of the source: here names are the output's."""
        for text in filters(part, key):
            if any(character.isdigit() for character in text):
                part.refuse(
                    f"the filter {text!r} has a number, which in mergekit is that of the source's layer, "
                    "and here names are the output's: write a slice for that layer",
                    key,
                )

    def _dtypes(self) -> dict[str, Any]:
        """What is computed in, and stored."""
        dtype, stored = self._dtype("dtype"), self._dtype("out_dtype")
        found: dict[str, Any] = {}
        if dtype == "float64":
            found["dtype"] = dtype
        if stored or dtype:
            found["output"] = {"dtype": stored or dtype}
        return found

    def _dtype(self, key: str) -> str | None:
        value = self._part.data.get(key)
        if value is None:
            return None
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            self._part.refuse(f"{key} is {value!r}; it is one of {', '.join(_DTYPES)}", key)
        return name


def _own_method(name: str) -> TheirMethod:
    """A method of covmerge's: its parameters are its own, and it is over a base but where it needs none."""
    return TheirMethod(name, "required" if name != "average" else "optional")


def _with_words(method: TheirMethod, part: Part, found: dict[str, Any]) -> dict[str, Any]:
    """NuSLERP's two switches as the one word that they are here."""
    if method.ours != "nuslerp":
        return found
    whole, rows = found.pop("nuslerp_flatten"), found.pop("nuslerp_row_wise")
    if not isinstance(whole, bool) or not isinstance(rows, bool):
        part.refuse(
            "nuslerp_flatten and nuslerp_row_wise are true or false for all tensors", "parameters"
        )
    return {**found, "by": "tensor" if whole else "columns" if rows else "rows"}


def _is_range(value: object) -> bool:
    if not isinstance(value, list) or len(cast("list[object]", value)) != 2:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) for n in cast("list[object]", value))
