"""The number of simultaneous requests to a server: as many as link and server carry.

A single connection is limited by its latency and by the server, and a link has room for several. Their
number is found by trial: it is doubled as long as that brings a quarter more bytes per second, and halved
if the server says that it is too much. The bytes of all running requests together are fixed: more
requests are smaller ones, and memory does not depend on the link.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar, cast

# Requests to a server: they are repeated if they fail for the moment, and reported without secrets.
#
# The libraries' errors contain addresses with signatures, and answers of servers. Only the kind, the status
# and the code of an error are reported.

Found = TypeVar("Found")

WAITS = (0.2, 0.4, 0.8, 1.6, 3.2)  # seconds before each further attempt, on average
LONGEST = 600.0  # seconds that a request may take: for the largest one, 14 KB/s

_AGAIN = frozenset({408, 409, 425, 429})  # client errors that may pass
_TOO_MUCH = (429, 503)  # the server gets more requests than it can or will answer
_ANSWERS = frozenset({"ClientResponseError", "HttpError"})  # error classes of aiohttp and gcsfs
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
)


class ChangedError(OSError):
    """A file differs from what it was before."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "it changed while it was in use")


class RefusedError(OSError):
    """A server refuses a request, and would refuse it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPROTO, reason)


class FailedError(OSError):
    """All attempts failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, f"it failed {len(WAITS) + 1} times ({reason})")


async def persist(request: Callable[[], Awaitable[Found]], longest: float | None = None) -> Found:
    """Carry out a request, and repeat it if it fails for the moment.

    One attempt may take `longest` seconds; None: those of a read.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the server denies access, or credentials are missing.
        OSError: the server refuses, or all attempts fail.
    """
    for wait in (*WAITS, None):
        try:
            return await asyncio.wait_for(request(), LONGEST if longest is None else longest)
        except Exception as error:  # each library has its own errors, which change by version
            final = _final(error)
            if final is not None:
                raise final from None
            if wait is None:
                raise FailedError(_described(error)) from None
        await asyncio.sleep(wait * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


async def all_of(requests: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """Carry out several requests at once; if one fails, stop the others before the error is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _final(error: Exception) -> OSError | None:
    """Return the error to report if no further attempt can succeed; None: another attempt may."""
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
    """Return the status of the server's answer behind an error, and the server's code."""
    one: BaseException | None = error
    while one is not None:
        response: Any = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's errors
            said = cast("dict[str, Any]", response)
            code = str(said.get("Error", {}).get("Code", ""))
            return said.get("ResponseMetadata", {}).get("HTTPStatusCode"), code[:100]
        of_server = type(one).__name__ in _ANSWERS  # other errors have numbers that no server sent
        status: Any = getattr(one, "status", None) or getattr(one, "code", None)
        if of_server and isinstance(status, int):
            return status, ""
        one = one.__cause__
    return None, ""


MOST = 32
_FIRST = 8
_HELD = 2**26  # bytes of all running requests
_LONGEST = 2**23
_SHORTEST = 2**20  # whole blocks of the cache, and long compared with the latency
_WORTH = 1.25  # factor in bytes per second that twice as many requests have to bring
# Seconds without another trial after one that did not pay; doubled each time.
_CALM = 30.0
_CALMEST = 960.0


class Link:
    """The requests to one server. All methods are called in the server's event loop.

    Attributes:
        at_once: the number of requests that may run now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_once = _FIRST
        self._clock = clock
        self._under_way = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._calm, self._until = _CALM, 0.0
        self._changed = clock()
        self._half: float | None = None  # bytes per second with half as many
        self._begin_round()

    def part(self, length: int) -> int:
        """Return how many bytes a request should fetch now, for a read of `length` bytes."""
        share = min(_LONGEST, _HELD // self.at_once, -(-length // self.at_once))
        return -(-share // _SHORTEST) * _SHORTEST

    def most(self, length: int) -> int:
        """Return the largest number of requests that a read of `length` bytes can have running."""
        return min(MOST, -(-length // _SHORTEST))

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait until one more request may run, and count as that request for all its attempts."""
        while self._under_way >= self.at_once:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._account()
        self._under_way += 1
        self._full |= self._under_way >= self.at_once
        try:
            yield
        finally:
            self._account()
            self._under_way -= 1
            self._wake()

    async def attempt(self, request: Callable[[], Awaitable[None]], size: int) -> None:
        """Carry out a request for `size` bytes once, and adapt to its success."""
        began = self._clock()
        try:
            await request()
        except Exception as error:  # each library has its own errors
            # Ignore failures of requests started under the previous limit.
            if _final(error) is None and began >= self._changed:
                self._failed(too_much=_answer(error)[0] in _TOO_MUCH)
            raise
        self._account()
        self._bytes += size
        self._done += 1
        if self._done == self._before:  # the requests so far were started under a lower limit
            self._bytes, self._seconds = 0, 0.0
        if self._done >= self._before + 2 * self.at_once:
            self._end_round()

    def _failed(self, *, too_much: bool) -> None:
        """Reduce the limit on the second loss of a round: a single connection may be lost at any time."""
        self._lost += 1
        if too_much or self._lost > 1:
            self._hold(max(1, self.at_once // 2))

    def _end_round(self) -> None:
        rate = self._bytes / max(self._seconds, 1e-9)
        half, self._half = self._half, None
        if half is not None and rate < _WORTH * half:
            self._hold(self.at_once // 2)
        elif self._full and self.at_once < MOST and self._clock() >= self._until:
            if half is not None:
                self._calm = _CALM
            self._half = rate
            self._set(2 * self.at_once)
        else:
            self._begin_round()

    def _hold(self, at_once: int) -> None:
        """Reduce the limit, and keep it for a while."""
        self._half = None
        self._until = self._clock() + self._calm
        self._calm = min(2 * self._calm, _CALMEST)
        self._set(at_once)

    def _set(self, at_once: int) -> None:
        self.at_once = at_once
        self._changed = self._clock()
        self._begin_round()
        self._before = self._under_way
        self._wake()

    def _begin_round(self) -> None:
        """Start counting anew; a round has twice as many requests as may run, after those still running."""
        self._since = self._clock()
        self._seconds = 0.0  # time in which requests were running
        self._bytes = self._done = self._lost = self._before = 0
        self._full = False  # whether as many were running as are allowed

    def _account(self) -> None:
        now = self._clock()
        if self._under_way:
            self._seconds += now - self._since
        self._since = now

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


@cache
def link_to(server: str) -> Link:
    """Return this process's one link to a server, which is given by scheme and host or bucket."""
    return Link()
