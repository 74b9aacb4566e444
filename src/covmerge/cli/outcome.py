"""How a command ends: one line on stderr and an exit code, wherever the error came from."""

from __future__ import annotations

import errno
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from covmerge.cli.console import say, stderr
from covmerge.errors import CovmergeError, ResourceError

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class ReportingGroup(TyperGroup):
    """The commands, with errors that are meant for the user told to the user.

    Anything unexpected keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except CovmergeError as error:
            _fail(error)
        except KeyboardInterrupt as stop:
            stderr().print(str(stop) or "interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            _fail(
                ResourceError(
                    f"no room{f' for {error.filename}' if error.filename else ''} "
                    f"({error.strerror}): free some space or choose another output folder"
                )
            )


def _fail(error: CovmergeError) -> NoReturn:
    say("error", str(error))
    raise typer.Exit(error.exit_code) from None
