"""Train the experts of a set, as their card says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from covmerge_lab import training
from covmerge_lab.bank import bases, data, pretraining
from covmerge_lab.bank.bases import EVERY, Base
from covmerge_lab.bank.cards import Card, Trained
from covmerge_lab.training import Settings
from covmerge_lab.workers import OnProgress, ignore_progress

_files: Any = safetensors.torch
_peft: Any = peft

BY_NAME = {base.name: base for base in EVERY}


def folder_of(card: Card, cache: Path) -> Path:
    """Return the folder of a set's experts."""
    return cache / "bank" / "sets" / card.name


def train(card: Card, cache: Path, on_progress: OnProgress = ignore_progress) -> None:
    """Train the experts of a set that are not there yet, trained alike from the same base."""
    base = BY_NAME[card.base]
    pretraining.prepare(base, cache, ignore_progress)
    made_from = (pretraining.folder_of(base, cache) / training.MARKER).read_text()
    for done, expert in enumerate(card.experts):
        on_progress(done, len(card.experts))
        settings = Settings(expert.steps, expert.rate, expert.batch, weight_decay=expert.decay).by(
            expert.optimizer
        )
        marker = training.marker(settings, expert=asdict(expert), base=made_from)
        folder = folder_of(card, cache) / expert.name
        if not training.is_trained(folder, marker):
            with training.finished(folder, marker) as unfinished:
                _train(expert, base, settings, cache, unfinished)
    on_progress(len(card.experts), len(card.experts))


def _train(expert: Trained, base: Base, settings: Settings, cache: Path, folder: Path) -> None:
    task = data.tasks(base.kind, cache)[expert.task]
    inputs = bases.encode(base, task, task.train, cache)[: expert.examples]
    labels = task.train.labels[: expert.examples]
    draw = torch.Generator().manual_seed(1000 + expert.seed)
    if expert.shuffled:
        labels = labels[torch.randperm(len(labels), generator=draw)]
    net = bases.load(base, pretraining.folder_of(base, cache)).train()
    torch.default_generator.manual_seed(expert.start)
    trained, model = net, net
    if expert.kind != "full":
        model = _adapted(net, expert, base)
    elif expert.frozen != "nothing":
        _freeze(net, expert)
    torch.default_generator.manual_seed(expert.seed)
    head = _head(net, base, inputs, task.labels)
    learner = nn.ModuleDict(
        {"model": model, "head": head} if head is not None else {"model": model}
    )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        shown, wanted = batch
        if head is None:
            return cross_entropy(
                bases.next_tokens(trained, shown), bases.answers(base, wanted, cache)
            )
        return cross_entropy(head(bases.features(trained, base, shown)), wanted)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            drawn = torch.randint(len(inputs), (settings.batch_size,), generator=draw)
            yield inputs[drawn], labels[drawn]

    training.fit(learner, batches(), loss, settings, ignore_progress, by=expert.optimizer)
    _save(model, expert, folder / "model")
    if head is not None:
        _files.save_file(head.state_dict(), folder / "head.safetensors")


def _adapted(net: Any, expert: Trained, base: Base) -> Any:
    """Put fresh adapters into a network; its own weights stay as they are."""
    endings = base.adapted[expert.everywhere]
    targets = [name for name, _ in net.named_modules() if name.rpartition(".")[2] in endings]
    config = _peft.LoraConfig(
        r=expert.rank,
        lora_alpha=expert.alpha,
        target_modules=targets,
        use_dora=expert.kind == "dora",
    )
    return _peft.get_peft_model(net, config)


def _freeze(net: Any, expert: Trained) -> None:
    """Freeze the embeddings and the first layer of patches or sounds; or the first half of all tensors."""
    named = list(net.named_parameters())
    for place, (name, parameter) in enumerate(named):
        first = "embed" in name or place == 0
        if first if expert.frozen == "embeddings" else 2 * place < len(named):
            parameter.requires_grad_(requires_grad=False)


def _head(net: Any, base: Base, inputs: Tensor, labels: int) -> nn.Linear | None:
    if base.answers == "tokens":
        return None
    with torch.no_grad():
        width = bases.features(net.eval(), base, inputs[:2]).shape[1]
    net.train()
    return nn.Linear(width, labels)


def _save(model: Any, expert: Trained, folder: Path) -> None:
    if expert.kind == "lora":
        model.save_pretrained(folder)
        return
    net = model.merge_and_unload() if expert.kind == "dora" else model
    bases.save(net.bfloat16() if expert.rounded else net, folder)
