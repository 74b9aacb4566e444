"""The finished output, each file read by the rank that claims it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from covmerge.base.types import Json
from covmerge.files.checkpoints import Checkpoint
from covmerge.files.checkpoints.content import Pace
from covmerge.run.engine.ranks.session import Session
from covmerge.run.engine.ranks.sharing import Sharing
from covmerge.run.engine.reading import FileCheck, files_at_once

_STAGE = "files"


def lead_reading(
    session: Session, sizes: Mapping[str, int], look: FileCheck, base: Checkpoint
) -> Mapping[str, Json]:
    """Let all ranks read the files, and return what was found; see `ReadFiles`.

    Raises:
        CovmergeError: as a rank raises over a file.
    """
    session.open_stage(_STAGE, {"sizes": sizes, "look": look.as_json()})
    return _share(session, sizes, look, base)


def help_reading(session: Session, look_of: Callable[[Any], FileCheck], base: Checkpoint) -> None:
    """Wait for the one that leads to have all files written, and read a share of them.

    Args:
        session: what the ranks have in common.
        look_of: what is done with a file, by what the rank that leads says of it.
        base: of the merge.

    Raises:
        LeaderGoneError: it is all over.
        CovmergeError: as a rank raises over a file.
    """
    told = cast("Mapping[str, Any]", session.stage(_STAGE))
    _share(session, told["sizes"], look_of(told["look"]), base)


def _share(
    session: Session, sizes: Mapping[str, int], look: FileCheck, base: Checkpoint
) -> Mapping[str, Json]:
    threads = files_at_once(len(sizes), session.rank.local)

    def do(name: str, _: Pace) -> Json:
        return look(base, name)

    with Sharing(session, _STAGE, sizes, do, look.check, threads) as sharing:
        return sharing.result()
