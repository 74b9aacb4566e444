"""The training loop of all suites, and the marker that tells a finished expert from half of one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from torch import Tensor, nn

from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_transformers: Any = transformers
_Adam: Any = torch.optim.AdamW
_Sgd: Any = torch.optim.SGD

MARKER = "training.json"
RANK, ALPHA = 16, 32  # of every suite's LoRA
# A step of AdamW moves every weight by about its learning rate, one of SGD all of them together by about
# ten times its own (momentum 0.9, a gradient of norm 1): with some ten million weights this is as far.
_SGD_FASTER, _MOMENTUM = 300, 0.9

Optimizer = Literal["adamw", "sgd"]

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Settings:
    """How one expert is trained: a linear warm-up and decay, gradients clipped at norm 1."""

    steps: int
    learning_rate: float
    batch_size: int = 32
    warmup: float = 0.1
    weight_decay: float = 0.01

    def by(self, optimizer: Optimizer) -> Settings:
        """Return those by which an optimizer moves weights as far as AdamW, and decays them as much."""
        if optimizer == "adamw":
            return self
        # A step of AdamW decays weights by its rate times the decay, one of SGD, whose momentum goes on
        # with it, by 1/(1 − momentum) times that.
        decay = self.weight_decay * (1.0 - _MOMENTUM) / _SGD_FASTER
        return replace(self, learning_rate=_SGD_FASTER * self.learning_rate, weight_decay=decay)


def device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def products() -> AbstractContextManager[object]:
    """Multiply in bfloat16 and keep weights in float32: CPUs that know it are twice as fast."""
    return torch.autocast(device().type, torch.bfloat16)


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[Batch], Tensor],
    settings: Settings,
    on_progress: OnProgress,
    by: Optimizer = "adamw",
) -> float:
    """Train what requires a gradient; the model is left as it was given, in training mode or not.

    Args:
        model: what is trained.
        batches: at least as many as there are steps.
        loss: the mean loss of a batch.
        settings: the optimizer's own, as `Settings.by` gives them.
        on_progress: told of each step.
        by: the optimizer.

    Returns:
        Seconds per step.
    """
    started = time.perf_counter()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(by, parameters, settings)
    schedule = _transformers.get_linear_schedule_with_warmup(
        optimizer, round(settings.warmup * settings.steps), settings.steps
    )
    for step, batch in enumerate(islice(batches, settings.steps), start=1):
        found: Any = loss(batch)
        found.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_progress(step, settings.steps)
    return (time.perf_counter() - started) / settings.steps


def _optimizer(by: Optimizer, parameters: list[nn.Parameter], settings: Settings) -> Any:
    rate, decay = settings.learning_rate, settings.weight_decay
    if by == "sgd":
        return _Sgd(parameters, lr=rate, momentum=_MOMENTUM, weight_decay=decay, fused=True)
    return _Adam(parameters, lr=rate, weight_decay=decay, fused=True)


def is_trained(folder: Path, marker: Mapping[str, Any]) -> bool:
    """Whether a folder holds what was trained so before."""
    path = folder / MARKER
    return path.exists() and json.loads(path.read_text()) == json.loads(json.dumps(marker))


@contextmanager
def finished(folder: Path, marker: Mapping[str, Any]) -> Generator[Path]:
    """Give a folder to fill; it takes its name and its marker when it is whole."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    (unfinished / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def marker(settings: Settings, **more: Any) -> dict[str, Any]:
    """Return what tells one training from another."""
    return {"settings": asdict(settings), **more}
