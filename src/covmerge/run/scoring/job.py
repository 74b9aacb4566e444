"""Score several models, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from covmerge.base.errors import CovmergeError
from covmerge.files.stores.disk import replace_file
from covmerge.run.scoring.saved_scores import SCORES_NAME, Candidate, SavedScores
from covmerge.run.scoring.scorer import Scorer
from covmerge.run.scoring.table import CSV_NAME, LATEX_NAME, Scored, ScoreTable


class ScoreProgress(Protocol):
    """Receives the progress of scoring."""

    def start(self, total: int | None) -> None:
        """So many models are to be scored."""

    def begin(self, label: str) -> None:
        """A model is being scored."""

    def advance(self) -> None:
        """It is scored, or could not be."""

    def finish(self) -> None:
        """All are."""


@dataclass(frozen=True)
class ScoreJob:
    """Models, a scorer, and where scores are saved.

    Attributes:
        models: in the order of the table.
        scorer: what scores them.
        folder: of the table and of scores.json.
        saved: scores that were taken before.
        progress: receives how far it is.
    """

    models: Sequence[Candidate]
    scorer: Scorer
    folder: Path
    saved: SavedScores
    progress: ScoreProgress | None = None

    def run(self) -> ScoreTable:
        """Score the models that have no saved score, and write the table as CSV and LaTeX.

        A model whose scoring fails is named in the table, and the others are scored. Tables of an earlier
        run are removed first: they are of other scores.
        """
        for name in (CSV_NAME, LATEX_NAME):
            (self.folder / name).unlink(missing_ok=True)
        key, scored, failed = self.scorer.key, dict[str, Scored](), dict[str, str]()
        for model in self.models:
            found = self.saved.find(model, key)
            if found is not None:
                scored[model.label] = Scored(model.label, *found, kept=True)
        waiting = [model for model in self.models if model.label not in scored]
        shown = self.progress
        if shown:
            shown.start(len(waiting))
        try:
            for model in waiting:
                if shown:
                    shown.begin(model.label)
                started = time.perf_counter()
                try:
                    scores = self.scorer.score(model.folder)
                except CovmergeError as error:
                    failed[model.label] = str(error)
                except Exception as error:  # evaluators and functions of others may raise anything
                    failed[model.label] = f"{type(error).__name__}: {error}"
                else:
                    seconds = time.perf_counter() - started
                    scored[model.label] = Scored(model.label, scores, seconds)
                    self.saved.add(model, key, self.scorer.name, scores, seconds)
                    self.saved.write(self.folder / SCORES_NAME)
                if shown:
                    shown.advance()
        finally:
            if shown:
                shown.finish()
        self.saved.write(self.folder / SCORES_NAME)
        rows = tuple(scored[m.label] for m in self.models if m.label in scored)
        table = ScoreTable(self.scorer.name, rows, failed)
        if rows:
            replace_file(self.folder / CSV_NAME, table.table().csv())
            replace_file(self.folder / LATEX_NAME, table.latex())
        return table
