"""Score with evaluators of sentence-transformers: `sentence-transformers:sts.csv,triplets.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from covmerge.base.errors import CheckFailed, InputError
from covmerge.run.scoring.files import FilesScorer, read_columns
from covmerge.run.scoring.scorer import Scorer
from covmerge.run.scoring.values import Score, Scores

# The evaluator for each set of columns, which it takes in this order.
_EVALUATORS: dict[tuple[str, ...], str] = {
    ("sentence1", "sentence2", "score"): "EmbeddingSimilarityEvaluator",
    ("sentence1", "sentence2", "label"): "BinaryClassificationEvaluator",
    ("anchor", "positive", "negative"): "TripletEvaluator",
}


def open_scorer(wanted: Sequence[str]) -> Scorer:
    """Return a scorer on some files; the columns of a file decide its evaluator."""
    return FilesScorer("sentence-transformers", wanted, _evaluator, _scores)


def _scores(model: Path, files: Sequence[Path]) -> Scores:
    transformer: Any = import_module("sentence_transformers").SentenceTransformer
    try:
        loaded = transformer(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckFailed(f"sentence-transformers cannot load {model}: {error}") from error
    return {file.stem: _score(_evaluator(file), loaded) for file in files}


def _score(evaluator: Any, model: Any) -> Score:
    found: Any = evaluator(model)
    return Score(float(found[evaluator.primary_metric]))


def _evaluator(file: Path) -> Any:
    columns = read_columns(file, _EVALUATORS)
    classes: Any = import_module("sentence_transformers.evaluation")
    name = _EVALUATORS[tuple(columns)]
    values = list(columns.values())
    try:
        if name != "TripletEvaluator":
            values[2] = [float(value) for value in values[2]]
        if name == "BinaryClassificationEvaluator":
            values[2] = [int(value) for value in values[2]]
    except ValueError as error:
        raise InputError(
            f"{file}: {list(columns)[2]} is not a number everywhere: {error}"
        ) from error
    return getattr(classes, name)(*values, write_csv=False, show_progress_bar=False)
