"""The data of the page: measured once, and enough to predict every weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, cast

from covmerge.base.findings import Finding, Severity
from covmerge.base.text import counted, printable
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.tensors.names import layer_name
from covmerge.front.reporting.grid import panels
from covmerge.front.reporting.page import RETENTION
from covmerge.maths.methods import registry
from covmerge.plan.recipe import Recipe, Rule
from covmerge.plan.recipe.varied import BY_NAME, is_varied, patterns_of
from covmerge.run.inspection.result import Inspection, LayerView

# Weights as users choose them on the page.
#
# A choice is a weighted sum of the updates or their weighted mean; some tensors may have other
# weights. Each choice is a recipe of `task_arithmetic` or `average`, which the page writes
# (page/recipe.js), and such a recipe is a choice.

SUM, MEAN = "task_arithmetic", "average"
Method = Literal["task_arithmetic", "average"]


@dataclass(frozen=True)
class Group:
    """A group of tensors with weights of their own."""

    patterns: tuple[str, ...]  # patterns of their names, as in a recipe's `by_name`
    weights: Mapping[str, float]  # weights by expert
    scale: float = 1.0  # scale of the sum


@dataclass(frozen=True)
class Choice:
    """The weights of all experts, as chosen on the page."""

    method: Method  # the sum, scale · Σ w_t Δ_t, or the mean, Σ w_t Δ_t / Σ w_t
    weights: Mapping[str, float]  # 0: the expert is left out
    scale: float = 1.0  # of the sum
    # tensors with other weights; a tensor belongs to the first group that matches its name
    groups: tuple[Group, ...] = ()


def choice_of(recipe: Recipe) -> Choice | None:
    """Return a recipe as a choice; None for another method, or if weights vary in another way.

    Example:
        >>> from covmerge.plan.recipe import parse_recipe
        >>> experts = {"a": {"source": "./a", "weight": 2.0}, "b": "./b"}
        >>> found = choice_of(parse_recipe({"base": "./base", "experts": experts, "method": "average"}))
        >>> found.method, found.weights
        ('average', {'a': 2.0, 'b': 1.0})
    """
    plain = not (recipe.before or recipe.after or recipe.slices)
    if recipe.method not in (SUM, MEAN) or not plain or any(map(_merges_otherwise, recipe.rules)):
        return None
    given = {name: expert.weight for name, expert in recipe.experts.items()}
    default = registry.get(SUM).resolve({})["scale"]
    scale = recipe.parameters.get("scale", default) if recipe.method == SUM else 1.0
    # The weight of a single expert is the share of its update, which is a sum on the page.
    method = SUM if len(given) == 1 else recipe.method
    return _grouped(cast("Any", method), given, scale, default)


def fixed_part(recipe: Recipe, base: str) -> dict[str, Json]:
    """Return the fields that all recipes of the page share: all but experts, method and parameters."""
    missing = "base" if recipe.tensors.missing == "present" else recipe.tensors.missing
    changed: dict[str, Any] = {
        "base": base,
        "before": (),
        "after": (),
        "rules": tuple(
            _of_recipe(rule) if _merges_otherwise(rule) else rule for rule in recipe.rules
        ),
        # An expert that lacks a tensor counts as unchanged, as on the page.
        "tensors": recipe.tensors.model_copy(update={"missing": missing}),
    }
    fixed = recipe.model_copy(update=changed)
    return fixed.model_dump(
        mode="json", exclude_defaults=True, exclude={"experts", "method", "parameters"}
    )


def _merges_otherwise(rule: Rule) -> bool:
    """Return whether a rule merges some tensors by another method than the recipe's."""
    return rule.method is not None or rule.use == "average"


def _of_recipe(rule: Rule) -> Rule:
    """Return a rule that leaves its tensors to the recipe's method, before any later rule."""
    plain: dict[str, Any] = {"method": None, "parameters": {}, "before": (), "after": ()}
    return rule.model_copy(update={**plain, "use": "method"})


def _grouped(
    method: Method,
    weights: Mapping[str, Any],
    scale: Any,
    unsaid: float,
) -> Choice | None:
    """Return weights and scale as groups; None if they vary by different patterns."""
    given = [*((weight, 1.0) for weight in weights.values()), (scale, unsaid)]
    if any(is_varied(value) and BY_NAME not in value for value, _ in given):
        return None
    varied = {n: _entries(*each) for n, each in enumerate(given) if is_varied(each[0])}
    patterns = next(([match for match, _ in entries] for entries in varied.values()), ["*"])
    for entries in varied.values():
        if [match for match, _ in entries] != patterns or any(is_varied(v) for _, v in entries):
            return None
    columns = [
        [float(number) for _, number in varied[n]]
        if n in varied
        else [float(value)] * len(patterns)
        for n, (value, _) in enumerate(given)
    ]
    *rows, rest = zip(*columns, strict=True)

    def named(row: Sequence[float]) -> dict[str, Any]:
        return {"weights": dict(zip(weights, row[:-1], strict=True)), "scale": row[-1]}

    groups = groupby(zip(patterns, rows, strict=False), key=lambda pair: pair[1])
    return Choice(
        method=method,
        **named(rest),
        groups=tuple(
            Group(tuple(match for match, _ in alike), **named(row)) for row, alike in groups
        ),
    )


def _entries(value: Mapping[str, Any], default: float) -> list[tuple[str, Any]]:
    """Return the patterns and values of `by_name`, up to `*`, the value for all other tensors."""
    found: list[tuple[str, Any]] = []
    for entry in (*value[BY_NAME], {"value": default}):
        patterns = patterns_of(entry)
        if "*" in patterns:
            found.append(("*", entry["value"]))
            break
        found += [(pattern, entry["value"]) for pattern in patterns]
    return found


_DIGITS = 9  # significant digits; float32 products have seven
_OF_ADAPTERS = Finding(
    Severity.WARNING,
    "the share that is kept of adapters does not tell how good a merge is: only a score does",
)


@dataclass(frozen=True)
class Scene:
    """The measurements of a base, its experts and, if there is one, a merged model."""

    title: str
    recipe: Recipe
    inspection: Inspection  # the inspection of its matrices, with `LayerView.quadratics`
    # places of the base (under "") and of the experts, valid for a recipe in any folder; that of
    # the merged model under `merged`, if a recipe may have it as an expert
    sources: Mapping[str, str]
    merged: str | None = None  # name of the merged model among the experts; None if there is none

    def as_json(self) -> dict[str, Json]:
        """Return the whole scene for the page; names from checkpoints are plain text, not markup."""
        inspection, merged = self.inspection, self.merged
        own = choice_of(self.recipe)  # else the page begins with the mean of the experts
        start = own or Choice("average", dict.fromkeys(inspection.compared, 1.0))
        columns = [*inspection.compared, *([] if merged is None else [merged])]
        layers = inspection.matrices
        shown = panels((layer.name, number) for number, layer in enumerate(layers))
        return {
            "title": printable(self.title),
            "version": __version__,
            "method": self.recipe.method,
            "exact": own is not None,
            "experts": list(inspection.compared),
            "columns": columns,
            "merged": merged,
            "movable": merged in self.sources,
            "start": asdict(start),
            "recipe": fixed_part(self.recipe, self.sources[""]),
            "sources": [[name, source] for name, source in self.sources.items() if name],
            "layers": [_layer(layer) for layer in layers],
            "others": [_named(layer) for layer in inspection.layers if not layer.is_matrix],
            "panels": [
                {
                    "label": printable(panel.label),
                    "numbered": panel.numbered,
                    "cells": {
                        printable(column): list(layers) for column, layers in panel.columns.items()
                    },
                }
                for panel in shown
            ],
            "kept": RETENTION,
            "caveats": list(self._caveats()),
            "findings": [
                {"severity": str(f.severity), "who": f.expert or "", "text": printable(f.text)}
                for f in (*inspection.findings, *([_OF_ADAPTERS] if inspection.adapters else []))
                if f.severity is not Severity.NOTE
            ],
        }

    def _caveats(self) -> Sequence[str]:
        """Return the limits of the numbers for this recipe."""
        recipe, found = self.recipe, list[str]()
        others = len(self.inspection.layers) - len(self.inspection.matrices)
        if others:
            found.append(
                f"Nothing is predicted of {counted(others, 'tensor')} that "
                f"{'is' if others == 1 else 'are'} no matrix of a layer (norms, biases, embeddings). "
                "A recipe gives them the same weights."
            )
        if recipe.output.format == "adapter":
            found.append(
                "The recipe writes an adapter: what a rank cuts off of the sum is not predicted."
            )
        if recipe.output.quantise != "none":
            found.append("The recipe writes quantised weights: what that rounds is not predicted.")
        if self.merged is not None and self.merged not in self.sources:
            found.append(
                "The merged model has tokens of its own, so that no recipe can have it as an expert: it "
                "is shown, and not moved."
            )
        return found


def _layer(layer: LayerView) -> dict[str, Json]:
    forms = (layer.quadratics[name] for name in layer.experts)
    # Q_s is symmetric: its lower half is enough.
    halves: list[Json] = [
        form
        and [
            [float(f"{value:.{_DIGITS}g}") for value in row[: t + 1]] for t, row in enumerate(form)
        ]
        for form in forms
    ]
    return {**_named(layer), "forms": halves}


def _named(layer: LayerView) -> dict[str, Json]:
    """Return a tensor's name, for patterns and for readers, and its place in the layers."""
    found = layer_name(layer.tensor)
    place = None if found is None else [found.stack, found.index, found.rest]
    return {
        "tensor": layer.tensor,
        "name": printable(layer.name),
        "role": layer.role,
        "place": place,
    }
