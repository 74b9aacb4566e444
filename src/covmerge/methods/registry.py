"""The table of methods: each registers its kernel with what it needs, costs and promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from covmerge.errors import RecipeError, did_you_mean
from covmerge.linalg.auto import Cost
from covmerge.types import LinearGroup, Merged

Kernel = Callable[..., Merged]
CostModel = Callable[[int, int, int, int], Cost]  # d_out, d_in, experts, itemsize


@dataclass(frozen=True)
class Laws:
    """What a method promises; the laws suite checks every line of it.

    All methods: zero updates give the base; transposed storage gives the transposed result.

    Attributes:
        order_invariant: permuting the experts changes nothing beyond rounding.
        scale_equivariant: Δ → sΔ gives s times the merged update.
        replicas: f(parameters, T) such that T copies of one update Δ give f·Δ, or None where they
            do not give a multiple of it.
        replicas_text: the same for a reader.
    """

    order_invariant: bool
    scale_equivariant: bool
    replicas: Callable[[Mapping[str, Any], int], float | None]
    replicas_text: str


@dataclass(frozen=True)
class Reference:
    """The paper a method comes from."""

    title: str
    venue: str
    arxiv: str
    equations: str


@dataclass(frozen=True)
class Parameter:
    """One named parameter of a method."""

    name: str
    default: Any
    annotation: str
    description: str


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        name: as written in recipes.
        kernel: pure function `(LinearGroup, **parameters) -> Merged`.
        equation: one line of mathematics, in Unicode.
        reference: the paper.
        laws: what the result satisfies.
        cost: FLOPs and workspace of one matrix, for the plan.
        elementwise: acts on each element by itself; such a method takes tensors of any shape and
            runs by row blocks. The others merge matrices, and average every other tensor.
        needs_base: uses `LinearGroup.base`, which is not formed otherwise.
        family_defaults: parameters that the paper sets per model family.
    """

    name: str
    kernel: Kernel
    equation: str
    reference: Reference
    laws: Laws
    cost: CostModel
    elementwise: bool = False
    needs_base: bool = False
    family_defaults: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )

    @property
    def summary(self) -> str:
        """First line of the kernel's docstring."""
        return (inspect.getdoc(self.kernel) or "").split("\n", 1)[0]

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self.kernel, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints[name], parameter.default)
            for name, parameter in inspect.signature(self.kernel).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        # Strict but for int → float: a string or a bool is never a number here.
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(self.name, __config__=config, **fields)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The named parameters with defaults and descriptions."""
        schema: dict[str, Any] = self._model.model_json_schema()
        properties: dict[str, dict[str, Any]] = schema.get("properties", {})
        return tuple(
            Parameter(name, info.default, _allowed(properties[name]), info.description or "")
            for name, info in self._model.model_fields.items()
        )

    def resolve(self, given: Mapping[str, Any], family: str | None = None) -> dict[str, Any]:
        """Return all parameters: given ones over the family's over the paper's defaults.

        Raises:
            RecipeError: an unknown name, or a value out of its range.
        """
        for name in given:
            if name not in self._model.model_fields:
                raise RecipeError(
                    f"method '{self.name}' has no parameter '{name}'."
                    + did_you_mean(name, self._model.model_fields)
                )
        values = {**self.family_defaults.get(family or "", {}), **given}
        try:
            return self._model(**values).model_dump()
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg'].lower()}"
                for e in error.errors()
            )
            raise RecipeError(f"method '{self.name}': {problems}") from error

    def __call__(self, group: LinearGroup, **parameters: Any) -> Merged:
        """Run the kernel on one layer; `parameters` as `resolve` returns them."""
        return self.kernel(group, **parameters)


def _allowed(schema: Mapping[str, Any]) -> str:
    """Say in a few words what a JSON Schema of one parameter admits."""
    if "anyOf" in schema:
        return " | ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema]
    return " ".join([str(schema.get("type", "any")), *bounds])


class Registry:
    """Methods by name, in the order they were registered."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}

    def register(self, name: str, **declared: Any) -> Callable[[Kernel], Kernel]:
        """Register the decorated kernel as method `name`; see `Method` for what to declare."""

        def decorate(kernel: Kernel) -> Kernel:
            if name in self._methods:
                raise ValueError(
                    f"method '{name}' is registered twice: "
                    f"{self._methods[name].kernel.__module__} and {kernel.__module__}"
                )
            self._methods[name] = Method(name, kernel, **declared)
            return kernel

        return decorate

    def names(self) -> tuple[str, ...]:
        """All method names."""
        return tuple(self._methods)

    def get(self, name: str) -> Method:
        """Return a method.

        Raises:
            RecipeError: there is no such method; the message has the nearest name.
        """
        if name not in self._methods:
            raise RecipeError(f"there is no method '{name}'." + did_you_mean(name, self._methods))
        return self._methods[name]

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods.values())


registry = Registry()
register = registry.register
