"""What installed packages announce by entry points, and whose code a function is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import EntryPoint, distribution, entry_points, packages_distributions
from inspect import unwrap
from pathlib import Path
from types import CodeType
from typing import Any

from covmerge.base.code import digest, digest_of_code
from covmerge.base.errors import RecipeError
from covmerge.base.types import Json

_OURS = "covmerge"


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
        """Import it.

        Raises:
            RecipeError: it cannot be imported.
        """
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
