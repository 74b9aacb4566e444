"""How many requests a server is sent at once: as many as the link carries and the server likes.

One connection brings what the way there and the server's own limit let through, and a link has room for
several. How many is tried out: twice as many, as long as that brings a quarter more bytes a second; half as
many where the server says that it is too much. What all requests under way may bring together is fixed, so
that more of them are smaller ones, and memory does not hang on the link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache

from covmerge.files.stores.retries import is_too_much, passes

MOST = 32
_FIRST = 8
_HELD = 2**26  # bytes of all requests under way
_LONGEST = 2**23
_SHORTEST = 2**20  # whole blocks of the cache, and long beside the way there and back
_WORTH = 1.25  # times the bytes a second that twice as many requests have to bring
# Seconds for which no more are tried after they did not, and twice as long the next time.
_CALM = 30.0
_CALMEST = 960.0


class Link:
    """The requests to one server, as its loop of events carries them out; all is called in that loop.

    Attributes:
        at_once: requests that may be under way now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_once = _FIRST
        self._clock = clock
        self._under_way = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._calm, self._until = _CALM, 0.0
        self._changed = clock()
        self._half: float | None = None  # bytes a second of half as many
        self._begin_round()

    def part(self, length: int) -> int:
        """Return how many bytes a request should bring now, of a read of so many in all."""
        share = min(_LONGEST, _HELD // self.at_once, -(-length // self.at_once))
        return -(-share // _SHORTEST) * _SHORTEST

    def most(self, length: int) -> int:
        """Return how many requests a read of so many bytes can come to have under way."""
        return min(MOST, -(-length // _SHORTEST))

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait until one more request may be under way, and be that one, all its attempts together."""
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
        """Carry out a request that brings so many bytes, once, and learn from it."""
        began = self._clock()
        try:
            await request()
        except Exception as error:  # each library has its own
            # One that began before the last change was one of more than there are now.
            if passes(error) and began >= self._changed:
                self._failed(too_much=is_too_much(error))
            raise
        self._account()
        self._bytes += size
        self._done += 1
        if self._done == self._before:  # those until now were begun when there were fewer
            self._bytes, self._seconds = 0, 0.0
        if self._done >= self._before + 2 * self.at_once:
            self._end_round()

    def _failed(self, *, too_much: bool) -> None:
        """A connection may be lost at any time; two of a round are lost for a reason."""
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
        """Go back to fewer, and stay there for a while."""
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
        """Count anew; a round is twice as many requests as may be under way, after those that were."""
        self._since = self._clock()
        self._seconds = 0.0  # in which there were requests under way
        self._bytes = self._done = self._lost = self._before = 0
        self._full = False  # whether there were ever as many as there may be

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
    """Return the one link of this process to a server, known by scheme and host or bucket."""
    del server
    return Link()
