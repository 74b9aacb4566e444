"""Run a search: choose values, merge several recipes at once, score each model, write the best one."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from covmerge.base.errors import CheckFailed, CovmergeError, InputError, RecipeError, ResourceError
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.files.checkpoints.manifest import read_manifest
from covmerge.files.checkpoints.staging import Staging, check_not_input, remove_remains
from covmerge.files.stores.address import address_of, hub_address, local_path
from covmerge.files.stores.disk import replace_file
from covmerge.files.stores.lock import Lock, TakenError
from covmerge.plan.recipe import Recipe, dump_recipe
from covmerge.plan.recipe.search import Template
from covmerge.run.engine.options import RunOptions
from covmerge.run.scoring.job import NO_PROGRESS, Outcome, ScoreProgress, check_scorers, outcomes
from covmerge.run.scoring.scorer import Scorer
from covmerge.run.search.result import Search, unlike
from covmerge.run.search.trials import RECORD, SAMPLERS, Asked, Trial, Trials
from covmerge.run.sources import open_recipe
from covmerge.run.together import Together

CSV_NAME, BEST_RECIPE, BEST_MODEL, FRONT = "trials.csv", "best.yml", "best", "front"
_WORK = ".trials"


@dataclass(frozen=True)
class SearchJob:
    """A search as `covmerge.search` runs it: a recipe with marks, a scorer, and the search's options."""

    template: Template
    scorer: Scorer
    out: Path
    trials: int = 60
    objectives: Sequence[str] = ()
    sampler: str = "tpe"
    seed: int = 0
    together: int = 4
    scorers: int = 1
    all_examples: bool = False
    scoring: ScoreProgress = NO_PROGRESS
    options: RunOptions = field(default_factory=RunOptions)

    def run(self) -> Search:
        """Search, and write the best model to `out`."""
        self._check()
        first = self.template.recipe({mark.name: mark.ends[0] for mark in self.template.marks})
        with open_recipe(first) as checkpoints, self._alone() as work:
            check_not_input(self.out, checkpoints.paths())
            merges = Together(checkpoints, replace(self.options, progress=None))
            self._check_ends(merges)
            new = not (self.out / RECORD).exists()
            with closing(self._trials(checkpoints.identity())) as trials:
                state = _State(self, trials, merges, work)
                try:
                    state.search()
                except CovmergeError:
                    if new and trials.untuned is None and not trials.finished:
                        # Nothing was scored, so the search can start again, even with another scorer.
                        (self.out / RECORD).unlink()
                    raise
                finally:
                    self.scoring.finish()
                return state.written()

    def _check(self) -> None:
        for name, value in (("trials", self.trials), ("together", self.together)):
            if value < 1:
                raise InputError(f"{Hint(name, value)}: give 1 or more")
        if self.sampler not in SAMPLERS:
            raise InputError(
                f"{Hint('sampler')}: '{self.sampler}' is none of {', '.join(SAMPLERS)}"
            )
        self.scorer.check()
        check_scorers(self.scorer, self.scorers)
        if self.scorers > self.together:
            raise InputError(
                f"{Hint('scorers', self.scorers)}: {self.together} models are there at once: pass "
                f"{Hint('together', self.scorers)} too"
            )
        local_path(self.out)
        if "?" in str(self.out):
            raise InputError(f"{self.out}: SQLite takes no name with ? in it: name another folder")
        there = self.out / RECORD
        if there.exists() and not self.options.resume:
            raise InputError(
                f"{self.out} holds a search already: pass {Hint('resume')} to go on with it, or name "
                "another folder"
            )
        if self.options.resume and not there.is_file():
            raise InputError(
                f"{self.out} holds no search to go on with: leave out {Hint('resume')}"
            )
        held = {path.name for path in self.out.iterdir()} if self.out.is_dir() else set[str]()
        if held - {RECORD, _WORK} and not there.exists():
            raise InputError(f"{self.out} is not empty, and holds no search: name another folder")

    @contextmanager
    def _alone(self) -> Generator[Path]:
        """Lock the output folder for this process, and remove the trials' models at the end."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.out / _WORK)
        except TakenError:
            raise InputError(
                f"another process searches in {self.out}: wait for it, or name another folder"
            ) from None
        except OSError as error:
            raise InputError(f"{self.out} cannot be written to: {error.strerror}") from error
        try:
            yield self.out / _WORK
        finally:
            lock.remove_folder()

    def _trials(self, sources: Json) -> Trials:
        """Open the record of trials, and raise if it belongs to another search."""
        said: dict[str, Json] = {
            "recipe": _hash(self.template.data),
            "sources": _hash(sources),
            "scorer": self.scorer.key,
            "objectives": list(self.objectives),
            "sampler": self.sampler,
            "seed": self.seed,
            "all_examples": self.all_examples,
        }
        trials = Trials(
            self.out, self.template, max(1, len(self.objectives)), self.sampler, self.seed
        )
        if trials.said is None:
            trials.say(said)
        elif differing := [key for key, value in said.items() if trials.said.get(key) != value]:
            raise RecipeError(
                f"{self.out} holds a search with other {' and '.join(differing)}: name another folder"
            )
        try:
            trials.replay()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.out / RECORD} has trials that are not of covmerge: name another folder"
            ) from error
        return trials

    def _check_ends(self, merges: Together) -> None:
        """Plan merges at the ends and choices of all marks, to find invalid values before any trial."""
        marks, template = self.template.marks, self.template
        lowest = {mark.name: mark.ends[0] for mark in marks}
        try:
            for place in (0, -1):
                merges.check(template.recipe({mark.name: mark.ends[place] for mark in marks}))
            if not any(mark.choices for mark in marks):
                return
        except ResourceError:
            raise
        except InputError:
            pass  # the loop below finds the wrong value
        for mark in marks:
            for end in mark.ends:
                chosen = template.applying(mark, lowest | {mark.name: end})
                try:
                    merges.check(template.recipe(chosen))
                except InputError as error:
                    where = template.origin.where(mark.place)
                    raise RecipeError(f"{where}: {mark.name} at {end}: {error}") from error


class _State:
    def __init__(self, job: SearchJob, trials: Trials, merges: Together, work: Path) -> None:
        self._job, self._trials, self._merges, self._work = job, trials, merges, work
        self._notes = list(job.template.notes)

    def search(self) -> None:
        """Score the untuned merge first, then run the trials."""
        job, trials = self._job, self._trials
        untuned = self._untuned()
        new = untuned is not None and trials.untuned is None
        job.scoring.start(max(0, job.trials - len(trials.finished)) + new)
        if untuned is not None and new:
            (found,) = self._tried([(None, {}, untuned)])
            why = found.failed or unlike(found.scores or {}, found.scores or {})
            if why:
                raise CheckFailed(f"the merge without a search has no score: {why}")
            trials.add_untuned(found)
        self._check_objectives()
        while (left := job.trials - len(trials.finished)) > 0:
            self._batch(trials.ask(min(left, job.together))[:left])
        if not any(trial.scores for trial in trials.finished):
            raise CheckFailed(f"no trial has a score. The first: {trials.finished[0].failed}")

    def written(self) -> Search:
        """Write the table, and the best recipe with its model or the recipes of the Pareto front."""
        job, found = self._job, self._found()
        replace_file(job.out / CSV_NAME, found.table().csv())
        if found.best is not None:
            recipe = job.template.recipe(found.best.chosen)
            replace_file(job.out / BEST_RECIPE, _as_file(recipe))
            self._write_best(recipe)
        elif found.front:
            (job.out / FRONT).mkdir(exist_ok=True)
            for trial in found.front:
                text = _as_file(job.template.recipe(trial.chosen))
                replace_file(job.out / FRONT / f"trial-{trial.number}.yml", text)
        return found

    def _untuned(self) -> Recipe | None:
        recipe = self._job.template.untuned()
        try:
            self._merges.check(recipe)
        except ResourceError:
            raise
        except InputError as error:
            self._notes.append(f"the default method has no merge to compare with: {error}")
            return None
        return recipe

    def _check_objectives(self) -> None:
        """Raise if an objective is no task of the scorer; this is known after the first score."""
        found = self._found()
        for name in self._job.objectives:
            if found.seen.rows and name not in found.seen.columns:
                known = ", ".join(found.seen.columns)
                raise RecipeError(f"{Hint('objectives', [name])}: the scorer gives {known}")

    def _batch(self, asked: Sequence[Asked]) -> None:
        template = self._job.template
        work = [(one.number, one.chosen, template.recipe(one.chosen)) for one in asked]
        for one, trial in zip(asked, self._tried(work), strict=True):
            if trial.scores and (why := unlike(trial.scores, self._found(trial).first)):
                trial = replace(trial, scores=None, failed=why)
            self._trials.tell(one, trial, self._found(trial).values(trial))

    def _tried(self, work: Sequence[tuple[int | None, Any, Recipe]]) -> Generator[Trial]:
        """Merge all recipes, then score the models and yield a trial for each."""
        started = time.perf_counter()
        folders = [self._work / ("untuned" if n is None else str(n)) for n, _, _ in work]
        failed = self._merged(
            [(recipe, f) for (_, _, recipe), f in zip(work, folders, strict=True)]
        )
        share = (time.perf_counter() - started) / len(work)
        merged = [f for f, why in zip(folders, failed, strict=True) if why is None]
        scored = outcomes(self._job.scorer, merged, self._job.scorers)
        progress = self._job.scoring
        for (number, chosen, _), folder, why in zip(work, folders, failed, strict=True):
            trial = Trial(number, chosen, None, why, share)
            progress.begin(trial.label)
            one = Outcome(None, why, 0.0) if why is not None else next(scored)
            shutil.rmtree(folder, ignore_errors=True)
            progress.advance()
            yield replace(trial, scores=one.scores, failed=one.failed, seconds=share + one.seconds)

    def _merged(self, work: Sequence[tuple[Recipe, Path]]) -> list[str | None]:
        """Merge in one reading, or each alone if that fails; return an error or None for each merge."""
        for _, folder in work:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            self._merges.write(work)
        except ResourceError:
            raise
        except CovmergeError as error:
            if len(work) == 1:
                return [str(error)]
            return [why for one in work for why in self._merged([one])]
        return [None] * len(work)

    def _found(self, *more: Trial) -> Search:
        job, trials = self._job, (*self._trials.finished, *more)
        untuned = self._trials.untuned
        name, asked = job.scorer.name, tuple(job.objectives)
        notes = tuple(self._notes)
        return Search(job.out, name, asked, trials, untuned, not job.all_examples, notes)

    def _write_best(self, recipe: Recipe) -> None:
        """Merge the best recipe, unless its model is already in the folder."""
        out = self._job.out / BEST_MODEL
        if out.exists() and read_manifest(out)["recipe"] == dump_recipe(recipe):
            remove_remains(out)
            return
        with Staging(out, overwrite=True) as staging:
            self._merges.write([(recipe, staging.folder)])
            staging.commit()


def _as_file(recipe: Recipe) -> str:
    """Return a recipe as the text of a file, with absolute paths so that the file can be moved."""
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    if data["base"] is not None:
        data["base"] = _absolute(data["base"])
    for expert in data["experts"].values():
        expert |= {key: _absolute(expert[key]) for key in ("source", "statistics") if key in expert}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _absolute(source: str) -> str:
    if hub_address(source) is not None or address_of(source) is not None:
        return source
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
