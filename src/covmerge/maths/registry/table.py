"""Functions by name: covmerge's own, a script's, and those that installed packages announce.

An entry point of the table's group names what it announces, and the module that registers it when it
is imported. So names are known without an import, and a package is imported when somebody asks for
what it announces, or for all names. One that cannot be imported, or announces a name that another has,
is an error where that name is asked for, and spoils nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.maths.registry.declared import Declared
from covmerge.maths.registry.packages import Announced, Origin, announced, origin_of

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
                    f"'-', and none of {', '.join(_TAKEN)}"
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
        if get_close_matches(name, known, n=1):
            return did_you_mean(name, known)
        return f" `covmerge methods` lists the {self._kind.kind}s."

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
