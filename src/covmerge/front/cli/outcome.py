"""The end of a command: one message on stderr and an exit code, wherever the error came from."""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from covmerge.base.errors import CovmergeError, InputError, ResourceError
from covmerge.base.settings import hints_for
from covmerge.front.cli.console import say, stderr

INTERRUPTED = 130  # 128 + SIGINT, as in shells
RECIPES = (".yml", ".yaml", ".json")  # endings of recipes' names
_RECIPE = "covmerge.recipe"
TERMINATED = 143  # 128 + SIGTERM
# Messages of Python, torch's allocators, C++ and the C library when memory runs out.
_NO_MEMORY = (
    "can't start new thread",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
)
_THEIRS = re.compile(r"^[\s-]*[\"']?merge_method\b", re.MULTILINE)
_MOST_READ = 2**20
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


# The signals that this process received.
_terminated: list[int] = []


def interrupt_on_sigterm() -> None:
    """Make SIGTERM, by which schedulers and containers stop a process, end it as Ctrl-C does."""

    def stop(number: int, _: object) -> None:
        _terminated.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Make Ctrl-C and SIGTERM end a command with a message, even before it has begun.

    Raises:
        SystemExit: with the exit code of the signal.
    """
    interrupt_on_sigterm()
    try:
        yield
    except KeyboardInterrupt:
        stderr().print("interrupted")
        sys.exit(_interrupted())
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer's own exit code, whichever signal it was
            sys.exit(_interrupted())
        raise


def _interrupted() -> int:
    return TERMINATED if _terminated else INTERRUPTED


def _is_theirs(path: str) -> bool:
    """Return whether a recipe is one of mergekit's, which has none of covmerge's keys."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return _THEIRS.search(file.read(_MOST_READ)) is not None
    except OSError:
        return False


class ReportingGroup(TyperGroup):
    """The group of commands; it prints errors that are meant for the user as messages.

    Unexpected errors keep their traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record whether a recipe is among the arguments: errors then name its keys instead of flags."""
        named = (arg for arg in args if not arg.startswith("-"))
        ctx.meta[_RECIPE] = any(arg.endswith(RECIPES) and not _is_theirs(arg) for arg in named)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command, and turn its errors into messages and exit codes."""
        try:
            with hints_for("recipe" if ctx.meta[_RECIPE] else "flags"):
                return super().invoke(ctx)
        except CovmergeError as error:
            _fail(error)
        except KeyboardInterrupt as stop:
            stderr().print(str(stop) or "interrupted")
            raise typer.Exit(_interrupted()) from None
        except SystemExit as error:  # from other packages; commands end with typer.Exit
            if isinstance(error.__context__, BrokenPipeError):  # rich's, in `covmerge ... | head`
                raise typer.Exit(1) from None
            _fail(
                InputError(
                    f"code of another package ended the program (SystemExit: {error}), and nothing was "
                    "finished: leave out what uses it (`covmerge methods` names the packages), or repair it"
                )
            )
        except (MemoryError, RuntimeError, OSError) as error:
            if _of_memory(error):
                said = str(error).partition("\n")[0] or "refused"
                _fail(
                    ResourceError(
                        f"the memory is used up ({said}): "
                        "free some, raise the limit of this process (ulimit -v), or pass a smaller "
                        "--max-memory and fewer --workers and --threads"
                    )
                )
            if not isinstance(error, OSError) or error.errno not in _NO_SPACE:
                raise
            _fail(
                ResourceError(
                    f"no room{f' for {error.filename}' if error.filename else ''} "
                    f"({error.strerror}): free some space or choose another output folder"
                )
            )


def _of_memory(error: Exception) -> bool:
    """Return whether the system refused memory: to Python, to torch, or for the stack of a thread."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(text in said for text in _NO_MEMORY)


def _fail(error: CovmergeError) -> NoReturn:
    say("error", str(error))
    raise typer.Exit(error.exit_code) from None
