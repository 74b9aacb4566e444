"""Carry out plans over open checkpoints, with a memory plan and the options of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from covmerge.files.checkpoints.journal import Journal
from covmerge.plan.planning.types import Plan
from covmerge.run.engine.budget import MemoryPlan
from covmerge.run.engine.executor import Executor
from covmerge.run.engine.hashing import Contents, Hashes
from covmerge.run.engine.layer import Context
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.run import RunResult, run
from covmerge.run.engine.thread_count import torch_threads
from covmerge.run.judgement.values import naming_lost
from covmerge.run.sources import OpenCheckpoints


@dataclass(frozen=True)
class Work:
    """Everything that a run needs before the first tensor is read: plans, checkpoints, memory, options."""

    plans: Sequence[Plan]
    checkpoints: OpenCheckpoints
    memory: MemoryPlan
    options: RunOptions

    @property
    def plan(self) -> Plan:
        """The plan of a run that has only one."""
        (plan,) = self.plans
        return plan

    @property
    def context(self) -> Context:
        """The settings that all work items share."""
        return Context(self.plans[0].compute_dtype, self.options.torch_device)

    def executor(self) -> Executor:
        """Return the executor that carries out the plans; the caller closes it."""
        return self.options.executor(self.memory, partial(self.checkpoints.opener, self.plans))

    def run(
        self,
        outputs: Sequence[Output],
        executor: Executor,
        contents: Contents,
        *,
        journal: Journal | None = None,
        compare: bool = False,
    ) -> tuple[list[RunResult], Hashes]:
        """Carry out the plans in one reading, and hash the sources at the same time."""
        self.checkpoints.check_ties(self.plans[0])
        with (
            naming_lost(self.checkpoints.experts),
            torch_threads(self.options.threads),
            executor.hashing(contents) as hashing,
        ):
            done = run(
                list(zip(self.plans, outputs, strict=True)),
                self.checkpoints.sources(),
                replace(self.context, compare=compare),
                executor=executor,
                progress=self.options.shown_progress,
                journal=journal,
                follow=hashing.follow,
            )
            return done, hashing.result()
