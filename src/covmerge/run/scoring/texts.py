"""Score with transformers: `transformers:test.csv`, with columns `text` and `label`, or only `text`.

With labels, the score is the share of texts that the model classifies correctly. Without labels, the
score is the mean log-probability of a token under a causal language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import CheckFailed
from covmerge.base.text import some
from covmerge.run.scoring.files import FilesScorer, read_columns
from covmerge.run.scoring.scorer import Scorer
from covmerge.run.scoring.values import Score, Scores, scores_of

_BATCH = 16


def open_scorer(wanted: Sequence[str]) -> Scorer:
    """Return a scorer on some files."""
    return FilesScorer("transformers", wanted, _columns, _scores)


def _columns(file: Path) -> dict[str, list[Any]]:
    return read_columns(file, (("text", "label"), ("text",)))


def _scores(model: Path, files: Sequence[Path]) -> Scores:
    return {file.stem: _score(model, file) for file in files}


def _score(model: Path, file: Path) -> Score:
    columns = _columns(file)
    texts = [str(text) for text in columns["text"]]
    if "label" in columns:
        examples = _classified(model, texts, [str(label) for label in columns["label"]])
    else:
        examples = _log_probabilities(model, texts)
    return scores_of({file.stem: examples}, "transformers")[file.stem]


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
