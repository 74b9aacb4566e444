"""Trainings of a suite's base under control, with the inputs and gradients of every layer watched."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from covmerge.plan.statistics.examples import masks_of
from covmerge_lab.studies.angles import Angles, InputSums, StepSums, angles
from covmerge_lab.suite import Batch, Suite
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_optim: Any = torch.optim


@dataclass(frozen=True)
class Training:
    """How the base is trained: without schedule and clipping, so that only this differs."""

    optimiser: str
    learning_rate: float
    lora: bool = False

    @property
    def title(self) -> str:
        """What it is called in tables."""
        return f"{'LoRA, ' if self.lora else ''}{self.optimiser}, lr {self.learning_rate:g}"


_OPTIMISERS: Mapping[str, Callable[[list[Tensor], float], Any]] = {
    "SGD": lambda parameters, rate: _optim.SGD(parameters, lr=rate),
    "SGD + momentum": lambda parameters, rate: _optim.SGD(parameters, lr=rate, momentum=0.9),
    "AdamW": lambda parameters, rate: _optim.AdamW(parameters, lr=rate),
}


@dataclass(frozen=True)
class Size:
    """How large a training is.

    Attributes:
        batch: examples a step.
        steps: after which it is looked at.
        held: batches that C is measured on, which are not trained on.
    """

    batch: int
    steps: tuple[int, ...]
    held: int


@contextmanager
def watching(
    layers: Mapping[str, nn.Module], masks: Sequence[Tensor], see: Callable[[str, Tensor], Any]
) -> Generator[None]:
    """Call `see(layer, z)` for every forward pass, and what it returns for the gradients of the output.

    Args:
        layers: what to watch.
        masks: of the batch that runs: rows of padding are left out.
        see: takes the layer's name and its inputs `(n, d_in)`; returns what takes the gradients
            `(n, d_out)`, or None.
    """

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def after(module: nn.Module, given: tuple[Tensor, ...], output: Any) -> None:
            gradients = see(name, _rows(given[0], masks))
            if gradients is not None:

                def see_gradients(values: Tensor) -> None:
                    gradients(_rows(values, masks))

                output.register_hook(see_gradients)

        return after

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(values: Tensor, masks: Sequence[Tensor]) -> Tensor:
    rows = values.detach().reshape(-1, values.shape[-1])
    fitting = [mask for mask in masks if mask.shape == values.shape[:-1]]
    return rows[fitting[0].reshape(-1)] if fitting else rows


def run_training(
    suite: Suite, training: Training, seed: int, size: Size, on_progress: OnProgress
) -> dict[int, dict[str, Angles]]:
    """Train once; return the angles of every layer after some of the steps."""
    torch.default_generator.manual_seed(seed)
    lessons = suite.lessons(suite.controlled_task, size.batch, seed)
    batches, loss = lessons.batches, lessons.loss
    held = list(islice(batches, size.held))
    model = suite.adapt(lessons.model) if training.lora else lessons.model
    layers = linear_layers(model, suite.adapted)
    start = {name: _weight(layer).detach().clone() for name, layer in layers.items()}
    sums = {name: StepSums(*weight.shape) for name, weight in start.items()}
    optimiser = _OPTIMISERS[training.optimiser](
        [p for p in model.parameters() if p.requires_grad], training.learning_rate
    )
    found: dict[int, dict[str, Angles]] = {}
    for step, batch in enumerate(islice(batches, max(size.steps)), start=1):
        with watching(layers, masks_of(batch[0]), lambda name, z: partial(sums[name].add, z)):
            mean: Any = loss(batch)
            mean.backward()
        optimiser.step()
        optimiser.zero_grad()
        on_progress(step, max(size.steps))
        if step in size.steps:
            inputs = _inputs(layers, loss, held)
            found[step] = {
                name: angles(_weight(layer).detach() - start[name], sums[name], inputs[name])
                for name, layer in layers.items()
            }
    return found


def linear_layers(model: Any, adapted: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers with these names, as PEFT matches names; an adapted one is one layer."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if any(name == wanted or name.endswith(f".{wanted}") for wanted in adapted)
    }


def _weight(layer: Any) -> Tensor:
    """The weight that a layer acts with `(d_out, d_in)`."""
    plain, weight = layer, layer.weight
    if hasattr(layer, "get_delta_weight"):
        plain = layer.base_layer
        weight = plain.weight + layer.get_delta_weight("default")
    return weight.T if isinstance(plain, Conv1D) else weight  # which stores it the other way round


def _inputs(
    layers: Mapping[str, nn.Module], loss: Callable[[Batch], Tensor], batches: Sequence[Batch]
) -> dict[str, InputSums]:
    """Measure the layers' inputs as the model is now."""
    found: dict[str, InputSums] = {}

    def see(name: str, inputs: Tensor) -> None:
        found.setdefault(name, InputSums(inputs.shape[1])).add(inputs)

    with torch.no_grad():
        for batch in batches:
            with watching(layers, masks_of(batch[0]), see):
                loss(batch)
    return found
