"""Progress of a run: a caller's object, function or class of bars, called as the run advances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

from covmerge.base.errors import InputError


@runtime_checkable
class Progress(Protocol):
    """An object that is called as a run advances, from one thread at a time."""

    def start(self, total: int) -> None:
        """Note that work begins; `total` bytes will be read and written."""

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """Note `size` more bytes as done, by an earlier run if `resumed`; tensor `what` was the last."""

    def finish(self) -> None:
        """Note that work is over, in success or failure."""


class Bar(Protocol):
    """A bar that counts to a total, like tqdm's; it is made with `total`, `unit` and `unit_scale`."""

    def update(self, n: int, /) -> object:
        """Note that `n` more bytes are done."""
        ...

    def close(self) -> object:
        """Close the bar: work is over."""
        ...


# (bytes done, bytes in all, the tensor that was last done)
Advanced = Callable[[int, int, str], object]
AnyProgress = Progress | Advanced | type[Bar]


class Silent(Progress):
    """A progress that does nothing, for callers that gave none."""


def as_progress(given: AnyProgress) -> Progress:
    """Turn a caller's progress into the object that a run calls.

    The caller gives an object with `start`, `advance` and `finish`; a function of the bytes done, the bytes
    in all and the tensor last done; or a class such as `tqdm.auto.tqdm`, of which each run makes one bar.

    Raises:
        InputError: `given` is none of these.

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
    """Return the function or class inside a partial: a bar may have arguments, partial(tqdm, ncols=60)."""
    return cast("partial[object]", given).func if isinstance(given, partial) else given


class _Called:
    """A progress that calls a function with (bytes done, bytes in all, tensor last done)."""

    def __init__(self, function: Advanced) -> None:
        self._function = function
        self._done = self._total = 0

    def start(self, total: int) -> None:
        self._done, self._total = 0, total

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        self._done += size
        self._function(self._done, self._total, what)

    def finish(self) -> None:
        pass


class _Bars:
    """A progress that makes a bar for each run, from a class like tqdm."""

    def __init__(self, make: Callable[..., Bar]) -> None:
        self._make = make

    def start(self, total: int) -> None:
        self._bar = self._make(total=total, unit="B", unit_scale=True)

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        self._bar.update(size)

    def finish(self) -> None:
        self._bar.close()
