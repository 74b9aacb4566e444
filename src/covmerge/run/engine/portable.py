"""Errors that go from one process to another."""

from __future__ import annotations

import pickle
from contextlib import suppress

from covmerge.base import errors
from covmerge.base.errors import CovmergeError


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can raise; of one that does not pickle, its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        for kind in _kinds(error):
            with suppress(TypeError):
                return kind(str(error))
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def named_error(error: BaseException) -> tuple[str, str]:
    """Return the name of the nearest of our errors that is made of a message alone, and the message.

    Example:
        >>> from covmerge.base.errors import NotFiniteError
        >>> named_error(NotFiniteError("w", None, "has NaN"))
        ('TensorError', "'w' of the base has NaN")
    """
    for kind in _kinds(error):
        with suppress(TypeError):
            kind("")
            return kind.__name__, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def error_named(kind: str, message: str) -> Exception:
    """Return the error whose name and message another process gave."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CovmergeError):
        with suppress(TypeError):
            return found(message)
    return RuntimeError(message)


def _kinds(error: BaseException) -> list[type[CovmergeError]]:
    return [
        kind
        for kind in type(error).__mro__
        if issubclass(kind, CovmergeError) and kind.__module__ == CovmergeError.__module__
    ]
