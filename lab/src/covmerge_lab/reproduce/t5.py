"""Text to text: the likeliest of an example's answer choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from covmerge.errors import InputError
from covmerge_lab.reproduce.bench import Bench, Record, quiet, read_records
from covmerge_lab.reproduce.published import Column

# Their annotations are partial.
_Tokenizer: Any = transformers.AutoTokenizer
_Model: Any = transformers.AutoModelForSeq2SeqLM


def scores(bench: Bench, model: Path, columns: Sequence[Column]) -> Mapping[str, float]:
    """Return accuracy in percent by column.

    The examples of a task are `DATA/t5/TASK.jsonl`, with `input`, `answer_choices` and `lbl` (the index of
    the right choice), as the authors' readers give them.
    """
    with quiet(), torch.inference_mode():
        reader = _Model.from_pretrained(model).eval().to(bench.device)
        tokenizer = _Tokenizer.from_pretrained(bench.models.base)
        found: dict[str, float] = {}
        for column in columns:
            records = _records(bench, column.task)
            right = [
                _likeliest(reader, tokenizer, record, bench.setting.max_length) == record["lbl"]
                for record in records
            ]
            found[column.title] = 100 * sum(right) / len(right)
        return found


def _records(bench: Bench, task: str) -> list[Record]:
    if bench.data is None:
        raise InputError(
            f"{task} is asked by prompts that are the authors' own: pass --data DIR with "
            f"DIR/t5/{task}.jsonl (input, answer_choices, lbl)"
        )
    path = bench.data / "t5" / f"{task}.jsonl"
    records = read_records(path, bench.limit)
    for number, record in enumerate(records, start=1):
        if not {"input", "answer_choices", "lbl"} <= set(record):
            raise InputError(f"{path}, line {number} lacks input, answer_choices or lbl: add it")
    return records


def _likeliest(model: Any, tokenizer: Any, record: Record, max_length: int) -> int:
    """Return the choice with the largest log-probability, summed over its tokens."""
    question = tokenizer(
        record["input"], truncation=True, max_length=max_length, return_tensors="pt"
    ).to(model.device)
    choices = tokenizer(list(record["answer_choices"]), padding=True, return_tensors="pt")
    labels = choices.input_ids.masked_fill(choices.attention_mask == 0, -100).to(model.device)
    count = len(labels)
    logits = model(
        input_ids=question.input_ids.expand(count, -1),
        attention_mask=question.attention_mask.expand(count, -1),
        labels=labels,
    ).logits.float()
    # Padding (-100) is ignored and counts nothing.
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return int(losses.sum(dim=1).argmin())
