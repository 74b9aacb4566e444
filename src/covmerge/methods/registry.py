"""The table of methods: each registers its kernel with what it needs, costs and promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import Tensor

from covmerge.errors import RecipeError, TensorError, did_you_mean
from covmerge.linalg.auto import Cost
from covmerge.linalg.finite import all_finite
from covmerge.linalg.lapack import LinAlgError, norm
from covmerge.methods.scaled import run_near_one
from covmerge.types import LinearGroup, Merged

Kernel = Callable[..., Merged]
CostModel = Callable[[int, int, int, int], Cost]  # d_out, d_in, experts, itemsize
Parameters = Mapping[str, Any]

# What a method must see at once. The first three take tensors of any shape, as they are stored.
Unit = Literal["element", "row", "tensor", "matrix"]
Data = Literal["none", "gram", "fisher"]
# On which sides a layer may be written in an orthonormal basis that holds its updates.
Sides = Literal["none", "outputs", "inputs", "both"]
_NO_FLOAT = "without overflow"  # of torch's message where a factor is too large for the dtype


@dataclass(frozen=True)
class Survey:
    """A pass over all tensors before the merge: how large must an entry be to be kept?

    The threshold of expert t is the (N − ⌊density·N⌋)-th smallest of the N magnitudes that
    `vectors` gives for it over all tensors of the method.

    Attributes:
        density: share of the entries that is kept, from the method's parameters; None: these
            parameters need no survey.
        vectors: `(group, parameters)` -> one tensor per expert.
    """

    density: Callable[[Parameters], float | None]
    vectors: Callable[[LinearGroup, Parameters], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Laws:
    """What a method promises; the laws suite checks every line of it.

    All methods: zero updates give the base; transposed storage gives the transposed result.

    Attributes:
        order_invariant: permuting the experts changes nothing beyond rounding.
        scale_equivariant: Δ → sΔ gives s times the merged update, at the default parameters.
        rotation_equivariant: Δ → QΔPᵀ with orthogonal Q, P gives Q(merged update)Pᵀ; statistics of
            the layer's inputs turn with P.
        replicas: f(parameters, T) such that T copies of one update Δ give f·Δ, or None where they
            do not give a multiple of it.
        replicas_text: the same for a reader.
        scales_with: whether `scale_equivariant` holds with other parameters too.
    """

    order_invariant: bool
    scale_equivariant: bool
    rotation_equivariant: bool
    replicas: Callable[[Mapping[str, Any], int], float | None]
    replicas_text: str
    scales_with: Callable[[Parameters], bool] = lambda parameters: True


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
        unit: what it must see at once, or a function of the parameters that says so. A `matrix`
            method merges the oriented matrices of linear layers; the others take tensors of any
            shape as they are stored: by `element`, by `row` (of the first axis; a tensor with one
            axis is one row), or whole.
        others: what a matrix method does with tensors that are not matrices.
        data: the statistics of the experts' data that it needs.
        protocol: how these must have been collected (`covmerge collect --protocol`).
        survey: what it must know of all tensors before the first is merged.
        factored: the sides on which its result turns with low-rank updates, so that adapters are
            merged exactly in a basis of their factors there (see `covmerge.methods.factored`); or a
            function of the parameters that says so.
        writes_masks: returns `Merged.masks`: the result is a model per expert, not one for all.
        published_tuning: what the published numbers chose by labelled data; empty for nothing.
        family_defaults: parameters that the paper sets per model family.
    """

    name: str
    kernel: Kernel
    equation: str
    reference: Reference
    laws: Laws
    cost: CostModel
    unit: Unit | Callable[[Parameters], Unit] = "matrix"
    others: Literal["average", "base"] = "average"
    data: Data = "none"
    protocol: str = "inputs"
    survey: Survey | None = None
    factored: Sides | Callable[[Parameters], Sides] = "none"
    writes_masks: bool = False
    published_tuning: str = ""
    family_defaults: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )

    @property
    def summary(self) -> str:
        """First line of the kernel's docstring."""
        return (inspect.getdoc(self.kernel) or "").split("\n", 1)[0]

    @property
    def takes_any_shape(self) -> bool:
        """Whether it merges tensors as they are stored rather than oriented matrices."""
        return self.unit != "matrix"

    @property
    def seeded(self) -> bool:
        """Whether it draws random numbers."""
        return "seed" in self._model.model_fields

    def unit_for(self, parameters: Parameters) -> Unit:
        """Return what it must see at once with these parameters."""
        return self.unit(parameters) if callable(self.unit) else self.unit

    def sides_for(self, parameters: Parameters) -> Sides:
        """Return the sides on which low-rank updates may be written in a basis of their factors."""
        return self.factored(parameters) if callable(self.factored) else self.factored

    def factored_for(self, parameters: Parameters) -> bool:
        """Return whether adapters are merged exactly on their factors with these parameters."""
        return self.sides_for(parameters) != "none"

    def scales_with(self, parameters: Parameters) -> bool:
        """Return whether Δ → sΔ gives s times the merged update with these parameters."""
        return self.laws.scale_equivariant and self.laws.scales_with(parameters)

    def surveyed(self, parameters: Parameters) -> float | None:
        """Return the density that its survey looks for; None: no survey."""
        return None if self.survey is None else self.survey.density(parameters)

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
        """Run the kernel on one layer; `parameters` as `resolve` returns them.

        Raises:
            TensorError: the updates cannot be merged, or the result is not finite.
        """
        try:
            if self._multiplies and self.scales_with(parameters):
                merged = run_near_one(self.kernel, group, parameters)
            else:
                merged = self.kernel(group, **parameters)
        except (LinAlgError, ArithmeticError) as error:
            raise self._beyond(
                group, f"fails ({type(error).__name__.strip('_')})", parameters
            ) from error
        except RuntimeError as error:
            if _NO_FLOAT not in str(error):
                raise
            raise self._beyond(group, "overflows", parameters) from error
        if not all_finite(merged.delta):
            raise self._beyond(group, "gives NaN or Inf", parameters)
        return merged

    @property
    def _multiplies(self) -> bool:
        """Whether it multiplies entries of the updates with each other, or with data."""
        return not self.takes_any_shape or self.data != "none"

    def _beyond(self, group: LinearGroup, what: str, parameters: Parameters) -> TensorError:
        """Say that finite updates are beyond this method, and which would be within it."""
        sizes = ", ".join(f"{norm(update):.3g}" for update in group.updates)
        if self.scales_with(parameters):
            why = (
                "these norms, weights or parameters are too far apart, or the result is too large "
                f"for {group.updates[0].dtype}: compute in float64"
            )
        else:
            why = (
                "its constants are absolute, so that it needs updates of usual size: multiply them "
                "by one factor and divide the result by it"
            )
        return TensorError(
            f"method '{self.name}' {what} on finite updates of norms {sizes} (in the experts' "
            f"order); {why}, or merge this tensor by `average`"
        )


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
    """Methods by name, in alphabetical order."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}
        self._absent: dict[str, str] = {}

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

    def reserve(self, name: str, why: str) -> None:
        """Keep the name of a method that is not here, with what is missing for it."""
        self._absent[name] = why

    def names(self) -> tuple[str, ...]:
        """All method names."""
        return tuple(sorted(self._methods))

    @property
    def absent(self) -> Mapping[str, str]:
        """Methods of the literature that are not here, and why."""
        return self._absent

    def get(self, name: str) -> Method:
        """Return a method.

        Raises:
            RecipeError: there is no such method; the message has the nearest name.
        """
        if name in self._absent:
            raise RecipeError(f"method '{name}' is not available: {self._absent[name]}")
        if name not in self._methods:
            raise RecipeError(f"there is no method '{name}'." + did_you_mean(name, self._methods))
        return self._methods[name]

    def __iter__(self) -> Iterator[Method]:
        return (self._methods[name] for name in self.names())


registry = Registry()
register = registry.register
