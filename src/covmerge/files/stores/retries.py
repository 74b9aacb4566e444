"""Requests to a server: made again where they fail in passing, and reported without what may be secret.

The errors of the libraries hold addresses with signatures, and answers of servers. Of an error only its
kind, its status and its code are reported.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

Found = TypeVar("Found")

WAITS = (0.2, 0.4, 0.8, 1.6, 3.2)  # seconds before each further attempt, on average
LONGEST = 600.0  # seconds a request may take: of the largest one, 14 KB/s

_AGAIN = frozenset({408, 409, 425, 429})  # of the client's errors those that pass
_ANSWERS = frozenset({"ClientResponseError", "HttpError"})  # aiohttp's, gcsfs's
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
)


class ChangedError(OSError):
    """A file is another than it was."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "it changed while it was in use")


class RefusedError(OSError):
    """A server does not do what is asked, and would not the next time."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPROTO, reason)


class FailedError(OSError):
    """All attempts failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, f"it failed {len(WAITS) + 1} times ({reason})")


async def persist(request: Callable[[], Awaitable[Found]], longest: float | None = None) -> Found:
    """Carry a request out, again where it failed in passing.

    Args:
        request: makes it.
        longest: seconds that one attempt may take; None: as many as a read.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the server does not let this user, or credentials are missing.
        OSError: the server refuses, or fails after all attempts.
    """
    for wait in (*WAITS, None):
        try:
            return await asyncio.wait_for(request(), LONGEST if longest is None else longest)
        except Exception as error:  # each library has its own, and they change by version
            final = _final(error)
            if final is not None:
                raise final from None
            if wait is None:
                raise FailedError(_described(error)) from None
        await asyncio.sleep(wait * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


async def all_of(requests: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """Carry several out at once; where one fails the others are stopped before the error is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def passes(error: Exception) -> bool:
    """Whether a request that failed so is worth another attempt."""
    return _final(error) is None


def is_too_much(error: Exception) -> bool:
    """Whether a server says so that it is asked more than it can or will answer."""
    return _answer(error)[0] in (429, 503)


def _final(error: Exception) -> OSError | None:
    """What is reported of an error that no further attempt mends; None: one may."""
    status, _ = _answer(error)
    if isinstance(error, ChangedError | RefusedError | FailedError):
        return error
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if type(error).__name__ in _NO_CREDENTIALS:
        return PermissionError(
            errno.EACCES, "no credentials: give them in the environment (docs/remote.md)"
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(
            errno.EACCES,
            f"the server does not let you ({_described(error)}): check the credentials in the environment "
            "(docs/remote.md)",
        )
    if status == 412:
        return ChangedError()
    if status is not None and 400 <= status < 500 and status not in _AGAIN:
        return RefusedError(f"the server refuses it ({_described(error)})")
    return None


def _described(error: Exception) -> str:
    status, code = _answer(error)
    if status is None:
        return code or type(error).__name__
    return f"status {status}" + (f", {code}" if code not in ("", str(status)) else "")


def _answer(error: BaseException) -> tuple[int | None, str]:
    """The status of the answer that an error is about, and the code that the server gave."""
    one: BaseException | None = error
    while one is not None:
        response: Any = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's
            said = cast("dict[str, Any]", response)
            code = str(said.get("Error", {}).get("Code", ""))
            return said.get("ResponseMetadata", {}).get("HTTPStatusCode"), code[:100]
        of_server = type(one).__name__ in _ANSWERS  # others have numbers that no server sent
        status: Any = getattr(one, "status", None) or getattr(one, "code", None)
        if of_server and isinstance(status, int):
            return status, ""
        one = one.__cause__
    return None, ""
