"""Run several merges of the same checkpoints, as many in one reading as fit into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from covmerge.base.errors import ResourceError
from covmerge.base.types import Json
from covmerge.files.stores.local import LocalFolder
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import Recipe
from covmerge.run.comparison import SHARED_COPIES
from covmerge.run.engine.hashing import Contents
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import room_for
from covmerge.run.judgement.judge import check_fit
from covmerge.run.output import OutputFiles
from covmerge.run.result import MergeResult
from covmerge.run.sources import OpenCheckpoints
from covmerge.run.work import Work


@dataclass
class Together:
    """A runner of several merges of the same checkpoints."""

    checkpoints: OpenCheckpoints
    options: RunOptions
    _recorded: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def check(self, recipe: Recipe) -> None:
        """Plan a merge, and raise if it does not fit into memory."""
        plan, _ = self.checkpoints.plan(recipe)
        self.options.memory([plan])

    def write(self, work: Sequence[tuple[Recipe, Path]]) -> dict[Path, MergeResult]:
        """Merge each recipe to its folder, as many in one reading as fit into memory.

        Raises:
            InputError: for the reasons of a single merge. Unfinished folders are not removed.
            CheckFailed: a model failed its verification.
        """
        plans, checkpoints = self.checkpoints.plans([recipe for recipe, _ in work])
        alike: dict[object, list[tuple[Plan, Path]]] = {}
        for plan, (_, folder) in zip(plans, work, strict=True):
            alike.setdefault(_read_of(plan), []).append((plan, folder))
        if len(alike) == 1:
            (together,) = alike.values()
            return self._write(together, checkpoints)
        # Plans can read different tensors, as an expert of weight 0 is not read.
        recipes = {folder: recipe for recipe, folder in work}
        parts = [[(recipes[folder], folder) for _, folder in part] for part in alike.values()]
        return {folder: found for part in parts for folder, found in self.write(part).items()}

    def _write(
        self, work: Sequence[tuple[Plan, Path]], checkpoints: OpenCheckpoints
    ) -> dict[Path, MergeResult]:
        plans = [plan for plan, _ in work]
        try:
            # Methods share the spectra of the weighted sum; each choice of weights has its own.
            weights = {repr([e.weight for e in plan.recipe.experts.values()]) for plan in plans}
            shared = SHARED_COPIES * len(weights) if len(plans) > 1 else 0
            memory = self.options.memory(plans, shared=shared)
        except ResourceError:
            if len(work) == 1:
                raise
            half = len(work) // 2
            halves = [
                [(p.recipe, folder) for p, folder in part] for part in (work[:half], work[half:])
            ]
            return {folder: one for part in halves for folder, one in self.write(part).items()}
        room_for(plans, work[0][1].parent).check()
        checkpoints.materialize()
        files = [OutputFiles(LocalFolder(folder), plan, checkpoints) for plan, folder in work]
        outputs = [file.output for file in files]
        # The sources are hashed only once, in the first reading.
        contents: Contents = {} if self._recorded else checkpoints.contents()
        together = Work(plans, checkpoints, memory, self.options)
        with closing(together.executor()) as executor:
            done, hashes = together.run(outputs, executor, contents)
        self._recorded = self._recorded or checkpoints.recorded(hashes)
        results: dict[Path, MergeResult] = {}
        for (plan, folder), file, found in zip(work, files, done, strict=True):
            fit = check_fit(plan, found.items, checkpoints)
            results[folder] = file.finish(
                found, self._recorded, memory, LocalFolder(folder), fit=fit, may_equal_base=True
            )
        return results


def _read_of(plan: Plan) -> tuple[object, ...]:
    """Return the tensors and rows that a plan reads; only plans that read the same share a reading."""
    return tuple(
        tuple((o.source, o.tensor, o.rows) for o in tensor.operands.values())
        for tensor in plan.tensors
    )
