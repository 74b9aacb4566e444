"""The hashes of the sources, each file's by the rank that claims it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from covmerge.engine.hashing import Contents, Hashes, in_order, to_share
from covmerge.engine.portable import error_named
from covmerge.engine.ranks.claims import who_has
from covmerge.engine.ranks.session import LeaderGoneError, Session
from covmerge.engine.ranks.shares import own_first
from covmerge.errors import CheckpointError

_STAGE = "hashes"  # as claims and ledgers call it, beside the numbers of what executors run
_OVER = (CancelledError, LeaderGoneError)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class SharedHashing:
    """Hashes of which each rank takes its share of the bytes, and then what others have not come to.

    All ranks see the same files, as the same plan says, and hash them while they merge: each says in its
    ledger what it has found, and what a rank had that is gone is hashed once more. What costs no reading
    (commits, versions) the one that leads looks at itself, in the end.

    Args:
        session: what the ranks have in common.
        contents: of all sources.
    """

    def __init__(self, session: Session, contents: Contents) -> None:
        self._session = session
        self._contents = contents
        self._shared = to_share(contents)
        self._names = {
            index: f"{key} {content.name}" for index, (key, content) in enumerate(self._shared)
        }
        self._found: dict[int, tuple[str, str]] = {}  # the hash, and by whom
        self._claiming = threading.Lock()
        self._stopped = False
        self._failure: BaseException | None = None
        rank = session.rank
        sizes = [content.size for _, content in self._shared]
        self._unclaimed = iter(own_first(sizes, rank.number, rank.world))
        # As many for each machine as one process alone has.
        self._threads = max(1, len(contents) // max(1, rank.local))
        self._pool = ThreadPoolExecutor(self._threads, "covmerge-hash")

    def __enter__(self) -> SharedHashing:
        """See `Hashing`."""
        self._lot = self._session.lot(_STAGE, 0)
        self._hashing: list[Future[None]] = []
        try:
            for work in (self._work, *[self._help] * (self._threads - 1)):
                self._hashing.append(self._pool.submit(self._guarded, work))
        except BaseException:
            self._stopped = True
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """See `Hashing`."""
        self._stopped = True
        self._pool.shutdown()

    def follow(self, share: float) -> None:
        """See `Hashing`; ranks do not wait for their readers, as they come to files in any order."""

    def result(self) -> Hashes:
        """See `Hashing`.

        Raises:
            LeaderGoneError: the rank that leads is gone.
        """
        wait(self._hashing)
        if self._failure is not None:
            raise self._failure
        found = {
            (key, content.name): self._found[index][0]
            for index, (key, content) in enumerate(self._shared)
        }
        return in_order(self._contents, found)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what a thread does; its error ends what the others do, here and at all ranks."""
        try:
            work()
        except BaseException as error:
            self._failure = self._failure or error
            self._stopped = True
            if isinstance(error, Exception) and not isinstance(error, _OVER):
                try:
                    self._session.failed(_STAGE, error)
                except LeaderGoneError as gone:
                    self._failure = gone

    def _work(self) -> None:
        """What one thread does until all hashes are known."""
        while True:
            self._hear()
            if len(self._found) == len(self._shared):
                return
            index = self._unclaimed_one()
            if index is None:
                index = self._left_one()
            if index is None:
                self._pace(0)
                self._session.wait()
            else:
                self._hash(index)

    def _help(self) -> None:
        """What the other threads do until all is claimed: one alone looks after other ranks."""
        while (index := self._unclaimed_one()) is not None:
            self._hash(index)

    def _unclaimed_one(self) -> int | None:
        """Claim what nobody has."""
        with self._claiming:
            for index in self._unclaimed:
                if index not in self._found and self._lot.take(index):
                    return index
        return None

    def _left_one(self) -> int | None:
        """Claim what a rank had that is gone."""
        left = (index for index in range(len(self._shared)) if index not in self._found)
        return next((i for i in left if self._lot.take_left(i, self._is_there)), None)

    def _is_there(self, lot: str) -> bool:
        who = who_has(lot)
        return who == self._session.who or not self._session.ledgers.is_gone(who)

    def _hash(self, index: int) -> None:
        _, content = self._shared[index]
        found = content.hash(self._pace)
        name = self._names[index]
        self._session.tell({"stage": _STAGE, "index": index, "of": name, "hash": found})
        self._note(index, found, self._session.who)

    def _hear(self) -> None:
        """Note what other ranks say they have hashed."""
        for who, record in self._session.ledgers.take(_STAGE):
            if "error" in record:
                raise error_named(str(record["error"]), str(record.get("message")))
            match record:
                case {"index": int(index), "of": str(name), "hash": str(found)} if self._names.get(
                    index
                ) == name and _HASH.fullmatch(found):
                    self._note(index, found, who)
                case _:
                    raise CheckpointError(
                        f"the ledger of rank {who} in {self._session.folder} says what no rank does "
                        f"(a hash of {record.get('of')!r}): is one version of covmerge at work?"
                    )

    def _note(self, index: int, found: str, who: str) -> None:
        before, by = self._found.setdefault(index, (found, who))
        if before != found:
            raise CheckpointError(
                f"{self._names[index]} has the hash {found} where rank {who} reads it, and "
                f"{before} where rank {by} does: is it the same file on all machines?"
            )

    def _pace(self, done: int) -> None:
        if self._stopped:
            raise CancelledError("hashing the sources was stopped")
