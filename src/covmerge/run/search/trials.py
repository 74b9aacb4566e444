"""Choose the next trials by Optuna, and record the finished ones.

The sampler works on a study in memory. Finished trials are added to a second study, in a file. When a
search resumes, the sampler is told the file's trials again, one after the other. So the sampler's state,
which Optuna would pickle, is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isclose
from pathlib import Path
from typing import Any, Literal, get_args

from covmerge.base.errors import InputError, RecipeError
from covmerge.base.settings import Hint
from covmerge.base.types import Json
from covmerge.plan.recipe.search import Mark, Template, Value
from covmerge.run.scoring.values import Scores, score_of

Sampler = Literal["tpe", "cmaes", "random"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)
RECORD = "search.db"
_STUDY = "covmerge"
_SAID, _UNTUNED, _TOGETHER = "covmerge", "untuned", "asked_together"


@dataclass(frozen=True)
class Trial:
    """One choice of values, and its scores.

    Attributes:
        number: number of the trial, from 0; None for the untuned merge.
        chosen: values by the names of the marks.
        scores: scores by task; None if the trial could not be merged or scored.
        failed: why the trial has no scores; None if it has.
        seconds: time of merging and scoring; trials that were merged together share the merge time equally.
    """

    number: int | None
    chosen: Mapping[str, Value]
    scores: Scores | None
    failed: str | None = None
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The name of the trial in tables."""
        return "no trial" if self.number is None else f"trial {self.number}"

    def as_json(self) -> dict[str, Json]:
        """Return the JSON that `_trial` reads; number and values are stored elsewhere."""
        found = self.scores or {}
        return {
            "scores": {task: score.as_json() for task, score in found.items()},
            "failed": self.failed,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Asked:
    """A choice of values that the sampler proposed and that has no scores yet."""

    number: int
    chosen: Mapping[str, Value]
    together: int
    handle: Any


class Trials:
    """The trials of a search, and the sampler that proposes the next ones.

    Raises:
        InputError: Optuna is not installed, or the file is no record of a search.
    """

    def __init__(
        self, folder: Path, template: Template, objectives: int, sampler: str, seed: int
    ) -> None:
        self._optuna = optuna = _optuna(sampler)
        self._template = template
        self._file = folder / RECORD
        if sampler == "cmaes" and any(mark.choices for mark in template.marks):
            chosen = next(mark.name for mark in template.marks if mark.choices)
            raise RecipeError(
                f"{chosen} has choices, and CMA-ES searches numbers alone: pass {Hint('sampler', 'tpe')}"
            )
        made = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
            "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=seed),
            "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        }
        directions = ["maximize"] * objectives
        self._sampling = optuna.create_study(directions=directions, sampler=made[sampler]())
        try:
            self._storage = optuna.storages.RDBStorage(f"sqlite:///{self._file}")
            self._record = optuna.create_study(
                study_name=_STUDY, storage=self._storage, directions=directions, load_if_exists=True
            )
            self._record.get_trials()
        except Exception as error:  # SQLAlchemy and Optuna raise many kinds
            said = str(error).partition("\n")[0]
            raise InputError(
                f"{self._file} is no record of a search ({said}): name another folder by {Hint('out')}"
            ) from error
        self.finished: list[Trial] = []
        self._waiting: list[Asked] = []

    def close(self) -> None:
        """Close the file."""
        self._storage.engine.dispose()

    @property
    def said(self) -> Any:
        """The settings of the search in the record; None if the record is new."""
        return self._record.user_attrs.get(_SAID)

    def say(self, search: Json) -> None:
        """Record the settings of the search."""
        self._record.set_user_attr(_SAID, search)

    @property
    def untuned(self) -> Trial | None:
        """The untuned merge (without a search); None if it was not scored."""
        found = self._record.user_attrs.get(_UNTUNED)
        return None if found is None else _trial(None, {}, found)

    def add_untuned(self, trial: Trial) -> None:
        """Record the untuned merge."""
        self._record.set_user_attr(_UNTUNED, trial.as_json())

    def replay(self) -> None:
        """Repeat the recorded trials with the sampler, so that it has the state it had before."""
        recorded = self._record.get_trials()
        for trial in recorded:
            # covmerge writes no system attributes; samplers would unpickle those of an untrusted file.
            trial.system_attrs = {}
        while len(self.finished) < len(recorded):
            for asked in self._asked(recorded[len(self.finished)].user_attrs[_TOGETHER]):
                if len(self.finished) == len(recorded):
                    self._waiting.append(asked)
                    continue
                found = recorded[len(self.finished)]
                if _equal(asked.chosen, found.params):
                    self._tell_sampler(asked, found.values)
                else:  # another version of Optuna, or another machine, may choose other values
                    self._tell_sampler(asked, None)
                    self._sampling.add_trial(found)
                self.finished.append(_trial(found.number, found.params, found.user_attrs))

    def ask(self, count: int) -> list[Asked]:
        """Return all unanswered choices of an earlier run; if there are none, `count` new choices."""
        waiting, self._waiting = self._waiting, []
        return waiting or self._asked(count)

    def tell(self, asked: Asked, trial: Trial, values: Sequence[float] | None) -> None:
        """Tell the sampler the objectives' values, None if the trial failed, and record the trial."""
        frozen = self._tell_sampler(asked, values)
        frozen.user_attrs = {**trial.as_json(), _TOGETHER: asked.together}
        frozen.system_attrs = {}
        self._record.add_trial(frozen)
        self.finished.append(trial)

    def _tell_sampler(self, asked: Asked, values: Sequence[float] | None) -> Any:
        if values is None:
            failed = self._optuna.trial.TrialState.FAIL
            return self._sampling.tell(asked.handle, state=failed)
        return self._sampling.tell(asked.handle, list(values))

    def _asked(self, count: int) -> list[Asked]:
        found: list[Asked] = []
        for place in range(count):
            handle, chosen = self._sampling.ask(), dict[str, Value]()
            for mark in self._template.marks:
                if self._template.applies(mark, chosen):
                    chosen[mark.name] = _suggested(handle, mark)
            found.append(Asked(len(self.finished) + place, chosen, count, handle))
        return found


def _suggested(handle: Any, mark: Mark) -> Value:
    if mark.choices:
        return handle.suggest_categorical(mark.name, mark.choices)
    if mark.whole:
        return handle.suggest_int(mark.name, int(mark.low), int(mark.high), log=mark.log)
    return handle.suggest_float(mark.name, mark.low, mark.high, log=mark.log)


def _trial(number: int | None, chosen: Mapping[str, Value], said: Mapping[str, Any]) -> Trial:
    scores = {str(task): score_of(score) for task, score in said["scores"].items()}
    return Trial(number, dict(chosen), scores or None, said["failed"], float(said["seconds"]))


def _equal(one: Mapping[str, Value], other: Mapping[str, Value]) -> bool:
    """Return whether two choices are equal, up to rounding differences between machines."""

    def alike(a: Value, b: Value) -> bool:
        if isinstance(a, float) and isinstance(b, float):
            return isclose(a, b, rel_tol=1e-9)
        return a == b

    return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)


def _optuna(sampler: str) -> Any:
    try:
        if sampler == "cmaes":
            import_module("cmaes")
        optuna = import_module("optuna")
    except ModuleNotFoundError as error:
        raise InputError(f"a search needs {error.name}: pip install covmerge[search]") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
