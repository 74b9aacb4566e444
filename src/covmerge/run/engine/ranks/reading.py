"""The finished output and the sources, each file read by the rank that claims it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.content import Pace
from covmerge.run.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.run.engine.ranks.session import Session
from covmerge.run.engine.ranks.sharing import Sharing
from covmerge.run.engine.reading import FileCheck, files_at_once

_STAGE = "files"


def lead_reading(
    session: Session, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
) -> Mapping[str, Json]:
    """Let all ranks read the files, and return what was found; see `ReadFiles`.

    Raises:
        CovmergeError: as a rank raises over a file.
    """
    session.open_stage(_STAGE, {"sizes": sizes, "look": file_check.as_json()})
    return _share(session, sizes, file_check, base)


def help_reading(session: Session, check_of: Callable[[Any], FileCheck], base: Checkpoint) -> None:
    """Wait for the one that leads to have all files written, and read a share of them.

    Args:
        session: what the ranks have in common.
        check_of: what is done with a file, by what the rank that leads says of it.
        base: of the merge.

    Raises:
        LeaderGoneError: it is all over.
        CovmergeError: as a rank raises over a file.
    """
    fields = cast("Mapping[str, Any]", session.stage(_STAGE))
    _share(session, fields["sizes"], check_of(fields["look"]), base)


def _share(
    session: Session, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
) -> Mapping[str, Json]:
    threads = files_at_once(len(sizes), session.rank.local)

    def do(name: str, _: Pace) -> Json:
        return file_check(base, name)

    with Sharing(session, _STAGE, sizes, do, file_check.check, threads) as sharing:
        return sharing.result()


_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class SharedHashing:
    """Hashes of which each rank takes its share, while all merge; see `Sharing`.

    What costs no reading (commits, versions) the one that leads looks at itself, in the end.

    Args:
        session: what the ranks have in common.
        contents: of all sources.
    """

    def __init__(self, session: Session, contents: Contents) -> None:
        self._contents = contents
        self._shared = {f"{key} {one.name}": (key, one) for key, one in to_share(contents)}
        sizes = {name: content.size for name, (_, content) in self._shared.items()}
        # As many for each machine as one process alone has.
        threads = max(1, len(contents) // max(1, session.rank.local))
        self._sharing = Sharing(session, "hashes", sizes, self._hash, _checked, threads)

    def __enter__(self) -> SharedHashing:
        self._sharing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._sharing.__exit__(*error)

    def follow(self, share: float) -> None:
        """See `Hashing`; ranks do not wait for their readers, as they come to files in any order."""

    def result(self) -> Hashes:
        """See `Hashing`.

        Raises:
            LeaderGoneError: the rank that leads is gone.
        """
        hashes = self._sharing.result()
        found = {(key, one.name): hashes[name] for name, (key, one) in self._shared.items()}
        return in_order(self._contents, found)

    def _hash(self, name: str, pace: Pace) -> str:
        _, content = self._shared[name]
        return content.hash(pace)


def _checked(name: str, found: Json) -> str:
    """The hash that another rank has found."""
    del name
    if not isinstance(found, str) or not _HASH.fullmatch(found):
        raise ValueError("it is no hash")
    return found
