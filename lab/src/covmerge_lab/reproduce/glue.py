"""GLUE: a merged backbone with each expert's own classifier on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import covmerge
from covmerge.errors import CheckpointError, InputError
from covmerge_lab.reproduce.bench import Bench, Record, optional, quiet, read_records
from covmerge_lab.reproduce.metrics import METRICS, Numbers
from covmerge_lab.reproduce.published import Column

# Their annotations are partial.
_Tokenizer: Any = transformers.AutoTokenizer
_Model: Any = transformers.AutoModel
_Classifier: Any = transformers.AutoModelForSequenceClassification

_REPOSITORY = "nyu-mll/glue"
_BATCH = 32
TRAINING_EXAMPLES = 256  # of each task, for RegMean and Fisher: FusionBench's number
FIELDS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
}


def scores(bench: Bench, model: Path, columns: Sequence[Column]) -> Mapping[str, float]:
    """Return percent by column of a backbone under the classifiers of the columns' experts."""
    with quiet(), torch.inference_mode():
        backbone = _Model.from_pretrained(model).state_dict()
        return {column.title: 100 * _score(bench, model, backbone, column) for column in columns}


def collect(bench: Bench, kinds: Sequence[str]) -> dict[str, Path]:
    """Collect statistics of every expert from training examples, without their labels; by expert."""
    found: dict[str, Path] = {}
    for column in bench.setting.columns:
        expert = bench.models.experts[column.expert]
        records = _records(bench, column.task, train=True)
        tokenizer = _tokenizer(expert, bench.models.base)
        encoded = _encode(tokenizer, records, column.task, bench.setting.max_length)
        out = (
            bench.cache
            / "statistics"
            / bench.setting.name
            / f"{column.expert}.covstats.safetensors"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        inputs = [tokenizer.pad([one], return_tensors="pt") for one in encoded]
        with quiet():
            covmerge.collect(expert, inputs, out, kinds=kinds, device=bench.device, overwrite=True)
        found[column.expert] = out
    return found


def _score(bench: Bench, model: Path, backbone: Mapping[str, Any], column: Column) -> float:
    expert = bench.models.experts[column.expert]
    classifier = _Classifier.from_pretrained(expert).eval()
    left = classifier.base_model.load_state_dict(backbone, strict=False)
    if left.missing_keys:
        raise CheckpointError(
            f"{model} lacks {len(left.missing_keys)} tensors of {expert}, {left.missing_keys[0]} among "
            "them: are they of one architecture?"
        )
    tokenizer = _tokenizer(expert, bench.models.base)
    # GPT-2 scores the last token that is no padding, and has to be told which one pads.
    classifier.config.pad_token_id = tokenizer.pad_token_id
    records = _records(bench, column.task)
    encoded = _encode(tokenizer, records, column.task, bench.setting.max_length)
    return METRICS[column.metric](
        _predict(classifier.to(bench.device), tokenizer, encoded),
        np.asarray([record["label"] for record in records], dtype=np.float64),
    )


def _tokenizer(expert: Path, base: Path) -> Any:
    """The expert's, or the base's where the expert was saved without one."""
    own = any((expert / name).exists() for name in ("tokenizer.json", "vocab.json"))
    tokenizer = _Tokenizer.from_pretrained(expert if own else base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _records(bench: Bench, task: str, *, train: bool = False) -> list[Record]:
    """The validation set, or the start of the training set, from the user's folder or from the hub."""
    limit = TRAINING_EXAMPLES if train else bench.limit
    name = "train" if train else "validation"
    if bench.data is not None:
        return read_records(bench.data / "glue" / task / f"{name}.jsonl", limit)
    datasets = optional("datasets")
    split = "validation_matched" if task == "mnli" and not train else name
    try:
        found = datasets.load_dataset(
            _REPOSITORY, task, split=split, cache_dir=str(bench.cache / "datasets")
        )
    except Exception as error:  # the client's transport, and with it its errors, changes by version
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"GLUE's {task} could not be fetched from {_REPOSITORY} ({type(error).__name__}: {reason}): "
            f"check the connection, or pass --data DIR with DIR/glue/{task}/{name}.jsonl"
        ) from error
    count = len(found) if limit is None else min(limit, len(found))
    return [dict(found[number]) for number in range(count)]


def _encode(tokenizer: Any, records: Sequence[Record], task: str, max_length: int) -> list[Any]:
    texts = [[str(record[field]) for record in records] for field in FIELDS[task]]
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    return [{key: encoded[key][n] for key in encoded} for n in range(len(records))]


def _predict(model: Any, tokenizer: Any, encoded: Sequence[Any]) -> Numbers:
    """Return the class of each example, or the number where the model has one output."""
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]["input_ids"]))
    found = np.zeros(len(encoded))
    for start in range(0, len(order), _BATCH):
        chosen = order[start : start + _BATCH]
        inputs = tokenizer.pad([encoded[number] for number in chosen], return_tensors="pt")
        logits = model(**inputs.to(model.device)).logits.float().cpu()
        found[chosen] = (logits[:, 0] if logits.shape[1] == 1 else logits.argmax(dim=1)).numpy()
    return found
