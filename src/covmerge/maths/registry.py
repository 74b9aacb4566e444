"""Declarations of methods and steps, the tables that hold them, and the packages they come from."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib.metadata import EntryPoint, distribution, entry_points, packages_distributions
from inspect import unwrap
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import Tensor

from covmerge.base.code import digest, digest_of_code
from covmerge.base.errors import RecipeError, ResourceError, TensorError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import shown
from covmerge.base.types import Json

# Registered functions, and the parameters that their signatures declare.

Parameters = Mapping[str, Any]


class PerExpert:
    """Marks a parameter that has one value for all experts, or a list of one value per expert in order.

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
    """A registered function; its keyword arguments are its parameters."""

    kind: ClassVar[str] = "function"

    name: str  # its name in recipes
    kernel: Callable[..., Any]  # the function

    def __post_init__(self) -> None:
        """Check that the function can be called with its operands and keyword parameters."""
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
        """Check that a declaration is one of a `Literal`'s values, or a function of the parameters."""
        given = getattr(self, declared)
        allowed = get_args(choices)
        if not callable(given) and given not in allowed:
            raise ValueError(
                f"{self.kind} '{self.name}': {declared}={given!r}; it is one of "
                f"{', '.join(map(repr, allowed))}"
            )

    @contextmanager
    def naming_failures(self, work: str) -> Generator[None]:
        """Turn an exit of the program, and a lack of memory, into an error that names function and work.

        A SystemExit would end the program, or silently the thread in which it is raised.
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

    @contextmanager
    def leaving(self, given: Sequence[Tensor]) -> Generator[None]:
        """Check that the function does not change tensors in place, which torch counts."""
        tensors = [tensor for tensor in given if not tensor.is_inference()]
        before = [tensor._version for tensor in tensors]
        yield
        if before != [tensor._version for tensor in tensors]:
            raise TensorError(
                f"{self.kind} '{self.name}' changed in place what it was given, and others are given the "
                "same: have it work on copies, such as `update.clone()`"
            )

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the positional arguments."""
        return ("group",)

    @property
    def summary(self) -> str:
        """The first line of the kernel's docstring."""
        return (inspect.getdoc(self.kernel) or "No description.").split("\n", 1)[0]

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.kernel)  # slow compared with a small tensor; needed each time

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
        # Strict except for int → float: a string or a bool is never a number here.
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(self.name, __config__=config, **fields)

    @cached_property
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
        """Names of the parameters that may have one value per expert."""
        return tuple(
            name
            for name, info in self._model.model_fields.items()
            if any(isinstance(mark, PerExpert) for mark in info.metadata)
        )

    def for_experts(
        self, parameters: Parameters, experts: Sequence[str], present: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return resolved parameters for the experts that are `present` in a tensor; None: all of them.

        Raises:
            RecipeError: a list has another number of values than there are experts.

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
        """Return whether the function has a parameter of this name."""
        return parameter in self._signature.parameters

    def resolve(self, given: Parameters) -> dict[str, Any]:
        """Return all parameters: the given values, and defaults for the others."""
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
        """Check that a parameter may have a value.

        Raises:
            ValueError: it may not; the message says why, without the parameter's name.

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
    """Return the problems as parameter, place and text; only those of the type that the value has."""
    found: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for problem in error.errors():
        name, *below = map(str, problem["loc"])
        # A parameter that may be one value or a list reports a problem for each of the two types.
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
    """Describe in a few words the values that a JSON Schema of one parameter allows."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_allowed(option) for option in schema["anyOf"]))
    if schema.get("type") == "array":
        return "list of these"
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([str(schema.get("type", "any")), *bounds])


# The names that installed packages announce by entry points, and the origin of a function.

_OURS = "covmerge"
_ALIKE = 0.75  # least similarity of a mistyped name


@cache
def _announced(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return all names announced in an entry point group; nothing is imported."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def _announcing(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the package that announces a name."""
    return (
        ("an unknown package", "") if entry.dist is None else (entry.dist.name, entry.dist.version)
    )


def _holds(entry: EntryPoint, function: Callable[..., Any]) -> bool:
    """Return whether a function belongs to the package that announces a name."""
    return _package(function) == entry.module.partition(".")[0]


@dataclass(frozen=True)
class Origin:
    """The origin of a registered function, for those who want to reproduce a result."""

    kind: str  # method or step
    name: str  # the name under which it is registered
    module: str  # the module that defines it
    distribution: str | None  # the installed package; None for a script, or a folder on the path
    version: str | None  # the package's version
    code: str  # hash of the Python files of its package, or of the function if no file has it

    def __str__(self) -> str:
        if self.distribution is None:
            return f"module {self.module}, of no installed package, code {self.code[:12]}"
        return f"{self.distribution} {self.version}"

    @property
    def is_typed(self) -> bool:
        """Whether the function was typed into a session or a notebook, so that no file has it."""
        return getattr(sys.modules.get(self.module), "__file__", None) is None

    def as_json(self) -> dict[str, Json]:
        """Return the origin as plain JSON."""
        return asdict(self)


def origin_of(
    kind: str, name: str, function: Callable[..., Any], by: EntryPoint | None
) -> Origin | None:
    """Return the origin of a function; None: it is covmerge's own."""
    package = _package(function)
    if package == _OURS:
        return None
    found = [sys.modules.get(name) for name in (package, function.__module__)]
    # A namespace package has no file, and neither has code typed into a notebook.
    module = next((m for m in found if m is not None and getattr(m, "__file__", None)), None)
    file = None if module is None else module.__file__
    typed: Any = unwrap(function)
    code = digest_of_code(typed.__code__) if module is None else digest(module)
    source = _distribution(package, file) if by is None else _announcing(by)
    return Origin(kind, name, function.__module__, *source, code)


@cache
def _distribution(package: str, file: str | None) -> tuple[str | None, str | None]:
    """Return name and version of the installed package that a module belongs to; None if there is none."""
    for name in packages_distributions().get(package, ()):
        found = distribution(name)
        # Another distribution may have left a package of the same name, such as `tests`.
        if file is not None and Path(file).is_relative_to(Path(str(found.locate_file("")))):
            return name, found.version
    return None, None


def _package(function: Callable[..., Any]) -> str:
    """Return the top-level package in which a function is defined."""
    return function.__module__.partition(".")[0]


# Functions by name: covmerge's own, a script's, and those that installed packages announce.
#
# An entry point of the table's group has the announced name, and the module that registers it when
# imported. Names are therefore known without an import; a package is imported when its name, or the list
# of all names, is asked for. If a package cannot be imported, or announces a name that another one has,
# asking for that name is an error; all other names still work.

_D = TypeVar("_D", bound=Declared)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{,99}")  # the name becomes the name of a folder
_TAKEN = ("all",)  # words with another meaning in places where a name is given


class Table(Generic[_D]):
    """All registered functions of one kind, in alphabetical order.

    Packages announce more of them in an entry point `group`. `other_names` are those used elsewhere, in
    lower case with `_`, each with the text that says covmerge's name.
    """

    def __init__(
        self, kind: type[_D], group: str, other_names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._kind = kind
        self._group = group
        self._other_names = other_names
        self._declared: dict[str, _D] = {}
        self._absent: dict[str, str] = {}
        self._broken: dict[str, RecipeError] = {}
        self._checked: set[str] = set()
        self._passed: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, **declared: Any) -> Callable[[_Function], _Function]:
        """Register the decorated function under a name."""
        word = self._kind.kind

        def decorate(function: _Function) -> _Function:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise ValueError(
                    f"{name!r} cannot name a {word}: use up to 100 letters, digits, '_', '.', '+' or "
                    f"'-', and not '{', '.join(_TAKEN)}'"
                )
            if name in self._declared:
                raise ValueError(
                    f"{word} '{name}' is registered twice: by {self._declared[name].kernel.__module__} "
                    f"and by {function.__module__}; choose another name, or unregister({name!r}) first"
                )
            self._declared[name] = self._kind(name, function, **declared)
            return function

        return decorate

    def name_of(self, given: str | Callable[..., Any]) -> str:
        """Return the name of a named or passed function or class; a passed one is registered by its name.

        A function passed later under the same name replaces the earlier one, as when a notebook cell runs
        again.

        Raises:
            RecipeError: it is neither a function nor a class, or its name is taken.
        """
        if isinstance(given, str):
            return given
        known = [*((n, entry.kernel) for n, entry in self._declared.items()), *self._passed.items()]
        found = next((name for name, function in known if function is given), None)
        if found is not None:
            return found
        word = self._kind.kind
        name = getattr(given, "__name__", None)
        if name is None:
            raise RecipeError(
                f"{given!r} is no {word}: pass its name, a function or a class, and its parameters as "
                "keywords"
            )
        if name == "<lambda>":
            raise RecipeError(f"a lambda has no name for a {word}: define the function by def")
        before = self._passed.get(name)
        if before is not None and _place(before) == _place(given):
            self.unregister(name)
        try:
            function = given().__call__ if isinstance(given, type) else given
        except TypeError as error:
            raise RecipeError(
                f"{word} '{name}' is a class, which is made without arguments ({error}): take parameters "
                "in __call__(self, group, *, parameters)"
            ) from error
        try:
            self.register(name)(function)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        self._passed[name] = given
        return name

    def is_passed(self, name: str) -> bool:
        """Return whether the name was passed as a function, which other processes do not have."""
        return name in self._passed

    def unregister(self, name: str) -> None:
        """Remove what a script or a notebook registered, so that it can be registered again."""
        self._declared.pop(name, None)
        self._passed.pop(name, None)
        self._checked.discard(name)

    def reserve(self, name: str, why: str) -> None:
        """Reserve a name that is not available, with the reason."""
        self._absent[name] = why

    def names(self) -> tuple[str, ...]:
        """Return all names that can be used, those of installed packages included."""
        for name in _announced(self._group):
            try:
                self._check(name)
            except RecipeError as error:
                self._broken[name] = error
        return tuple(sorted(self._declared.keys() - self._broken.keys()))

    @property
    def absent(self) -> Mapping[str, str]:
        """Names from the literature that are not available, with the reasons."""
        return {n: why for n, why in self._absent.items() if n not in self._declared}

    @property
    def broken(self) -> Mapping[str, str]:
        """Names that installed packages announce but that cannot be used, with the reasons."""
        self.names()
        return {name: str(error) for name, error in sorted(self._broken.items())}

    def get(self, name: str) -> _D:
        """Return the entry of a name.

        Raises:
            RecipeError: there is no such name (the message suggests the nearest), the package that
                announces it cannot be imported, or two packages announce it.
        """
        if name not in self._checked:
            self._check(name)
        return self._declared[name]

    def __contains__(self, name: str) -> bool:
        """Return whether a name is known, even if it cannot be used."""
        return name in self._declared or name in _announced(self._group)

    def origin(self, name: str) -> Origin | None:
        """Return the origin of an entry; None: it is covmerge's own."""
        function = self.get(name).kernel
        entries = _announced(self._group).get(name, ())
        by = next((entry for entry in entries if _holds(entry, function)), None)
        return origin_of(self._kind.kind, name, function, by)

    def __iter__(self) -> Iterator[_D]:
        return (self._declared[name] for name in self.names())

    def _check(self, name: str) -> None:
        """Import the package that announces a name, and check that the name is unique."""
        what = f"{self._kind.kind} '{name}'"
        if name in self._broken:
            raise self._broken[name]
        given = _announced(self._group)
        by = given.get(name, ())
        if len(by) > 1:
            raise _clash(what, *sorted(" ".join(_announcing(entry)) for entry in by)[:2])
        if by:
            self._load(what, by[0])
        elif name not in self._declared and name in self._absent:
            raise RecipeError(f"{what} is not available: {self._absent[name]}")
        elif name not in self._declared:
            raise RecipeError(
                f"there is no {what}." + self._nearest(name, {*self._declared, *given})
            )
        self._checked.add(name)

    def _nearest(self, name: str, known: Collection[str]) -> str:
        """Return advice for an unknown name: covmerge's name for it, or the nearest known name."""
        plain = re.sub(r"[-_. ]+", "_", name.lower()).strip("_")
        called = next((each for each in sorted(known) if each.lower() == plain), None)
        if called is not None:
            return f" Did you mean '{called}'?"
        if plain in self._other_names:
            return f" Here it is {self._other_names[plain]}."
        begin = re.split(r"[^\w.+-]", name)[0]
        if begin != name and begin in known:
            called = name.startswith(f"{begin}(")
            return f" Pass '{begin}' and keywords." if called else f" Write {begin}(KEY=VALUE)."
        if get_close_matches(name, known, n=1, cutoff=_ALIKE):
            return did_you_mean(name, known)
        return (
            f" `covmerge methods` lists the {self._kind.kind}s. One of your own is registered in Python, "
            "or comes with an installed package (docs/extending.md)."
        )

    def _load(self, what: str, by: EntryPoint) -> None:
        before, package = dict(self._declared), " ".join(_announcing(by))
        present = before.get(by.name)
        if present is not None and not _holds(by, present.kernel):
            origin = origin_of(self._kind.kind, by.name, present.kernel, None)
            raise _clash(what, "covmerge itself" if origin is None else str(origin), package)
        try:
            by.load()
        except (Exception, SystemExit) as error:  # a foreign module may raise anything
            self._declared = before  # without the names registered before the failure
            self._broken[by.name] = RecipeError(
                f"{what} is announced by the package {package}, and importing {by.value} fails: "
                f"{type(error).__name__}: {error}. Repair it, or: pip uninstall {_announcing(by)[0]}"
            )
            raise self._broken[by.name] from error
        if by.name not in self._declared:
            raise RecipeError(
                f"{what} is announced by the package {package}, and importing {by.value} registers no such "
                "name: tell its authors"
            )


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _clash(what: str, one: str, other: str) -> RecipeError:
    return RecipeError(
        f"{what} is of two packages, {one} and {other}, so it is not clear which is meant: uninstall "
        "one of them"
    )
