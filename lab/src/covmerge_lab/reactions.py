"""How strongly experts react to the inputs of a layer: it makes of one probe each expert's own.

Inputs that are the same for all experts give the same covariance for all, and with it the mean. So an
input z of a layer counts by what expert t's update makes of it, beside what those of the others do:

    w(z) = ‖Δ_t z‖² / mean_s ‖Δ_s z‖²        over all experts s, t among them
    w(z) = ‖Δ_t z‖²                          where the others are not named; brought to mean 1

Updates are read tensor by tensor whenever a layer is called: of base and experts no more than one
tensor each of two checkpoints is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from covmerge.errors import InputError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.skeleton import SkeletonUnavailable, build_skeleton
from covmerge.plan.statistics.model import ObservedLayer, RunningModel


class Reactions:
    """Weights of a layer's inputs, by how strongly an expert reacts to them.

    Args:
        model: the expert.
        base: its base.
        others: the experts that it is to be merged with, without itself.

    Attributes:
        relative: whether the weights are relative to other experts; else they have no scale.

    Raises:
        InputError: a model that is none of this family, or the expert among the others.
    """

    def __init__(
        self, model: RunningModel, base: Checkpoint, others: Sequence[Checkpoint] = ()
    ) -> None:
        self.relative = bool(others)
        self._base = _Weights(base)
        self._others = [_Weights(other) for other in others]
        self._paths = {layer.name: model.skeleton.path(layer.name) for layer in model.layers()}
        own = model.checkpoint
        for number, other in enumerate(others):
            if any(_same(other, one) for one in (own, *others[:number])):
                raise InputError(
                    f"{other.source} is named twice among the experts: name each of the others once"
                )
        self._unknown: list[str] = []
        for name, path in self._paths.items():
            for weights in (self._base, *self._others):
                if path not in weights.names:
                    self._unknown.append(name)
                    break
                weights.check(path, own.headers[name].shape, own.source)

    def of(self, layer: ObservedLayer, inputs: Tensor) -> Tensor:
        """Return the weights `(rows,)` of inputs `(rows, d_in)`; 1 where nobody reacts.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        nothing = torch.ones(len(inputs), device=inputs.device)
        if layer.name in self._unknown:
            return nothing
        path = self._paths[layer.name]
        base = self._base.read(path, inputs)
        weight = cast("Tensor", layer.module.weight).detach()
        own = _energies(weight - base, inputs, layer)
        if not self.relative:
            return own if bool((weight != base).any()) else nothing
        total = own.clone()
        for other in self._others:
            total += _energies(other.read(path, inputs) - base, inputs, layer)
        mean = total / (1 + len(self._others))
        return torch.where(mean > 0, own / mean, 1.0)

    def as_json(self) -> dict[str, str | int | float]:
        """What a statistics file says of it."""
        others = [weights.checkpoint.source for weights in self._others]
        return {
            "weights": "|D_t z|^2 / mean_s |D_s z|^2" if self.relative else "|D_t z|^2, of mean 1",
            "base": self._base.checkpoint.source,
            "others": ", ".join(others),
        }

    def notes(self) -> list[str]:
        """Say which layers have no weights."""
        why = "not in the base and all other experts, so its inputs weigh alike"
        return [f"{', '.join(self._unknown)}: {why}"] if self._unknown else []


class _Weights:
    """The tensors of a model, by their path in the backbone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        source = checkpoint.source
        if checkpoint.config is None:
            raise InputError(
                f"{source} has no config.json, by which its layers could be found: pass the folder of a "
                "model as transformers saves it"
            )
        checkpoint.materialize()
        try:
            skeleton = build_skeleton(checkpoint.headers, checkpoint.config)
        except SkeletonUnavailable as reason:
            raise InputError(f"the layers of {source} cannot be found: {reason}") from reason
        self.checkpoint = checkpoint
        self.names = {skeleton.path(name): name for name in skeleton.places}

    def check(self, path: str, shape: tuple[int, ...], expert: str) -> None:
        header = self.checkpoint.headers[self.names[path]]
        if header.shape != shape or not header.dtype.is_floating_point:
            raise InputError(
                f"'{header.name}' of {self.checkpoint.source} is {header.dtype} of shape "
                f"{list(header.shape)}, and {list(shape)} in {expert}: they are no fine-tunes of one base"
            )

    def read(self, path: str, like: Tensor) -> Tensor:
        return self.checkpoint.read(self.names[path]).to(like.device, like.dtype)


def _energies(update: Tensor, inputs: Tensor, layer: ObservedLayer) -> Tensor:
    """‖Δz‖² of each input."""
    return (inputs @ (update if layer.transposed else update.mT)).square().sum(1)


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return one.source == other.source or (
        one.folder is not None
        and other.folder is not None
        and Path(one.folder).resolve() == Path(other.folder).resolve()
    )
