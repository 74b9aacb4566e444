"""The part of one rank in a merge that several processes share: one leads, the others help."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.settings import Hint
from covmerge.files.checkpoints.journal import COMPUTED
from covmerge.files.checkpoints.manifest import read_manifest
from covmerge.files.checkpoints.staging import OutputTakenError
from covmerge.files.stores.destination import Destination
from covmerge.plan.recipe import differing, dump_recipe
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.ranks.executor import Ranks
from covmerge.run.engine.ranks.rank import Rank
from covmerge.run.engine.ranks.reading import help_reading
from covmerge.run.engine.ranks.session import Gathering, LeaderGoneError, Session
from covmerge.run.engine.run import run_part
from covmerge.run.engine.thread_count import torch_threads
from covmerge.run.export.files import open_output, plan_parts
from covmerge.run.result import MergedFolder, MergeResult, RunFigures, Stats
from covmerge.run.work import Work

_FOLDER = "ranks"
# Longest wait, in seconds, for an output whose work folder has gone: NFS may show old content so long.
_SHOWN_AFTER = 60.0
_STATS = ("totals", "heads", "rescalers", "tensors")

# A function that does the merge as the leader; the flag says whether it takes over. It returns None
# if there is nothing to take over.
Lead = Callable[[Gathering, bool], MergeResult | None]


@dataclass(frozen=True)
class RankJob:
    """A rank's part in a merge; `before` is what was at the output's place when this rank began."""

    work: Work
    out: Destination
    before: object | None
    rank: Rank

    def run(self, lead: Lead) -> MergeResult:
        """Lead, or help the leader until the output is published; take over from a leader that has gone.

        Raises:
            InputError: no rank leads, the others' work is not visible here, or this rank leads and its
                merge fails.
        """
        self.work.checkpoints.check_versions()
        gathering = self._gathering()
        taking_over = False
        leads = self.rank.number == 0
        if not leads and self._was_there():
            return self._published(0)
        patience, batches = self.work.options.patience, 0
        while True:
            if leads:
                try:
                    if (result := lead(gathering, taking_over)) is not None:
                        return result
                except OutputTakenError:  # this rank was started again, or another took over
                    pass
                except InputError:
                    if not (taking_over and self._is_published()):
                        raise
            sources = {**self.work.checkpoints.identity(), COMPUTED: self.work.options.computed()}
            digest = self.work.plan.digest(sources)
            try:
                joined = gathering.join(digest, self._is_published, patience)
            except InputError:
                if self.before is not None and self._is_of_this_recipe():
                    return self._published(batches)  # it was replaced before this rank came
                raise
            if joined is None:
                return self._published(batches)
            session, threads = joined
            batches += self._help(session, threads)
            gathering.leave(session)
            # A session that never had a leader is left from a killed merge: the user decides
            # whether to continue it.
            leads = taking_over = session.was_led or self.work.options.resume
            patience = min(patience, _SHOWN_AFTER)

    def _gathering(self) -> Gathering:
        return Gathering(self.out.aside / _FOLDER, self.rank, self.work.options.patience)

    def _help(self, session: Session, threads: int) -> int:
        """Do work until the session is over; return how many items were done here."""
        self.work.checkpoints.materialize(leads=False)
        with (
            closing(Ranks(self.work.executor(), session)) as executor,
            suppress(LeaderGoneError),
            session,
        ):
            output = self._opened(session)
            with executor.hashing(self.work.checkpoints.contents()) as hashing:
                with torch_threads(threads):
                    run_part(
                        self.work.plan,
                        output,
                        self.work.checkpoints.sources(),
                        self.work.context,
                        executor=executor,
                    )
                hashing.result()
            help_reading(session, self.out.work, self.work.checkpoints.base)
            while True:
                session.wait()
        return executor.done_here

    def _opened(self, session: Session) -> Output:
        """Return the output's files, which the leader has created."""
        while True:
            try:
                return open_output(self.out.work, plan_parts(self.work.plan), made=True)
            except CheckpointError:
                session.check()
                if session.was_led:
                    raise
            session.wait()

    def _is_published(self) -> bool:
        return self.out.occupant() not in (None, self.before)

    def _was_there(self) -> bool:
        """Return whether the other ranks had finished before this rank started."""
        if self.before is None or self.work.options.overwrite:
            return False
        if not self._is_of_this_recipe():
            raise InputError(
                f"the output {self.out} exists and is of another recipe: pass {Hint('overwrite')} to "
                "replace it, or choose another name"
            )
        return True

    def _is_of_this_recipe(self) -> bool:
        try:
            manifest = read_manifest(self.out.output)
        except InputError:
            return False
        return not differing(manifest["recipe"], dump_recipe(self.work.plan.recipe))

    def _published(self, batches: int) -> MergeResult:
        """Return the result of a merge that another rank has finished."""
        if not batches and not self.out.is_made_here():
            raise InputError(
                f"{self.rank} did nothing: {self.out} is there, and nothing was seen of the work on it in "
                f"{self.out.aside}. Ranks share an output on a URL through the folder "
                "COVMERGE_CACHE: set it to one that all machines see, the same on each"
            )
        manifest: dict[str, Any] = read_manifest(self.out.output)
        items = len(self.work.plan.items)
        return MergedFolder(
            path=self.out.output.folder,
            recipe=self.work.plan.recipe,
            stats=cast("Stats", {key: manifest[key] for key in _STATS if key in manifest}),
            run=cast("RunFigures", {"items": items, "own_items": batches}),
            verification=None,
            notes=(
                f"{self.rank}: {batches} of {items} items were done here, and another rank has published",
            ),
        )
