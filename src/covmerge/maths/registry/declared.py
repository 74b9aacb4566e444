"""A function that recipes call by its name, and what its signature says of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from covmerge.base.errors import RecipeError, ResourceError, TensorError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import shown

Parameters = Mapping[str, Any]


class PerExpert:
    """Marks a parameter that is one value, or a list of one value for each expert in their order.

    Example:
        >>> from typing import Annotated
        >>> from pydantic import Field
        >>> Share = Annotated[float, Field(gt=0, le=1)]
        >>> Density = Annotated[Share | list[Share], PerExpert(), Field(description="share kept")]
    """


@dataclass(frozen=True)
class Parameter:
    """One named parameter."""

    name: str
    default: Any
    annotation: str
    description: str


@dataclass(frozen=True)
class Declared:
    """A registered function; its keyword arguments are its parameters.

    Attributes:
        name: as written in recipes.
        kernel: the function.
    """

    kind: ClassVar[str] = "function"

    name: str
    kernel: Callable[..., Any]

    def __post_init__(self) -> None:
        """Refuse a function that cannot be called as it will be."""
        given = inspect.signature(self.kernel).parameters.values()
        positional = [p for p in given if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        plain = all(
            p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in positional
        )
        if not plain or len(positional) != len(self.operands):
            raise ValueError(
                f"{self.kind} '{self.name}' is a function {inspect.signature(self.kernel)}: write it as "
                f"({', '.join(self.operands)}, *, parameters), its parameters after the star"
            )

    def one_of(self, declared: str, choices: Any) -> None:
        """Refuse a declaration that is none of a `Literal`'s; a function of the parameters may be.

        Raises:
            ValueError: the message names the choices.
        """
        given = getattr(self, declared)
        allowed = get_args(choices)
        if not callable(given) and given not in allowed:
            raise ValueError(
                f"{self.kind} '{self.name}': {declared}={given!r}; it is one of "
                f"{', '.join(map(repr, allowed))}"
            )

    @contextmanager
    def ending_in_words(self, work: str) -> Generator[None]:
        """Turn what would end the program, or no more than the thread that it comes in, into an error.

        Args:
            work: what is asked of it meanwhile, for messages.

        Raises:
            TensorError: it raised SystemExit.
            ResourceError: it raised MemoryError.
        """
        try:
            yield
        except SystemExit as error:
            raise TensorError(
                f"{self.kind} '{self.name}' tried to end the program (SystemExit: {error}) and gave "
                f"nothing for {work}: choose another {self.kind}, or repair it"
            ) from error
        except MemoryError as error:
            raise ResourceError(
                f"{self.kind} '{self.name}' had no memory for {work} ({str(error) or 'refused'}): "
                f"free some, pass a smaller {Hint('max_memory')} and fewer {Hint('workers')} and "
                f"{Hint('threads')}, or another {self.kind}"
            ) from error

    @property
    def operands(self) -> tuple[str, ...]:
        """What it is called with beside its parameters."""
        return ("group",)

    @property
    def summary(self) -> str:
        """First line of the kernel's docstring."""
        return (inspect.getdoc(self.kernel) or "No description.").split("\n", 1)[0]

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.kernel)  # slow beside a small tensor, and asked for of each

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self.kernel, include_extras=True)
        fields: dict[str, Any] = {
            name: (
                hints.get(name, Any),
                ... if parameter.default is parameter.empty else parameter.default,
            )
            for name, parameter in self._signature.parameters.items()
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

    @cached_property
    def per_expert(self) -> tuple[str, ...]:
        """Names of the parameters that may have one value for each expert."""
        return tuple(
            name
            for name, info in self._model.model_fields.items()
            if any(isinstance(mark, PerExpert) for mark in info.metadata)
        )

    def for_experts(
        self, parameters: Parameters, experts: Sequence[str], present: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return the parameters for those of the experts that have a tensor.

        Args:
            parameters: all of them, as `resolve` returns them.
            experts: names of all experts, in their order.
            present: names of those that have the tensor; None: all of them.

        Raises:
            RecipeError: a parameter has another number of values than there are experts.

        Example:
            >>> from covmerge.methods import get
            >>> method = get("linear")
            >>> given = method.resolve({"weight": [0.2, 0.3, 0.5]})
            >>> method.for_experts(given, ["a", "b", "c"], ["a", "c"])["weight"]
            [0.2, 0.5]
        """
        found = dict(parameters)
        for name in self.per_expert:
            values = found[name]
            if not isinstance(values, list):
                continue
            listed = cast("list[Any]", values)
            if len(listed) != len(experts):
                raise RecipeError(
                    f"{self.kind} '{self.name}': {name} = {listed} has {len(listed)} values, and there "
                    f"are {len(experts)} experts ({', '.join(experts)}): give one value for all, or one "
                    "for each in this order"
                )
            if present is not None:
                by_expert = dict(zip(experts, listed, strict=True))
                found[name] = [by_expert[expert] for expert in present]
        return found

    def has(self, parameter: str) -> bool:
        """Whether it has a parameter of this name."""
        return parameter in self._signature.parameters

    def resolve(self, given: Parameters) -> dict[str, Any]:
        """Return all parameters: given ones over the defaults.

        Raises:
            RecipeError: an unknown name, or a value out of its range.
        """
        for name in given:
            if name not in self._model.model_fields:
                raise RecipeError(
                    f"{self.kind} '{self.name}' has no parameter '{name}'."
                    + did_you_mean(name, self._model.model_fields)
                )
        try:
            return self._model(**given).model_dump()
        except ValidationError as error:
            problems = "; ".join(f"{where}: {what}" for _, where, what in _problems(error, given))
            raise RecipeError(f"{self.kind} '{self.name}': {problems}") from error

    def check(self, parameter: str, value: object) -> None:
        """Refuse a value that one of the parameters cannot have.

        Raises:
            ValueError: it cannot; the message says why, without the parameter's name.

        Example:
            >>> from covmerge.methods import get
            >>> get("ties").check("density", 0.2)
        """
        try:
            self._model(**{parameter: value})
        except ValidationError as error:
            for name, _, what in _problems(error, {parameter: value}):
                if name == parameter:
                    raise ValueError(what) from error


def _problems(error: ValidationError, given: Parameters) -> list[tuple[str, str, str]]:
    """The parameters in which something is wrong, each with where and what."""
    found: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for problem in error.errors():
        name, *below = map(str, problem["loc"])
        # Of a parameter that may be one value or a list there is a problem as either.
        fits = True
        if below and not below[0].isdigit():
            fits = below.pop(0).startswith("list[") == isinstance(given.get(name), list)
        where = ".".join((name, *below))
        if problem["type"] == "missing":
            found[fits].append((name, where, "it has no default: give its value"))
            continue
        found[fits].append((name, f"{where} = {shown(problem['input'])}", problem["msg"].lower()))
    return found[True] or found[False]


def _allowed(schema: Mapping[str, Any]) -> str:
    """Say in a few words what a JSON Schema of one parameter admits."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_allowed(option) for option in schema["anyOf"]))
    if schema.get("type") == "array":
        return "list of these"
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([str(schema.get("type", "any")), *bounds])
