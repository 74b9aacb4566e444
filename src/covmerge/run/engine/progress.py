"""Progress of a run: what is called as it advances, in whichever form the caller has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

from covmerge.base.errors import InputError


@runtime_checkable
class Progress(Protocol):
    """Called as a run advances, from one thread at a time."""

    def start(self, total: int) -> None:
        """Work begins: so many bytes will be read and written."""
        ...

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """So many of them are done, or were found done by an earlier run; `what` was the last."""
        ...

    def finish(self) -> None:
        """Work is over, in success or failure."""
        ...


class Bar(Protocol):
    """A bar that counts to a total, as tqdm's: made with `total`, `unit` and `unit_scale`."""

    def update(self, n: int, /) -> object:
        """So many more are done."""
        ...

    def close(self) -> object:
        """Work is over."""
        ...


# (bytes done, bytes in all, the tensor that was last done)
Advanced = Callable[[int, int, str], object]
AnyProgress = Progress | Advanced | type[Bar]


class Silent:
    """Progress for callers that want none."""

    def start(self, total: int) -> None:
        """Work begins."""

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """Some of it is done."""

    def finish(self) -> None:
        """Work is over."""


def as_progress(given: AnyProgress) -> Progress:
    """Return what a caller gave as the object that a run calls.

    Args:
        given: an object with `start`, `advance` and `finish`; a function of the bytes done, the bytes in
            all and the tensor last done; or a class of bars, such as `tqdm.auto.tqdm`, of which each run
            makes one.

    Raises:
        InputError: it is none of these.

    Example:
        >>> shown = as_progress(lambda done, total, what: print(f"{what}: {done} of {total}"))
        >>> shown.start(8)
        >>> shown.advance("fc.weight", 4)
        fc.weight: 4 of 8
    """
    made = _called(given)
    if isinstance(made, type):
        if all(callable(getattr(made, name, None)) for name in ("update", "close")):
            return _Bars(cast("Callable[..., Bar]", given))
        wrong = f"the class {made.__name__} makes no bars with `update` and `close`"
    elif isinstance(given, Progress):
        return given
    elif callable(made):
        return _Called(cast("Advanced", given))
    else:
        wrong = f"a {type(given).__name__} cannot show it"
    raise InputError(
        f"progress: {wrong}: pass a function (done, total, what), an object with start, advance and "
        "finish, or a class of bars such as tqdm.auto.tqdm"
    )


def _called(given: object) -> object:
    """What a caller's function is underneath: a bar may have arguments, partial(tqdm, ncols=60)."""
    return cast("partial[object]", given).func if isinstance(given, partial) else given


class _Called:
    """A function that is called with what is done."""

    def __init__(self, function: Advanced) -> None:
        self._function = function
        self._done = self._total = 0

    def start(self, total: int) -> None:
        self._done, self._total = 0, total

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        del resumed
        self._done += size
        self._function(self._done, self._total, what)

    def finish(self) -> None:
        pass


class _Bars:
    """A bar for each run, of a class like tqdm."""

    def __init__(self, make: Callable[..., Bar]) -> None:
        self._make = make

    def start(self, total: int) -> None:
        self._bar = self._make(total=total, unit="B", unit_scale=True)

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        del what, resumed
        self._bar.update(size)

    def finish(self) -> None:
        self._bar.close()
