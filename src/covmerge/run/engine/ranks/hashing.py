"""The hashes of the sources, each file's by the rank that claims it."""

from __future__ import annotations

import re

from covmerge.base.types import Json
from covmerge.files.checkpoints.content import Pace
from covmerge.run.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.run.engine.ranks.session import Session
from covmerge.run.engine.ranks.sharing import Sharing

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
