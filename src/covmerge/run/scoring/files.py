"""Score models on the examples of files (CSV with a header line, or JSON lines), with a library.

`sentence-transformers:sts.csv,triplets.csv` runs the evaluators of sentence-transformers.
`transformers:test.csv` has the columns `text` and `label`, or only `text`. With labels, the score is the
share of texts that the model classifies correctly. Without labels, it is the mean log-probability of a
token under a causal language model.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import CheckFailed, InputError
from covmerge.base.text import some
from covmerge.files.stores.regular_file import read_regular
from covmerge.files.tensors.skeleton import quiet
from covmerge.run.scoring.values import Score, Scores, scores_of

_MOST_BYTES = 2**30


class FilesScorer:
    """A scorer on the examples of files, named after the library that it uses."""

    def __init__(
        self,
        library: str,
        wanted: Sequence[str],
        check: Callable[[Path], object],
        score: Callable[[Path, Sequence[Path]], Scores],
    ) -> None:
        self._files = [Path(each) for each in wanted]
        self._library = library
        self.name = f"{library}:{','.join(map(str, self._files))}"
        self._check, self._score = check, score

    @property
    def key(self) -> str:
        return f"{self.name} {version(self._library)} {digest_of(self._files)}"

    def check(self) -> None:
        for file in self._files:
            self._check(file)

    def score(self, model: Path) -> Scores:
        with quiet(import_module("transformers")):
            return self._score(model, self._files)


def digest_of(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of some files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(read_regular(path, _MOST_BYTES)).digest())
    return found.hexdigest()


def read_columns(path: Path, choices: Collection[tuple[str, ...]]) -> dict[str, list[Any]]:
    """Return the columns that a scorer needs: the first of the sets in `choices` that the file has.

    A `.jsonl` or `.ndjson` file has one object a line; any other file is read as CSV.
    """
    try:
        text = read_regular(path, _MOST_BYTES).decode()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8: convert it") from error
    try:
        if path.suffix in (".jsonl", ".ndjson"):
            rows = [dict(json.loads(line)) for line in text.splitlines() if line.strip()]
        else:
            rows = [dict(row) for row in csv.DictReader(StringIO(text))]
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(
            f"{path} is neither CSV with a head line nor JSON lines: {error}"
        ) from error
    there = list(rows[0]) if rows else []
    for columns in choices:
        if rows and set(columns) <= set(there):
            if any(row.get(name) is None for row in rows for name in columns):
                raise InputError(f"{path} has rows without {' or '.join(columns)}: complete them")
            return {name: [row[name] for row in rows] for name in columns}
    wanted = "; or ".join(", ".join(columns) for columns in choices)
    has = f"the columns {', '.join(map(str, there))}" if rows else "no rows"
    raise InputError(f"{path} has {has}: name its columns {wanted}")


# Evaluators of sentence-transformers.

# The evaluator for each set of columns, which it takes in this order.
_EVALUATORS: dict[tuple[str, ...], str] = {
    ("sentence1", "sentence2", "score"): "EmbeddingSimilarityEvaluator",
    ("sentence1", "sentence2", "label"): "BinaryClassificationEvaluator",
    ("anchor", "positive", "negative"): "TripletEvaluator",
}


def by_evaluators(wanted: Sequence[str]) -> FilesScorer:
    """Return a scorer by sentence-transformers; the columns of a file decide its evaluator."""
    return FilesScorer("sentence-transformers", wanted, _evaluator, _evaluated)


def _evaluated(model: Path, files: Sequence[Path]) -> Scores:
    transformer: Any = import_module("sentence_transformers").SentenceTransformer
    try:
        loaded = transformer(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckFailed(f"sentence-transformers cannot load {model}: {error}") from error
    found: dict[str, Score] = {}
    for file in files:
        evaluator = _evaluator(file)
        found[file.stem] = Score(float(evaluator(loaded)[evaluator.primary_metric]))
    return found


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


# Classifiers and causal language models of transformers.

_BATCH = 16


def by_texts(wanted: Sequence[str]) -> FilesScorer:
    """Return a scorer by transformers."""
    return FilesScorer("transformers", wanted, _columns, _of_texts)


def _columns(file: Path) -> dict[str, list[Any]]:
    return read_columns(file, (("text", "label"), ("text",)))


def _of_texts(model: Path, files: Sequence[Path]) -> Scores:
    found: dict[str, Sequence[float]] = {}
    for file in files:
        columns = _columns(file)
        texts = [str(text) for text in columns["text"]]
        if "label" in columns:
            found[file.stem] = _classified(model, texts, [str(label) for label in columns["label"]])
        else:
            found[file.stem] = _log_probabilities(model, texts)
    return scores_of(found, "transformers")


def _load(model: Path, kind: str) -> tuple[Any, Any]:
    """Load and return a model and its tokenizer.

    Raises:
        CheckFailed: the model cannot be loaded, or lacks weights, which transformers would draw at random.
    """
    transformers: Any = import_module("transformers")
    try:
        loaded, loading = getattr(transformers, kind).from_pretrained(
            model, output_loading_info=True, local_files_only=True
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckFailed(f"transformers cannot load {model}: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise CheckFailed(
            f"{model} has no weights for {some(missing)}, which transformers would draw at random: score a "
            "model that has them, or by a command of your own"
        )
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _classified(model: Path, texts: Sequence[str], labels: Sequence[str]) -> list[bool]:
    loaded, tokenizer = _load(model, "AutoModelForSequenceClassification")
    pipeline: Any = import_module("transformers").pipeline
    classify = pipeline("text-classification", model=loaded, tokenizer=tokenizer)
    guesses: Any = classify(list(texts), truncation=True, batch_size=_BATCH)
    numbers = {str(name): str(number) for number, name in loaded.config.id2label.items()}
    unknown = sorted({*labels} - {*numbers, *numbers.values()})
    if unknown:
        raise CheckFailed(
            f"{model} has no label {some(unknown, quoted=True)}: its labels are {some(numbers)}"
        )
    pairs = zip((str(guess["label"]) for guess in guesses), labels, strict=True)
    return [label in (guess, numbers.get(guess)) for guess, label in pairs]


def _log_probabilities(model: Path, texts: Sequence[str]) -> list[float]:
    loaded, tokenizer = _load(model, "AutoModelForCausalLM")
    longest = min(getattr(loaded.config, "max_position_embeddings", 2048) or 2048, 2048)
    found: list[float] = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)["input_ids"]
        if ids.shape[1] < 2:
            raise CheckFailed(f"the text {text[:80]!r} has fewer than two tokens: leave it out")
        with torch.inference_mode():
            ids = ids.to(loaded.device)
            found.append(-float(loaded(input_ids=ids, labels=ids).loss))
    return found
