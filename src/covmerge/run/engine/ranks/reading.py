"""The finished output and the sources, each file read by the rank that claims it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Generic, TypeVar, cast

from typing_extensions import Self

from covmerge.base.errors import CheckpointError
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, Pace
from covmerge.files.stores.store import Store
from covmerge.run.engine.hashing import (
    Contents,
    Hashes,
    WeightsCheck,
    files_at_once,
    in_order,
    to_share,
)
from covmerge.run.engine.ranks.claims import who_has
from covmerge.run.engine.ranks.session import LeaderGoneError, Session

# Work by name that all ranks share: each does what it claims, and tells the others what came of it.

_OVER = (CancelledError, LeaderGoneError)
_Found = TypeVar("_Found", bound=Json)


class Sharing(Generic[_Found]):
    """Pieces of which each rank takes its share of the bytes, and then what others have not come to.

    All ranks have the same pieces. Each says in its ledger what it has found; what a rank had that is
    gone is done once more. A context manager, at whose end this rank stops.

    `do` does a piece. It is given a function to call now and then, which raises where all is over. `check`
    checks what another rank says it has found of a piece; ValueError: no rank finds that.
    """

    def __init__(
        self,
        session: Session,
        stage: str,
        sizes: Mapping[str, int],
        do: Callable[[str, Pace], _Found],
        check: Callable[[str, Json], _Found],
        threads: int,
    ) -> None:
        self._session = session
        self._stage = stage
        self._names = list(sizes)
        self._sizes = dict(enumerate(sizes.values()))
        self._do = do
        self._check = check
        self._found: dict[int, tuple[_Found, str]] = {}  # and by whom
        self._claiming = threading.Lock()
        self._stopped = False
        self._failure: BaseException | None = None
        self._threads = threads
        self._pool = ThreadPool(threads, f"covmerge-{stage}")

    def __enter__(self) -> Self:
        self._holding = self._session.holding(self._stage, 0)
        self._unclaimed = self._holding.unclaimed(self._sizes, self._session.rank, self._found)
        self._doing: list[Future[None]] = []
        try:
            for work in (self._work, *[self._help] * (self._threads - 1)):
                self._doing.append(self._pool.submit(self._guarded, work))
        except BaseException:
            self._stopped = True
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown()

    def all_found(self) -> dict[str, _Found]:
        """Wait for all pieces, and return what was found of each, by name.

        Raises:
            LeaderGoneError: the rank that leads is gone.
            CovmergeError: as a rank raises over a piece, whichever it is.
        """
        wait(self._doing)
        if self._failure is not None:
            raise self._failure
        return {name: self._found[index][0] for index, name in enumerate(self._names)}

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what a thread does; its error ends what the others do, here and at all ranks."""
        try:
            work()
        except BaseException as error:
            self._failure = self._failure or error
            self._stopped = True
            if isinstance(error, Exception) and not isinstance(error, _OVER):
                try:
                    self._session.failed(self._stage, error)
                except LeaderGoneError as gone:
                    self._failure = gone

    def _work(self) -> None:
        while True:
            self._hear()
            if len(self._found) == len(self._names):
                return
            index = self._unclaimed_one()
            if index is None:
                index = self._left_one()
            if index is None:
                self._pace(0)
                self._session.wait()
            else:
                self._do_one(index)

    def _help(self) -> None:
        """What the other threads do until all is claimed: one alone looks after other ranks."""
        while (index := self._unclaimed_one()) is not None:
            self._do_one(index)

    def _unclaimed_one(self) -> int | None:
        with self._claiming:
            return next(self._unclaimed, None)

    def _left_one(self) -> int | None:
        """Claim what a rank had that is gone."""
        return next(self._holding.left(self._sizes, self._found, self._is_there), None)

    def _is_there(self, holding: str) -> bool:
        who = who_has(holding)
        return who == self._session.who or not self._session.ledgers.is_gone(who)

    def _do_one(self, index: int) -> None:
        name = self._names[index]
        found = self._do(name, self._pace)
        self._session.tell({"stage": self._stage, "of": name, "found": found})
        self._note(index, found, self._session.who)

    def _hear(self) -> None:
        for who, record in self._session.heard(self._stage):
            try:
                index = self._names.index(record.get("of", ""))
                found = self._check(self._names[index], record.get("found"))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the ledger of rank {who} in {self._session.folder} says what no rank does "
                    f"({self._stage} of {record.get('of')!r}): is one version of covmerge at work?"
                ) from error
            self._note(index, found, who)

    def _note(self, index: int, found: _Found, who: str) -> None:
        before, by = self._found.setdefault(index, (found, who))
        if before != found:
            raise CheckpointError(
                f"{self._names[index]} has {_short(found)} where rank {who} reads it, and "
                f"{_short(before)} where rank {by} does: is it the same file on all machines?"
            )

    def _pace(self, _: int) -> None:
        if self._stopped:
            raise CancelledError(f"sharing the {self._stage} was stopped")


def _short(found: Json) -> str:
    """What tells two findings apart, where that is the hash of a file."""
    digest = found.get("sha256") if isinstance(found, dict) else found
    return f"the hash {digest}"


_STAGE = "files"


def lead_reading(
    session: Session, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
) -> Mapping[str, Json]:
    """Let all ranks read the files, and return what was found; see `ReadFiles`.

    Raises:
        CovmergeError: as a rank raises over a file.
    """
    session.open_stage(_STAGE, {"sizes": sizes, "look": file_check.as_json()})
    return _share(session, sizes, file_check, base)


def help_reading(session: Session, store: Store, base: Checkpoint) -> None:
    """Wait for the one that leads to have all files of the store written, and read a share of them.

    Raises:
        LeaderGoneError: it is all over.
        CovmergeError: as a rank raises over a file.
    """
    fields = cast("Mapping[str, Any]", session.stage(_STAGE))
    _share(session, fields["sizes"], WeightsCheck.from_json(store, fields["look"]), base)


def _share(
    session: Session, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
) -> Mapping[str, Json]:
    threads = files_at_once(len(sizes), session.rank.local)

    def do(name: str, _: Pace) -> Json:
        return file_check(base, name)

    with Sharing[Json](session, _STAGE, sizes, do, file_check.check, threads) as sharing:
        return sharing.all_found()


_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class SharedHashing(Sharing[str]):
    """Hashes of which each rank takes its share, while all merge; see `Sharing`.

    What costs no reading (commits, versions) the one that leads looks at itself, in the end.
    """

    def __init__(self, session: Session, contents: Contents) -> None:
        self._contents = contents
        self._shared = {f"{key} {one.name}": (key, one) for key, one in to_share(contents)}
        sizes = {name: content.size for name, (_, content) in self._shared.items()}
        # As many for each machine as one process alone has.
        threads = max(1, len(contents) // max(1, session.rank.local))
        super().__init__(session, "hashes", sizes, self._hash, _checked, threads)

    def follow(self, share: float) -> None:
        """See `Hashing`; ranks do not wait for their readers, as they come to files in any order."""

    def result(self) -> Hashes:
        hashes = self.all_found()
        found = {(key, one.name): hashes[name] for name, (key, one) in self._shared.items()}
        return in_order(self._contents, found)

    def _hash(self, name: str, pace: Pace) -> str:
        _, content = self._shared[name]
        return content.hash(pace)


def _checked(name: str, found: Json) -> str:
    """The hash that another rank has found."""
    if not isinstance(found, str) or not _HASH.fullmatch(found):
        raise ValueError("it is no hash")
    return found
