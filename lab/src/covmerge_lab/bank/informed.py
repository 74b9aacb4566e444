"""Methods with unlabelled examples of each task, beside those that have none."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import covmerge
from covmerge.errors import CovmergeError
from covmerge_lab.bank import bases, data, pretraining, scoring
from covmerge_lab.bank.architectures import PAD
from covmerge_lab.bank.bases import Base
from covmerge_lab.bank.cards import Card
from covmerge_lab.workers import OnProgress, ignore_progress

METHODS = ("regmean", "auto_measured")
EXAMPLES = (64, 256)  # of each task
_BATCH = 64


def title(method: str, examples: int) -> str:
    """Return what a row is called."""
    return f"{method}, {examples} inputs"


TITLES = [title(method, examples) for method in METHODS for examples in EXAMPLES]


def score(card: Card, cache: Path, on_progress: OnProgress = ignore_progress) -> dict[str, Any]:
    """Score merges by the layers' inputs on training examples, without their labels.

    A set whose base transformers cannot load has none, nor has one without linear layers. What was scored
    before is kept.
    """
    path = cache / "bank" / "scores" / f"{card.name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    this = scoring.judge(card, cache)
    base = pretraining.folder_of(this.base, cache)
    wanted = [n for n in EXAMPLES if any(title(m, n) not in found["methods"] for m in METHODS)]
    if not (base / "config.json").exists() or not wanted:
        return found
    try:
        with tempfile.TemporaryDirectory() as work:
            found["methods"] |= _scores(this, wanted, Path(work), on_progress)
    except CovmergeError as error:  # it has no linear layer, or an expert is no fine-tune
        found.setdefault("refused", {})["methods with inputs"] = str(error)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _scores(
    judge: scoring.Judge, wanted: Sequence[int], work: Path, on_progress: OnProgress
) -> dict[str, scoring.Scores]:
    base = pretraining.folder_of(judge.base, judge.cache)
    whole: dict[str, Path] = {}
    for name, folder in scoring.models(judge.card, judge.cache).items():
        whole[name] = work / "whole" / name
        covmerge.merge(base, {name: folder}, "average", whole[name])
    found: dict[str, scoring.Scores] = {}
    for done, examples in enumerate(wanted):
        on_progress(done, len(wanted))
        files = {
            name: _collect(judge, name, examples, folder, work) for name, folder in whole.items()
        }
        for method in METHODS:
            out = work / "merged"
            covmerge.merge(
                base, whole, method, out, statistics=files, tensors={"few_rows": "allow"},
                overwrite=True,
            )  # fmt: skip
            found[title(method, examples)] = judge.of_folder(out)[0]
    return found


def _collect(judge: scoring.Judge, name: str, examples: int, model: Path, work: Path) -> Path:
    (expert,) = (expert for expert in judge.card.experts if expert.name == name)
    task = data.tasks(judge.base.kind, judge.cache)[expert.task]
    inputs = bases.encode(judge.base, task, task.train, judge.cache)[:examples]
    path = work / f"{name}-{examples}.covstats.safetensors"
    covmerge.collect(model, list(_batches(judge.base, model, inputs)), path)
    return path


def _batches(base: Base, model: Path, inputs: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield batches as the model takes them."""
    decoder = base.kind == "text" and json.loads((model / "config.json").read_text())
    for start in range(0, len(inputs), _BATCH):
        part = inputs[start : start + _BATCH]
        if base.kind == "text":
            batch = {"input_ids": part, "attention_mask": (part != PAD).long()}
            if decoder and decoder.get("is_encoder_decoder"):
                batch["decoder_input_ids"] = torch.full((len(part), 1), PAD)
            yield batch
        else:
            yield {"pixel_values" if base.kind == "pictures" else "input_values": part}
