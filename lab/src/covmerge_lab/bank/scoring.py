"""Merge each set by every method, from disk, and put what comes out to the test."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import covmerge
from covmerge.errors import CovmergeError
from covmerge.methods import registry
from covmerge_lab import training
from covmerge_lab.bank import bases, data, experts, pretraining, rules
from covmerge_lab.bank.bases import Base
from covmerge_lab.bank.cards import Card
from covmerge_lab.bank.experts import BY_NAME
from covmerge_lab.workers import OnProgress, ignore_progress

_files: Any = safetensors.torch

Scores = dict[str, float]  # the share of a task's test examples that are answered right, by expert
Halves = dict[str, tuple[float, float]]  # of the even and of the odd examples
_FOR_ADAPTERS = (
    "knots",
    "core_space",
    "ctm",
    "ssr",
)  # they merge inside a space that adapters share
# Their merges stay on disk: candidates average them.
KEPT = (
    *("average", "task_arithmetic", "ties", "ace", "actmat", "aswudi", "swudi", "tsv_m", "iso_c"),
    *("iso_cts", "dc_merge", "cart", "knots", "core_space", "auto"),
    *(rules.SECOND, rules.BY_LENGTHS, rules.TWO_SIDED),
)


def data_free(card: Card) -> list[str]:
    """Return the methods that merge a set into one model by updates alone."""
    return [
        method.name
        for method in registry
        if method.sees == "updates" and method.data == "none" and not method.writes_masks
        if card.form == "adapters" or method.name not in _FOR_ADAPTERS
    ]


@dataclass(frozen=True)
class Judge:
    """The tests of a set's tasks, with each expert's head."""

    card: Card
    base: Base
    cache: Path
    tests: Mapping[str, tuple[Tensor, Tensor, Any]]

    def scores(self, net: Any) -> Scores:
        """Return how a model does on every task."""
        return self.both(net)[0]

    def both(self, net: Any) -> tuple[Scores, Halves]:
        """Return how a model does on every task, and on the even and on the odd examples of each."""
        net.eval()
        with torch.inference_mode():
            right = {name: self._right(net, name) for name in self.tests}
        halves = {name: (float(r[::2].mean()), float(r[1::2].mean())) for name, r in right.items()}
        return {name: float(r.mean()) for name, r in right.items()}, halves

    def score(self, net: Any, name: str) -> float:
        """Return how a model does on the task of one expert."""
        return float(self._right(net, name).mean())

    def _right(self, net: Any, name: str) -> Tensor:
        """Return 1 for each test example that is answered right, 0 for the others."""
        inputs, wanted, head = self.tests[name]
        if head is None:
            found = bases.next_tokens(net, inputs)
        else:
            found = bases.features(net, self.base, inputs) @ head["weight"].T + head["bias"]
        return (found.argmax(dim=1) == wanted).float()

    def of_folder(self, folder: Path) -> tuple[Scores, Halves]:
        """Return how a stored model does, and on both halves."""
        return self.both(bases.load(self.base, folder).float())


def judge(card: Card, cache: Path) -> Judge:
    """Read the tests of a set."""
    base = BY_NAME[card.base]
    tests: dict[str, tuple[Tensor, Tensor, Any]] = {}
    for expert in card.scored:
        task = data.tasks(base.kind, cache)[expert.task]
        labels, head = task.test.labels, None
        if base.answers == "heads":
            path = experts.folder_of(card, cache) / expert.name / "head.safetensors"
            head = _files.load_file(path)
        else:
            labels = bases.answers(base, labels, cache)
        tests[expert.name] = bases.encode(base, task, task.test, cache), labels, head
    return Judge(card, base, cache, tests)


def models(card: Card, cache: Path) -> dict[str, Path]:
    """Return the folders of a set's experts."""
    return {e.name: experts.folder_of(card, cache) / e.name / "model" for e in card.experts}


def bounds(judge: Judge) -> dict[str, Scores]:
    """Return how the base does, each expert on its own task, and whoever always gives one answer."""
    base_folder = pretraining.folder_of(judge.base, judge.cache)
    own: Scores = {}
    with tempfile.TemporaryDirectory() as work:
        for name, folder in models(judge.card, judge.cache).items():
            if name in judge.tests:
                out = Path(work) / name
                covmerge.merge(base_folder, {name: folder}, "average", out)
                own[name] = judge.score(bases.load(judge.base, out).float().eval(), name)
    always = {
        name: float(wanted.bincount().max()) / len(wanted)
        for name, (_, wanted, _) in judge.tests.items()
    }
    return {"base": judge.of_folder(base_folder)[0], "experts": own, "always": always}


def score(
    card: Card, cache: Path, methods: Sequence[str] = (), on_progress: OnProgress = ignore_progress
) -> dict[str, Any]:
    """Merge a set by methods at their defaults and score each; what was scored before is kept.

    Args:
        card: the set, whose experts are there.
        cache: folder of the bank. The result is `bank/scores/NAME.json` in it.
        methods: names of methods or rules; by default all data-free methods.
        on_progress: called with the methods done and all methods.
    """
    path = cache / "bank" / "scores" / f"{card.name}.json"
    hashed = _hash(card, cache)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    this = judge(card, cache)
    if found.get("experts_hash") != hashed:
        found = {"card": card.described(), "experts_hash": hashed, **bounds(this), "methods": {}}
    known = {*found["methods"], *found.get("refused", ())}
    wanted = [m for m in methods or data_free(card) if m not in known]
    for done, method in enumerate(wanted):
        on_progress(done, len(wanted))
        try:
            found["methods"][method], halves = _merged(this, method)
            if method in KEPT or method in rules.OF_AUTO:
                found.setdefault("halves", {})[method] = halves
        except (
            CovmergeError
        ) as error:  # it needs factors of linear layers, or a model that can be run
            found.setdefault("refused", {})[method] = str(error)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def halves(card: Card, cache: Path) -> None:
    """Score the merges that are kept on both halves of the test examples."""
    path = cache / "bank" / "scores" / f"{card.name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    this = judge(card, cache)
    folders = {method: merged_folder(card, cache, method) for method in KEPT}
    found["halves"] = {
        method: this.of_folder(folder)[1]
        for method, folder in folders.items()
        if folder.exists() and method in found["methods"]
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def merged_folder(card: Card, cache: Path, method: str) -> Path:
    """Return where a merge of a set is kept."""
    return cache / "bank" / "merged" / card.name / method.replace(" ", "_")


def _hash(card: Card, cache: Path) -> str:
    """Return a hash of how base and experts were trained."""
    markers = [experts.folder_of(card, cache) / e.name / training.MARKER for e in card.experts]
    return hashlib.sha256("".join(path.read_text() for path in markers).encode()).hexdigest()


def _merged(judge: Judge, method: str) -> tuple[Scores, Halves]:
    """Merge a set from disk to disk, and return the scores, and those on both halves."""
    out = merged_folder(judge.card, judge.cache, method)
    known = nullcontext(method)
    if method in rules.RULES or method in rules.OF_AUTO:
        known = rules.registered(method)
    elif method in rules.CONSTANTS:
        known = rules.other_constants(method)
    started = time.process_time()
    with known as name:
        covmerge.merge(
            pretraining.folder_of(judge.base, judge.cache),
            models(judge.card, judge.cache),
            name,
            out,
            overwrite=True,
        )
    seconds = time.process_time() - started
    try:
        scores, halves = judge.of_folder(out)
        return scores | {"cpu_seconds": round(seconds, 3)}, halves
    finally:
        if method not in KEPT:
            shutil.rmtree(out)
