"""Values that a search chooses: `{search: [0, 1.5]}` instead of one value in a recipe.

Two numbers are the ends of a range; `log` after them means that the logarithm is searched. Any
other list has the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import RecipeError
from covmerge.base.text import shown
from covmerge.maths.methods import registry
from covmerge.maths.steps import registry as steps
from covmerge.plan.recipe.explain import key_path
from covmerge.plan.recipe.load import FORMS, marks_in, read_yaml, recipe_of
from covmerge.plan.recipe.mergekit.evolve import GENOME, compile_genome
from covmerge.plan.recipe.mergekit.models import Places
from covmerge.plan.recipe.mergekit.reading import ImportLog, is_mergekit
from covmerge.plan.recipe.schema import Recipe
from covmerge.plan.recipe.strict_yaml import KeyPath, Origin
from covmerge.plan.recipe.varied import is_number

# Share of a range's upper end that replaces a weight of 0, which would leave the expert out.
_NEARLY_NONE = 1e-6
_MOST = 500  # the most marks in a recipe

Value = bool | int | float | str


@dataclass(frozen=True)
class Mark:
    """A marked value of a recipe, and the values that a search may choose."""

    place: KeyPath  # its keys
    low: float = 0.0  # lower end of a range, inclusive
    high: float = 0.0  # upper end of a range, inclusive; equal to `low` if there are choices
    log: bool = False  # whether the logarithm is searched
    whole: bool = False  # whether only integers are searched
    choices: tuple[Value, ...] = ()  # the choices, instead of a range

    @property
    def name(self) -> str:
        return key_path(self.place)

    @property
    def ends(self) -> tuple[Value, ...]:
        return self.choices or (self.low, self.high)


@dataclass(frozen=True)
class Template:
    """A recipe with some values for a search to choose."""

    data: Mapping[str, Any]  # content of its file
    origin: Origin  # its name, and the lines of its keys
    folder: Path | None = None  # folder that relative paths start from; None: they are not changed
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str | Path | Mapping[str, Any]) -> Template:
        """Read a recipe file with marks, or a mapping with the content of one.

        Raises:
            RecipeError: no value is marked, or a value cannot be searched, or a mark is invalid.
        """
        data: Any = given
        origin, folder, log = Origin("recipe"), None, ImportLog()
        if not isinstance(given, Mapping):
            data, origin = read_yaml(given)
            folder = Path(given).parent
        if isinstance(data, Mapping) and GENOME in data:
            theirs = cast("Mapping[str, Any]", data)
            data = compile_genome(theirs, origin, log, Places(folder))
            origin = Origin(f"{origin.name}, as a recipe with marks")
        if not isinstance(data, Mapping):
            recipe_of(data, origin, None)  # raises an error that names the problem
        found = cls(dict(cast("Mapping[str, Any]", data)), origin, folder, tuple(log.notes))
        if not found.marks:
            raise RecipeError(
                f"{found.origin.name}: no value is marked, so there is nothing to search: write "
                "{search: [0, 1.5]} in place of a weight or a parameter"
            )
        return found

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """All marks in the file's order, methods first because parameters depend on them."""
        places = sorted(marks_in(self.data, self.origin), key=lambda one: one[0][-1] != "method")
        found = tuple(self._mark(*one) for one in places)
        if len(found) > _MOST:
            raise RecipeError(
                f"{self.origin.name}: {len(found)} values are marked, and a search of more than {_MOST} "
                "finds nothing: mark fewer"
            )
        return found

    def applies(self, mark: Mark, chosen: Mapping[str, Value]) -> bool:
        """Return whether the chosen methods have the parameter of a mark."""
        parameter = _parameter_of(mark.place)
        if parameter is None:
            return True
        around, name = parameter
        method = chosen.get(key_path(_method_for(around)))
        return method is None or registry.get(str(method)).has(name)

    def applying(self, mark: Mark, chosen: Mapping[str, Value]) -> Mapping[str, Value]:
        """Return the choice of values, changed to a method that has the parameter of a mark."""
        for method in self.marks:
            for name in method.choices if method.place[-1] == "method" else ():
                if not self.applies(mark, chosen) and self.applies(mark, {method.name: name}):
                    chosen = {**chosen, method.name: name}
        return chosen

    def recipe(self, chosen: Mapping[str, Value]) -> Recipe:
        """Return the recipe with the chosen values, given by the names of their marks.

        If the method itself is searched, parameters that it does not have are left out.
        """
        return recipe_of(self.filled(chosen), self.origin, self.folder)

    def filled(self, chosen: Mapping[str, Value]) -> dict[str, Any]:
        data = deepcopy(dict(self.data))
        for mark in self.marks:
            *around, last = mark.place
            inside = _at(data, around)
            if mark.name in chosen:
                inside[last] = chosen[mark.name]
        for around in [(), *(("rules", n) for n in range(len(data.get("rules", ()))))]:
            if key_path((*around, "method")) in chosen:
                _keep_its_own(_at(data, around))
        return data

    def untuned(self) -> Recipe:
        """Return the recipe of a merge without a search: the default method, and weights of 1.

        Settings for tensors, tokens and the output are kept, and so are weights that are not searched.
        """
        recipe = self.recipe({mark.name: mark.ends[0] for mark in self.marks})
        searched = {mark.place[1] for mark in self.marks if mark.place[0] == "experts"}
        of_mergekit = is_mergekit(self.data)
        experts = {
            name: expert.model_copy(update={"weight": 1.0})
            if of_mergekit or name in searched
            else expert
            for name, expert in recipe.experts.items()
        }
        return recipe.model_copy(
            update={
                **{"method": "", "parameters": {}, "before": (), "after": (), "experts": experts},
                "rules": tuple(rule for rule in recipe.rules if rule.use is not None),
                "slices": tuple(s.model_copy(update={"parameters": {}}) for s in recipe.slices),
            }
        )

    def _mark(self, place: KeyPath, given: object) -> Mark:
        try:
            mark = _mark_of(place, given, whole=self._takes_integers(place))
            for name in mark.choices if place[-1] == "method" else ():
                registry.get(str(name))
            return mark
        except (ValueError, RecipeError) as error:
            raise RecipeError(f"{self.origin.where(place)}: {key_path(place)}: {error}") from None

    def _takes_integers(self, place: KeyPath) -> bool:
        parameter = _parameter_of(place)
        if parameter is None:
            return False
        around, name = parameter
        method = _at(self.data, _method_for(around)[:-1]).get("method", "")  # mergekit's have none
        names = [method] if isinstance(method, str) else method.get("search", ())
        known = [registry.get(str(name)) for name in names if name]
        if around and around[-1] in steps.names():
            known = [steps.get(str(around[-1]))]
        kinds = [p.annotation for method in known for p in method.parameters if p.name == name]
        if known and not kinds:
            raise ValueError(
                f"{' and '.join(method.name for method in known)}: no parameter '{name}': remove it"
            )
        return bool(kinds) and all(kind.startswith("integer") for kind in kinds)


def _mark_of(place: KeyPath, given: object, *, whole: bool) -> Mark:
    values: Sequence[object] = ()
    if isinstance(given, list | tuple):
        values = given = cast("Sequence[object]", given)
    if place[-1] == "method" and not all(isinstance(value, str) for value in values):
        raise ValueError(f"search is {shown(given)}: write names of methods, two at least")
    log = len(values) == 3 and values[2] == "log"
    ends = values[:2] if log else values
    if len(ends) == 2 and all(map(is_number, ends)):
        low, high = (float(cast("float", end)) for end in ends)
        if place[0] == "experts" and low == 0.0 < high:
            low = high * _NEARLY_NONE
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"search is {shown(given)}: the first number is not below the second")
        if log and low <= 0:
            raise ValueError(f"search is {shown(given)}: a logarithm is of numbers above 0")
        if whole and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"search is {shown(given)}: the parameter takes integers")
        return Mark(place, low, high, log, whole)
    kinds = {str if isinstance(v, str) else bool if isinstance(v, bool) else float for v in values}
    of_one_kind = len(kinds) == 1 and all(isinstance(v, bool | int | float | str) for v in values)
    misplaced = place[-1] != "method" and kinds == {str} and "log" in values
    if len(values) < 2 or not of_one_kind:
        raise ValueError(f"search is {shown(given)}; {FORMS}")
    if len(set(values)) < len(values):
        raise ValueError(f"search is {shown(given)}: a choice stands there twice")
    if misplaced:
        raise ValueError(f"search is {shown(given)}; {FORMS}")
    return Mark(place, choices=tuple(cast("Sequence[Value]", values)))


def _parameter_of(place: KeyPath) -> tuple[KeyPath, str] | None:
    """Return the keys around `parameters` or of a step, and the parameter's name."""
    for number, key in enumerate(place[:-1]):
        if key == "parameters":
            return place[:number], str(place[number + 1])
        if key in ("before", "after"):
            return place[: number + 3], str(place[number + 3])
    return None


def _method_for(around: KeyPath) -> KeyPath:
    """Return the place of the method that the parameters at a place belong to."""
    return ("method",) if around[:1] == ("slices",) else (*around, "method")


def _keep_its_own(data: dict[str, Any]) -> None:
    """Remove parameters that the chosen method does not have."""
    method = registry.get(str(data["method"]))
    for inside in (data, *data.get("slices", ())):
        if "parameters" in inside:
            known = {n: value for n, value in inside["parameters"].items() if method.has(n)}
            inside["parameters"] = known


def _at(data: Any, place: Sequence[str | int]) -> Any:
    for key in place:
        data = data[key]
    return data
