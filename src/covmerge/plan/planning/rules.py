"""The recipe's rules and the defaults of roles, resolved to one action for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from covmerge.base.errors import RecipeError
from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.describe import TensorInfo
from covmerge.files.tensors.views import MatrixLayout
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.mergekit import called
from covmerge.maths.steps import StepUse, with_steps
from covmerge.maths.steps.compose import steps_around
from covmerge.plan.planning.operations import Copy, Merge
from covmerge.plan.planning.slices import Layers
from covmerge.plan.planning.varied import Settings
from covmerge.plan.recipe import Recipe, Rule
from covmerge.plan.recipe.varied import UNSAID, value_at

_MATRICES = (Role.LINEAR, Role.CONV1D, Role.EXPERT_STACK)


# The action for a tensor, and the rule that determined it.
Decision = tuple[Merge | Copy, str]


@dataclass(frozen=True)
class _Way:
    """A method with its parameters, and the steps around it."""

    settings: Settings
    before: tuple[StepUse, ...]
    after: tuple[StepUse, ...]

    @property
    def method(self) -> Method:
        return self.settings.method

    @property
    def whole(self) -> Method:
        return with_steps(self.method, self.before, self.after)

    def merge(self, layout: MatrixLayout | None, parameters: Mapping[str, Any]) -> Merge:
        return Merge(self.method.name, parameters, layout, self.before, self.after)

    def without_matrices(self) -> _Way:
        """Return the same method without the steps that need matrices."""
        before, after = (
            tuple(use for use in steps if use.step.unit != "matrix")
            for steps in (self.before, self.after)
        )
        return replace(self, before=before, after=after)


class Rules:
    """The recipe's rules, which override the defaults of each role."""

    def __init__(self, recipe: Recipe, family: str | None, names: Iterable[str]) -> None:
        """Resolve the parameters of every method and step that the recipe names.

        Defaults depend on the model family, and depths on the names of the output's tensors.

        Raises:
            RecipeError: an unknown method, step or parameter, or a value out of range.
        """
        self._recipe = recipe
        self._family = family
        self.layers = Layers(recipe.slices, names, recipe.moe)
        self._way = self._resolved(recipe.method, recipe)
        for rule in recipe.rules:
            self._way_of(rule)
        for piece in recipe.slices:
            Settings(self._way.method, piece.parameters, family).check()

    def chosen_use(self, name: str, role: Role) -> str | None:
        rule = self._first_match(name, role)
        return rule.use if rule else None

    def decide(self, header: TensorHeader, info: TensorInfo) -> Decision:
        kept = self.layers.of_base(header.name)
        if kept is not None:
            return Copy(), f"base ({kept} of the mixture)"
        if self.layers.of_expert(header.name):
            method = registry.get("passthrough")
            parameters = method.resolve({}, self._family)
            return Merge(method.name, parameters, None), "passthrough (an expert of the mixture)"
        if not header.numel:
            return Copy(), "base (it is empty)"
        rule = self._first_match(header.name, info.role)
        if rule is not None:
            return self._by_rule(rule, header, info)
        if not header.dtype.is_floating_point:
            return Copy(compared=True), f"base ({header.dtype} is not merged)"
        setting, value = self._setting(info.role)
        if value == "base":
            return Copy(), f"base ({setting})"
        if value == "average":
            return self._average(setting)
        return self._merge(self._way, header, info, reason=setting)

    def weight(self, expert: str, name: str) -> float:
        """Return the weight of an expert in a tensor of the output; 0: it takes no part."""
        weight = value_at(self._recipe.experts[expert].weight, name, self.layers.depth(name))
        return 1.0 if weight is UNSAID else float(weight)

    def matrices(self, header: TensorHeader, info: TensorInfo) -> MatrixLayout | None:
        """Return how a tensor contains the oriented matrices of layers; None: it contains none."""
        kernels = self._recipe.tensors.convolutions == "method"
        if info.role not in _MATRICES and not (info.role is Role.CONV and kernels):
            return None
        if len(header.shape) < 2 or not (header.numel and header.dtype.is_floating_point):
            return None
        split = self._recipe.tensors.fused == "split" and info.parts is not None
        return replace(info.layout, parts=info.parts) if split else info.layout

    def _setting(self, role: Role) -> tuple[str, str]:
        """Return name and value of the setting that decides on a role; without one, the role's name."""
        tensors = self._recipe.tensors
        settings = {
            Role.EMBEDDING: ("embeddings", tensors.embeddings),
            Role.OUTPUT: ("output_head", tensors.output_head),
            Role.CONV: ("convolutions", tensors.convolutions),
        }
        method = self._way.method
        everywhere = "method" if method.takes_any_shape else method.others
        if role in settings:
            key, value = settings[role]
            return f"{key}: {value}", everywhere if value == "auto" else value
        if role in _MATRICES:
            return "", "method"
        return str(role), "average" if role is Role.BUFFER else everywhere

    def _by_rule(self, rule: Rule, header: TensorHeader, info: TensorInfo) -> Decision:
        text = "rule " + ", ".join(
            f"{key} {value}" for key, value in (("match", rule.match), ("role", rule.role)) if value
        )
        if rule.use in ("base", "head"):
            return Copy(), f"{rule.use} ({text})"
        if not header.dtype.is_floating_point:
            return Copy(compared=True), f"base ({header.dtype} is not merged)"
        if rule.use == "average":
            return self._average(text)
        return self._merge(self._way_of(rule), header, info, reason=text)

    def _way_of(self, rule: Rule) -> _Way:
        """Return a rule's method, parameters and steps; if it names no method, the recipe's."""
        return self._way if rule.method is None else self._resolved(rule.method, rule)

    def _resolved(self, name: str, given: Recipe | Rule) -> _Way:
        method = registry.get(name)
        before, after = steps_around(given.before, given.after)
        with_steps(method, before, after)  # raises if steps do not fit the method
        settings = Settings(method, given.parameters, self._family)
        settings.check()
        return _Way(settings, before, after)

    def _first_match(self, name: str, role: Role) -> Rule | None:
        return next((rule for rule in self._recipe.rules if rule.applies_to(name, role)), None)

    def _average(self, reason: str) -> Decision:
        return Merge("average", {}, layout=None), f"average ({reason})"

    def _merge(self, way: _Way, header: TensorHeader, info: TensorInfo, *, reason: str) -> Decision:
        if way.method.takes_any_shape and self.matrices(header, info) is None:
            way = way.without_matrices()
        method = way.whole
        name = called(method.name, way.settings.given)
        text = f"{name} ({reason})" if reason else name
        parameters = self._parameters(way, header.name)
        if method.takes_any_shape:
            return way.merge(None, parameters), text
        if len(header.shape) < 2 or header.complex:
            what = "complex" if header.complex else "not a matrix"
            raise RecipeError(
                f"'{header.name}' {list(header.as_stored.shape)} ({info.role}) is {what}, and method "
                f"'{method.name}' merges matrices: use `average` or `base` for it."
            )
        layout = info.layout
        if info.role is Role.CONV1D and self._recipe.tensors.conv1d == "stored":
            layout = replace(layout, transposed=False)
        elif self._recipe.tensors.fused == "split" and info.parts is not None:
            layout = replace(layout, parts=info.parts)
        return way.merge(layout, parameters), text

    def _parameters(self, way: _Way, name: str) -> Mapping[str, Any]:
        """Return a method's parameters for a tensor; slices change only those of the recipe's method."""
        settings = way.settings
        if settings is self._way.settings:
            given = self.layers.parameters(name, settings.given)
            settings = replace(settings, given=given)
        return settings.at(name, self.layers.depth(name))
