"""What methods and steps declare, the table of those that are known, and the packages they come from."""

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
from types import CodeType, MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import Tensor

from covmerge.base.code import digest, digest_of_code
from covmerge.base.errors import RecipeError, ResourceError, TensorError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import shown
from covmerge.base.types import Json

# A function that recipes call by its name, and what its signature says of its parameters.

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
        """Refuse a declaration that is none of a `Literal`'s; a function of the parameters may be."""
        given = getattr(self, declared)
        allowed = get_args(choices)
        if not callable(given) and given not in allowed:
            raise ValueError(
                f"{self.kind} '{self.name}': {declared}={given!r}; it is one of "
                f"{', '.join(map(repr, allowed))}"
            )

    @contextmanager
    def naming_failures(self, work: str) -> Generator[None]:
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

    @contextmanager
    def leaving(self, given: Sequence[Tensor]) -> Generator[None]:
        """See that tensors are afterwards as they were; torch counts changes in place.

        Raises:
            TensorError: one of them was changed, which other methods and steps would be given then.
        """
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
        """Return all parameters: given ones over the defaults."""
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


# What installed packages announce by entry points, and whose code a function is.

_OURS = "covmerge"
_ALIKE = 0.75  # names that are no nearer to each other are not mistyped


@dataclass(frozen=True)
class Announced:
    """A name that an installed package announces.

    Attributes:
        name: what it announces.
        entry: the module that registers it when it is imported.
        distribution: the package, as `pip` knows it.
        version: of the package.
    """

    name: str
    entry: EntryPoint
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def holds(self, function: Callable[..., Any]) -> bool:
        """Whether a function is of the package that is announced."""
        return _package(function) == self.entry.module.partition(".")[0]

    def load(self, what: str) -> None:
        """Import it."""
        try:
            self.entry.load()
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything
            raise RecipeError(
                f"{what} is announced by the package {self}, and importing {self.entry.value} fails: "
                f"{type(error).__name__}: {error}. Repair it, or: pip uninstall {self.distribution}"
            ) from error


@cache
def announced(group: str) -> dict[str, tuple[Announced, ...]]:
    """Everything that is announced in an entry point group, by name; nothing is imported."""
    found: dict[str, tuple[Announced, ...]] = {}
    for entry in entry_points(group=group):
        dist = entry.dist
        source = ("an unknown package", "") if dist is None else (dist.name, dist.version)
        found[entry.name] = (*found.get(entry.name, ()), Announced(entry.name, entry, *source))
    return found


@dataclass(frozen=True)
class Origin:
    """Whose code a registered function is, for those who want its result again.

    Attributes:
        kind: method or step.
        name: under which it is registered.
        module: where it is defined.
        distribution: the installed package; None for a script, or a folder on the path.
        version: of the package.
        code: hash of the Python files of its package; of a function that no file has, of the function.
    """

    kind: str
    name: str
    module: str
    distribution: str | None
    version: str | None
    code: str

    def __str__(self) -> str:
        if self.distribution is None:
            return f"module {self.module}, of no installed package, code {self.code[:12]}"
        return f"{self.distribution} {self.version}"

    @property
    def is_typed(self) -> bool:
        """Whether it was typed into a session or a notebook: no file has it."""
        return getattr(sys.modules.get(self.module), "__file__", None) is None

    def as_json(self) -> dict[str, Json]:
        """All of it as plain JSON."""
        return asdict(self)


def origin_of(
    kind: str, name: str, function: Callable[..., Any], by: Announced | None
) -> Origin | None:
    """Return whose code a function is; None: covmerge's own."""
    package = _package(function)
    if package == _OURS:
        return None
    found = [sys.modules.get(name) for name in (package, function.__module__)]
    # The top of a namespace package has no file, and neither has what is typed into a notebook.
    module = next((m for m in found if m is not None and getattr(m, "__file__", None)), None)
    file = None if module is None else module.__file__
    code = digest_of_code(_code(function)) if module is None else digest(module)
    source = _distribution(package, file) if by is None else (by.distribution, by.version)
    return Origin(kind, name, function.__module__, *source, code)


@cache
def _distribution(package: str, file: str | None) -> tuple[str | None, str | None]:
    """Name and version of the installed package that a module is of, None for one of none."""
    for name in packages_distributions().get(package, ()):
        found = distribution(name)
        # Another one may have left a package of the same name, such as `tests`.
        if file is not None and Path(file).is_relative_to(Path(str(found.locate_file("")))):
            return name, found.version
    return None, None


def _code(function: Any) -> CodeType:
    return unwrap(function).__code__


def _package(function: Callable[..., Any]) -> str:
    """The top of the package that a function is defined in."""
    return function.__module__.partition(".")[0]


# Functions by name: covmerge's own, a script's, and those that installed packages announce.
#
# An entry point of the table's group names what it announces, and the module that registers it when it
# is imported. So names are known without an import, and a package is imported when somebody asks for
# what it announces, or for all names. One that cannot be imported, or announces a name that another has,
# is an error where that name is asked for, and spoils nothing else.

_D = TypeVar("_D", bound=Declared)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{,99}")  # it becomes the name of a folder
_TAKEN = ("all",)  # words with a meaning of their own where a name stands


class Table(Generic[_D]):
    """What is registered of one kind, in alphabetical order.

    Args:
        kind: what it holds.
        group: the entry point group in which packages announce more of it.
        other_names: what others call what is here, in lower case with `_`, and what it is called here.
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
        """Return the name of what is named or passed; a function or class is registered under its own.

        One that is passed later under the same name, as when a cell runs again, takes its place.

        Raises:
            RecipeError: it is neither function nor class, or its name is another's.
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
        """Whether it was passed as a function, which other processes do not have."""
        return name in self._passed

    def unregister(self, name: str) -> None:
        """Forget what a script or a notebook registered, so that it may register it anew."""
        self._declared.pop(name, None)
        self._passed.pop(name, None)
        self._checked.discard(name)

    def reserve(self, name: str, why: str) -> None:
        """Keep the name of something that is not here, with what is missing for it."""
        self._absent[name] = why

    def names(self) -> tuple[str, ...]:
        """All names that can be used, those of installed packages too."""
        for name in announced(self._group):
            try:
                self._check(name)
            except RecipeError as error:
                self._broken[name] = error
        return tuple(sorted(self._declared.keys() - self._broken.keys()))

    @property
    def absent(self) -> Mapping[str, str]:
        """What the literature has and is not here, and why."""
        return {n: why for n, why in self._absent.items() if n not in self._declared}

    @property
    def broken(self) -> Mapping[str, str]:
        """What installed packages announce and cannot be used, and why."""
        self.names()
        return {name: str(error) for name, error in sorted(self._broken.items())}

    def get(self, name: str) -> _D:
        """Return what is registered under a name.

        Raises:
            RecipeError: there is nothing of that name, which the message sets beside the nearest; or
                the package that announces it cannot be imported; or two announce it.
        """
        if name not in self._checked:
            self._check(name)
        return self._declared[name]

    def __contains__(self, name: str) -> bool:
        """Whether a name is known, whether or not what it stands for can be used."""
        return name in self._declared or name in announced(self._group)

    def origin(self, name: str) -> Origin | None:
        """Return whose code something is; None: covmerge's own."""
        function = self.get(name).kernel
        by = next(
            (one for one in announced(self._group).get(name, ()) if one.holds(function)), None
        )
        return origin_of(self._kind.kind, name, function, by)

    def __iter__(self) -> Iterator[_D]:
        return (self._declared[name] for name in self.names())

    def _check(self, name: str) -> None:
        """Import what announces a name, and see that the name is one thing."""
        what = f"{self._kind.kind} '{name}'"
        if name in self._broken:
            raise self._broken[name]
        given = announced(self._group)
        by = given.get(name, ())
        if len(by) > 1:
            raise _clash(what, *sorted(map(str, by))[:2])
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
        """What a name may have meant: what others call so, or the nearest that is known."""
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

    def _load(self, what: str, by: Announced) -> None:
        before = dict(self._declared)
        present = before.get(by.name)
        if present is not None and not by.holds(present.kernel):
            origin = origin_of(self._kind.kind, by.name, present.kernel, None)
            raise _clash(what, "covmerge itself" if origin is None else str(origin), str(by))
        try:
            by.load(what)
        except RecipeError as error:
            self._declared = before  # what it registered before it failed
            self._broken[by.name] = error
            raise
        if by.name not in self._declared:
            raise RecipeError(
                f"{what} is announced by the package {by}, and importing {by.entry.value} registers no "
                "such name: tell its authors"
            )


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _clash(what: str, one: str, other: str) -> RecipeError:
    return RecipeError(
        f"{what} is of two packages, {one} and {other}, so it is not clear which is meant: uninstall "
        "one of them"
    )
