"""One merge, from open checkpoints to a verified result: tensors in memory, or files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from covmerge.base.code import own_version
from covmerge.base.errors import InputError
from covmerge.base.findings import Fit
from covmerge.base.text import shown, some
from covmerge.files.checkpoints.base import fingerprint
from covmerge.files.checkpoints.journal import COMPUTED, ORDER, PROCESSOR, THREADS, Journal
from covmerge.files.checkpoints.manifest import NOT_KNOWN
from covmerge.files.checkpoints.staging import Staging, check_not_input, destination_of
from covmerge.files.stores.destination import Destination
from covmerge.front.rank_job import RankJob
from covmerge.maths.linalg.masks import unpack
from covmerge.plan.planning.forms import MODEL, Place, head_part, mask_part
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Recipe, dump_recipe
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import MemoryOutput, room_for
from covmerge.run.engine.ranks.executor import Ranks
from covmerge.run.engine.ranks.rank import Rank
from covmerge.run.engine.ranks.session import Gathering
from covmerge.run.engine.run import RunResult
from covmerge.run.judgement.judge import check_fit
from covmerge.run.output import OutputFiles, merge_stats, run_figures
from covmerge.run.result import MergedFolder, MergedTensors, MergeResult
from covmerge.run.sources import OpenCheckpoints
from covmerge.run.work import Work

# A merge in memory that is written afterwards, as a merge to disk would have written it.

_UNKNOWN = {"tensors": f"{NOT_KNOWN}: they were in memory"}


class Saver:
    """A writer of the result of a merge in memory, whose sources may be closed."""

    def __init__(
        self,
        work: Work,
        done: RunResult,
        fit: Fit,
        parts: Mapping[str, Mapping[str, Tensor]],
        given: Mapping[str, Tensor],
    ) -> None:
        """Record the merged tensors by part and name, and those of the result, which may be replaced."""
        self._work, self._done, self._fit = work, done, fit
        self._parts, self._given = parts, given
        self._merged, self._versions = dict(given), self._written()
        _ = work.checkpoints.parents, work.checkpoints.companions  # read now, for they may change

    def __call__(self, out: Path, *, overwrite: bool) -> MergedFolder:
        """Write the files of a merge to disk, and verify them.

        Raises:
            InputError: the folder may not be written, or a source or a tensor changed since the merge.
            CheckFailed: the output failed its verification.
        """
        target = destination_of(out)
        check_not_input(target, self._work.checkpoints.paths())
        if changed := self._changed():
            raise InputError(
                f"{some(changed, 3, quoted=True)} changed since the merge: merge again, or write the "
                "tensors yourself"
            )
        plan, checkpoints = self._work.plan, self._work.checkpoints
        if plan.masked and checkpoints.base.is_held:
            raise InputError(
                "masks are written with what tells their base from others, and the base was in memory: "
                "merge with out=FOLDER"
            )
        with Staging(target, overwrite=overwrite) as staging:
            files = OutputFiles(staging.store, plan, checkpoints)
            for part, headers in plan.parts.items():
                for header in headers:
                    tensor = self._parts[part][header.name]
                    stored = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    files.output.write([Place(part, header)], [stored])
            # Tensors in memory may have changed, so they have no hashes.
            hashes = {
                key: _UNKNOWN if one.is_held else fingerprint(one) for key, one in checkpoints.all()
            }
            result = files.finish(
                self._done,
                checkpoints.recorded(hashes),
                self._work.memory,
                target.output,
                fit=self._fit,
                compared=not checkpoints.base.is_held,
            )
            staging.commit()
        return result

    def _changed(self) -> list[str]:
        """Return the tensors that were written to, replaced, added or removed since the merge."""
        now = self._written()
        written = [key[1] for key, count in self._versions.items() if now[key] != count]
        merged, given = self._merged, self._given
        return written + [n for n in {**merged, **given} if merged.get(n) is not given.get(n)]

    def _written(self) -> Mapping[tuple[str, str], int | None]:
        """Return how often each tensor was written to, by torch's count; None if torch does not count."""
        return {
            (part, name): None if tensor.is_inference() else tensor._version
            for part, tensors in self._parts.items()
            for name, tensor in tensors.items()
        }


@dataclass(frozen=True)
class Job:
    """A recipe, the place of its output (None: tensors in memory), and the options."""

    recipe: Recipe
    out: Destination | None
    options: RunOptions = field(default_factory=RunOptions)

    def run(self, checkpoints: OpenCheckpoints) -> MergeResult:
        """Plan the merge, then merge to tensors in memory or to `out`."""
        if self.out is None and self.recipe.output.format == "adapter":
            raise InputError("an adapter is written to a folder: give an output folder")
        if self.out is None and self.recipe.output.quantise != "none":
            raise InputError("a quantised model is written to a folder: give an output folder")
        if self.out is None:
            self.options.check_in_memory()
        before = None
        if self.out is not None:  # before the base is run
            if self.options.rank is not None or self.options.cluster is not None:
                self.out.share()
            check_not_input(self.out, checkpoints.paths())
            before = self.out.occupant()
            if not self._helps:
                Staging(
                    self.out, overwrite=self.options.overwrite, resume=self.options.resume
                ).check()
        (plan,), checkpoints = checkpoints.plans([self.recipe])
        # A merge in memory holds its whole output in addition to the workspace.
        memory = self.options.memory([plan], held=plan.write_bytes if self.out is None else 0)
        work = Work([plan], checkpoints, memory, self.options)
        if self.out is None:
            if self.options.rank is not None:
                raise InputError("ranks share a merge to a folder: give an output folder")
            return self._to_memory(work)
        if self.options.rank is not None:
            return self._among_ranks(work, self.out, before, self.options.rank)
        return self._to_files(work, self.out)

    @property
    def _helps(self) -> bool:
        """Whether this process only helps another process that makes the output."""
        return self.options.rank is not None and self.options.rank.number > 0

    def _to_memory(self, work: Work) -> MergedTensors:
        plan = work.plan
        work.checkpoints.materialize()
        output = MemoryOutput(plan.parts)
        with closing(work.executor()) as executor:
            (done,), _ = work.run([output], executor, {})
        fit = check_fit(plan, done.items, work.checkpoints, written=False)
        stats, account = merge_stats(plan, done.items)
        shapes = {tensor.name: tensor.output.shape for tensor in plan.tensors}
        found, base = output.tensors, work.checkpoints.base
        # The given names also of tied tensors; files have a tied tensor once.
        tied: Mapping[str, str] = plan.tied[None] if base.is_held else {}
        tensors = _whole_model(plan, found)
        tensors |= {n: tensors[name] for n, name in tied.items() if name in tensors}
        return MergedTensors(
            tensors=tensors,
            saver=Saver(work, done, fit, found, tensors),
            heads={expert: found[head_part(expert)] for expert in plan.heads},
            recipe=plan.recipe,
            stats=stats,
            run=run_figures(done, work.memory),
            timeline=done.spans,
            diagnostics=account.rows,
            notes=(*plan.notes, *account.notes, *fit.notes),
            warnings=(*fit.warnings, *account.warnings),
            masks={
                expert: {name: unpack(bits, shapes[name]) for name, bits in found[part].items()}
                for expert in plan.recipe.experts
                if (part := mask_part(expert)) in found
            },
        )

    def _among_ranks(
        self, work: Work, out: Destination, before: object | None, rank: Rank
    ) -> MergeResult:
        """Do a part of the merge, or lead the processes that do."""

        def lead(gathering: Gathering, taking_over: bool) -> MergeResult | None:
            resume = self.options.resume or taking_over
            try:
                job = replace(self, options=replace(self.options, resume=resume))
                return job._to_files(work, out, gathering, must_resume=taking_over)
            except _NothingBegunError:
                return None

        return RankJob(work, out, before, rank).run(lead)

    def _to_files(
        self,
        work: Work,
        out: Destination,
        gathering: Gathering | None = None,
        *,
        must_resume: bool = False,
    ) -> MergeResult:
        options = self.options
        if not (options.resume or options.overwrite):
            # This check comes before any download. The space that an earlier output takes may
            # become free for this merge; the writer reserves its space in any case.
            room_for([work.plan], out.work.folder).check()
        with ExitStack() as stack:
            staging = stack.enter_context(
                Staging(out, overwrite=options.overwrite, resume=options.resume)
            )
            if must_resume and not staging.resuming:
                raise _NothingBegunError
            if staging.resuming:
                work.checkpoints.check_resumable()
            session = None if gathering is None else stack.enter_context(gathering.lead())
            work.checkpoints.materialize()
            sources = {**work.checkpoints.identity(), COMPUTED: options.computed()}
            # The other ranks use the leader's number of threads, so only its own journal records it.
            identity = {**sources, THREADS: options.threads_for(work.plan)}
            fields = {
                "covmerge": own_version(),
                "torch": torch.__version__,
                "recipe": dump_recipe(work.plan.recipe),
                ORDER: list(work.plan.recipe.experts),
                **identity,
                PROCESSOR: options.processor,
            }
            # If the journal belongs to another plan, an error is raised and the earlier work stays.
            # Any error after this point removes the work.
            begin = Journal.resume if staging.resuming else Journal.create
            journal = begin(staging.journal, work.plan.digest(identity), fields)
            if journal.processor not in (None, options.processor):
                staging.notes.append(
                    f"the merge was begun on another processor ({shown(journal.processor)}; this one is "
                    f"{options.processor}), so the last bits of its sums may be those of either"
                )
            for entry in () if gathering is None else gathering.earlier():
                journal.append(entry)
            try:
                files = OutputFiles(staging.store, work.plan, work.checkpoints)
                if session is not None:
                    session.begin(
                        work.plan.digest(sources), options.threads or torch.get_num_threads()
                    )
                inner = work.executor()
                with closing(inner if session is None else Ranks(inner, session)) as executor:
                    (done,), hashes = work.run(
                        [files.output], executor, work.checkpoints.contents(), journal=journal
                    )
                    fit = check_fit(work.plan, done.items, work.checkpoints)
                    result = files.finish(
                        done,
                        work.checkpoints.recorded(hashes),
                        work.memory,
                        out.output,
                        fit=fit,
                        read=executor.read_files,
                    )
            except Exception:  # any error; Ctrl-C is no Exception, and keeps the work
                staging.discard()
                raise
            staging.commit()
        return replace(result, notes=(*result.notes, *staging.notes))


def _whole_model(plan: Plan, found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a model and of its modules, by their names in the whole model."""
    return dict(found.get(MODEL, {})) | {
        f"{module.prefix}{name}": tensor
        for part, module in plan.modules.items()
        for name, tensor in found[part].items()
    }


class _NothingBegunError(Exception):
    """Another process left no work that could be continued."""
