"""Threads whose start raises an error, rather than waiting for ever, where there is no room for them.

CPython's `Thread.start` waits until the new thread reports that it runs. Where a limit of address space
leaves room for the thread's stack alone, the thread ends before that, and `start` waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import psutil

_P = ParamSpec("_P")
_T = TypeVar("_T")
_STACK = 8 * 2**20  # the stack's size where no limit is set
_FIRST = 16 * 2**20  # bytes for what a thread allocates first


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: there is no room for another thread.

    Example:
        >>> thread = threading.Thread(target=print, args=("it runs",))
        >>> start(thread)
        it runs
        >>> thread.join()
    """
    _check_room()
    thread.start()


class ThreadPool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose `submit` raises RuntimeError where a start would wait for ever.

    Example:
        >>> with ThreadPool(2) as pool:
        ...     list(pool.map(abs, [-1, 2]))
        [1, 2]
    """

    def __init__(
        self,
        max_workers: int,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        begun: list[None] = []
        self._count, self._begun = max_workers, begun

        # This function must not refer to the pool. A pool without references ends its threads when it is
        # deleted, even if Ctrl-C came while a thread started.
        def begin() -> None:
            begun.append(None)
            if initializer is not None:
                initializer(*initargs)

        super().__init__(max_workers, thread_name_prefix, begin)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function in one of the threads."""
        if len(self._begun) < self._count:
            _check_room()
        return super().submit(fn, *args, **kwargs)


def _check_room() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = _STACK if stack == resource.RLIM_INFINITY else stack
    taken = psutil.Process().memory_info().vms
    if most - taken < stack + _FIRST:
        raise RuntimeError(
            f"can't start new thread: of {most:,} bytes of space {most - taken:,} are left (ulimit -v)"
        )
