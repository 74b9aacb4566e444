"""Score several models, and save the scores."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Protocol

from covmerge.base.errors import CovmergeError, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.version import __version__
from covmerge.files.checkpoints.json_file import dumps, read_object
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, MAX_BYTES, read_comparison
from covmerge.files.stores.disk import replace_file
from covmerge.files.stores.regular_file import read_regular
from covmerge.run.scoring.scorer import Command, Scorer
from covmerge.run.scoring.table import CSV_NAME, LATEX_NAME, SCORES_NAME, Scored, ScoreTable
from covmerge.run.scoring.values import Scores, score_of

# Run a scorer on one model, or on several models at once.


@dataclass(frozen=True)
class Outcome:
    """The scores of a model, or why it has none."""

    scores: Scores | None
    failed: str | None
    seconds: float


def check_scorers(scorer: Scorer, scorers: int) -> None:
    """Raise if the scorer cannot score so many models at once."""
    if scorers < 1:
        raise InputError(f"{Hint('scorers', scorers)}: give 1 or more")
    if scorers > 1 and not isinstance(scorer, Command):
        raise InputError(
            f"{Hint('scorers', scorers)} is for commands, and {scorer.name} scores in this process, one "
            f"model after the other: leave out {Hint('scorers')}"
        )


def outcomes(scorer: Scorer, folders: Sequence[Path], scorers: int) -> Iterator[Outcome]:
    """Score models, `scorers` of them at once, and yield the outcome of each in order."""
    if scorers == 1:
        yield from map(partial(_outcome, scorer.score), folders)
        return
    assert isinstance(scorer, Command), "check_scorers refuses others"
    free, stopped = SimpleQueue[int](), Event()
    for number in range(scorers):
        free.put(number)

    def score(folder: Path) -> Outcome:
        number = free.get()
        try:
            return _outcome(partial(scorer.score, number=number, stopped=stopped), folder)
        finally:
            free.put(number)

    with ThreadPoolExecutor(scorers) as pool:
        try:
            yield from pool.map(score, folders)
        except BaseException:  # the pool waits for its threads, and one may be starting a command
            stopped.set()
            scorer.stop()
            raise


def _outcome(score: Callable[[Path], Scores], folder: Path) -> Outcome:
    started, scores, failed = time.perf_counter(), None, None
    try:
        scores = score(folder)
    except CovmergeError as error:
        failed = str(error)
    except Exception as error:  # code of evaluators and callers may raise anything
        failed = f"{type(error).__name__}: {error}"
    return Outcome(scores, failed, time.perf_counter() - started)


# Scores of earlier runs, saved in a file beside the models.

# The folder of a whole model has at least one of these files.
_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")
_MOST_VALUES = 30_000_000


@dataclass(frozen=True)
class Candidate:
    """A model to be scored."""

    label: str
    folder: Path
    hash: str  # covers all bytes of the model
    bound: bool = False  # whether it is the base or an expert


def candidates(
    out: Path, labels: Sequence[str], *, bounds: bool
) -> tuple[list[Candidate], list[str]]:
    """Return the models of a comparison to score, and notes on sources that cannot be scored.

    With `bounds`, the base and the experts come first.
    """
    found: list[Candidate] = []
    left_out: list[str] = []
    sources: Mapping[str, Any] = read_comparison(out)["sources"] if bounds else {}
    for label, source in sources.items():
        folder = Path(source["source"])
        if label.startswith("statistics "):
            continue
        if any((folder / name).is_file() for name in _OF_A_MODEL):
            content = json.dumps(source["content"], sort_keys=True).encode()
            found.append(Candidate(label, folder, _hash(content), bound=True))
        else:
            left_out.append(label)
    for label in labels:
        # The manifest has the hash of every file.
        content = read_regular(out / label / MANIFEST_NAME, MAX_BYTES)
        found.append(Candidate(label, out / label, _hash(content)))
    if not left_out:
        return found, []
    note = (
        f"not scored: {some(left_out)}. A scorer needs the folder of a whole model. Make one and score it "
        "by hand: merge an adapter into its base, put a file into a folder of its own as "
        "model.safetensors, or save a model in memory"
    )
    return found, [note]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class SavedScores:
    """Saved scores, by the model's hash and the scorer's key."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._entries = dict(entries or {})

    @classmethod
    def read(cls, path: Path) -> SavedScores:
        """Read a file of scores; without a file, there are no saved scores."""
        if not path.is_file():
            return cls()
        try:
            found = read_object(path, _MOST_VALUES, size=MAX_BYTES).get("scores")
            entries = {str(key): dict(entry) for key, entry in dict(found or {}).items()}
            for entry in entries.values():
                float(entry["seconds"])
                for stored in dict(entry["tasks"]).values():
                    score_of(stored)
        except (InputError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} holds no scores of covmerge: move it away") from error
        return cls(entries)

    def find(self, model: Candidate, key: str | None) -> tuple[Scores, float] | None:
        """Return a model's saved scores and the seconds that scoring took; None if none are saved."""
        entry = None if key is None else self._entries.get(_of(model, key))
        if entry is None:
            return None
        tasks = {name: score_of(stored) for name, stored in entry["tasks"].items()}
        return tasks, float(entry["seconds"])

    def add(
        self, model: Candidate, key: str | None, scorer: str, scores: Scores, seconds: float
    ) -> None:
        """Add the scores of a model, if the scorer's key is known."""
        if key is not None:
            self._entries[_of(model, key)] = {
                "label": model.label,
                "scorer": scorer,
                "seconds": round(seconds, 2),
                "tasks": {name: score.as_json() for name, score in scores.items()},
            }

    def write(self, path: Path) -> None:
        """Replace the file of scores."""
        content: dict[str, Any] = {"covmerge": __version__, "scores": self._entries}
        replace_file(path, dumps(content, what=path.name) + "\n")


def _of(model: Candidate, key: str) -> str:
    return _hash(f"{model.hash} {key}".encode())


class ScoreProgress(Protocol):
    """Receives the progress of scoring."""

    def start(self, total: int | None) -> None:
        """Report how many models will be scored."""

    def begin(self, label: str) -> None:
        """Report that scoring of a model begins."""

    def advance(self) -> None:
        """Report that a model was scored, or failed."""

    def finish(self) -> None:
        """Report that scoring has ended."""


class _NoProgress(ScoreProgress):
    """A progress receiver that shows nothing."""


NO_PROGRESS = _NoProgress()


def score_models(
    models: Sequence[Candidate],
    scorer: Scorer,
    folder: Path,
    saved: SavedScores,
    scorers: int = 1,
    progress: ScoreProgress = NO_PROGRESS,
) -> ScoreTable:
    """Score the models that have no saved scores, and write the table as CSV and LaTeX.

    If scoring of a model fails, the table lists the failure and the other models are still scored.
    Tables of an earlier run are removed first, as they have other scores. `scorers` models are scored at
    once.
    """
    for name in (CSV_NAME, LATEX_NAME):
        (folder / name).unlink(missing_ok=True)
    key, scored, failed = scorer.key, dict[str, Scored](), dict[str, str]()
    for model in models:
        found = saved.find(model, key)
        if found is not None:
            scored[model.label] = Scored(model.label, *found, kept=True, bound=model.bound)
    waiting = [model for model in models if model.label not in scored]
    progress.start(len(waiting))
    try:
        found = outcomes(scorer, [model.folder for model in waiting], scorers)
        for model in waiting:
            progress.begin(model.label)
            one = next(found)
            if one.scores is None:
                failed[model.label] = one.failed or ""
            else:
                scored[model.label] = Scored(
                    model.label, one.scores, one.seconds, bound=model.bound
                )
                saved.add(model, key, scorer.name, one.scores, one.seconds)
                saved.write(folder / SCORES_NAME)
            progress.advance()
    finally:
        progress.finish()
    saved.write(folder / SCORES_NAME)
    rows = tuple(scored[m.label] for m in models if m.label in scored)
    table = ScoreTable(scorer.name, rows, failed)
    if rows:
        replace_file(folder / CSV_NAME, table.table().csv())
        replace_file(folder / LATEX_NAME, table.latex())
    return table
