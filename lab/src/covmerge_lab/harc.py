"""HARC: routers of a merged mixture of experts, calibrated to route as each expert's did.

    Σ_i E_i[(diag r_i − r_i r_iᵀ) W x xᵀ] = Σ_i E_i[(diag r_i − r_i r_iᵀ) W_i x xᵀ],  r_i = softmax(W_i x)

(Huang, Shi, Quan, Wang, Zhang and Wang: When Model Merging Breaks Routing: Training-Free Calibration for
MoE. ICML 2026, arXiv:2606.03391.) W `(experts, d)` is the router that is sought, W_i that of expert i, and
E_i the mean over the router's inputs x on examples of expert i. Routers are solved for one after the other:
x is what the merged model gives behind those that are solved for. `calibrate` goes on from any merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from covmerge import Generated
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics.examples import Batch, Examples, Reading, ReadingOptions, masks_of
from covmerge.plan.statistics.model import RunningModel, load_model

OFF_DIAGONAL, TOLERANCE, MOST_STEPS = 0.9, 1e-6, 1000  # of the authors' command

# Their experts' shares are a softmax over all of W x, without a bias.
_ROUTERS = ("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")


@dataclass(frozen=True)
class Solved:
    """A router.

    Attributes:
        weight: W `(experts, d)`, float64.
        steps: of conjugate gradients.
        residual: ‖right side − left side‖ / ‖right side‖ behind the last.
    """

    weight: Tensor
    steps: int
    residual: float


@dataclass(frozen=True)
class Calibrated:
    """A merged model with calibrated routers.

    Attributes:
        model: of transformers, in float32; its `save_pretrained` writes it.
        routers: how each was solved for, by its path in the model.
        notes: what a user should know.
    """

    model: Any
    routers: Mapping[str, Solved]
    notes: tuple[str, ...]


def solve(
    routers: Sequence[Tensor],
    inputs: Sequence[Tensor],
    start: Tensor,
    *,
    off_diagonal: float = OFF_DIAGONAL,
    tolerance: float = TOLERANCE,
    most: int = MOST_STEPS,
) -> Solved:
    """Solve one router's equation by conjugate gradients, without its matrix.

    Entries off the diagonal of each E_i[(diag r_i − r_i r_iᵀ) ⊗ x xᵀ] are multiplied by `off_diagonal`, as
    in the authors' code. With 1 a vector may be added to all rows of W: the solution is then the one
    nearest to `start`.

    Args:
        routers: W_i `(experts, d)`.
        inputs: x `(rows, d)` of each.
        start: where W begins, `(experts, d)`.
        off_diagonal: 0 to 1.
        tolerance: of the residual.
        most: steps.

    Example:
        >>> w, x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 2.0], [2.0, -1.0]])
        >>> solve([w, w], [x, x], torch.zeros(2, 2)).weight.round(decimals=4).abs().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    parts = [_Part(*pair, off_diagonal) for pair in zip(routers, inputs, strict=True)]
    right = _sum(part.of(part.router) for part in parts)
    weight, length = start.double().clone(), float(right.square().sum().sqrt())
    rest = right - _sum(part.of(weight) for part in parts)
    direction, squared, steps = rest.clone(), float(rest.square().sum()), 0
    while squared > (tolerance * length) ** 2 and steps < most:
        image = _sum(part.of(direction) for part in parts)
        curvature = float((direction * image).sum())
        if curvature <= 0.0:  # only rounding is left
            break
        weight += squared / curvature * direction
        rest -= squared / curvature * image
        before, squared = squared, float(rest.square().sum())
        direction = rest + squared / before * direction
        steps += 1
    return Solved(weight, steps, squared**0.5 / length if length else 0.0)


class _Part:
    """E_i[(diag r_i − r_i r_iᵀ) ⊗ x xᵀ] of one expert, its entries off the diagonal multiplied."""

    def __init__(self, router: Tensor, inputs: Tensor, off_diagonal: float) -> None:
        self.router, self._inputs, self._share = router.double(), inputs.double(), off_diagonal
        self._routed = torch.softmax(self._inputs @ self.router.T, dim=1)
        variance = self._routed * (1.0 - self._routed)
        self._diagonal = variance.T @ self._inputs.square() / len(inputs)

    def of(self, weight: Tensor) -> Tensor:
        """Return its product with W `(experts, d)`."""
        logits = self._routed * (self._inputs @ weight.T)
        changed = logits - self._routed * logits.sum(dim=1, keepdim=True)
        whole = changed.T @ self._inputs / len(self._inputs)
        return self._share * whole + (1.0 - self._share) * self._diagonal * weight


def _sum(parts: Any) -> Tensor:
    return torch.stack(list(parts)).sum(dim=0)


def calibrate(
    merged: str | Path,
    experts: Mapping[str, str | Path],
    examples: Mapping[str, Examples] | Generated,
    *,
    off_diagonal: float = OFF_DIAGONAL,
    **reading: Unpack[ReadingOptions],
) -> Calibrated:
    """Calibrate the routers of a merged model, in their order; all inputs of a router are in memory.

    Args:
        merged: folder of the merged model.
        experts: folder of each model that was merged, by name.
        examples: of each, as in `covmerge.collect`. Or `Generated`: what each expert writes, or what is
            drawn for all.
        off_diagonal: see `solve`.
        **reading: as in `covmerge.collect`.

    Raises:
        InputError: a model has no routers that are a softmax of W x, or others than the merged one; an
            expert has no examples.
    """
    generated = isinstance(examples, Generated)
    if not generated and experts.keys() != examples.keys():
        one = min(experts.keys() ^ examples.keys())
        raise InputError(f"'{one}' is not both an expert and a name of examples: name it for both")
    how, of_experts, batches = (
        Reading(**reading),
        dict[str, dict[str, Tensor]](),
        list[list[Batch]](),
    )
    for name, source in experts.items():
        with closing(open_checkpoint(source)) as checkpoint:
            expert = load_model(checkpoint, "cpu", head=False, writing=generated)
            given = examples if isinstance(examples, Generated) else examples[name]
            of_experts[name] = {path: r.weight.detach() for path, r in _routers(expert).items()}
            batches.append(list(expert.batches(given, how)[0]))
        if not batches[-1]:
            raise InputError(f"{source} has no examples: pass one batch or more")
    with closing(open_checkpoint(merged)) as opened, torch.no_grad():
        model = load_model(opened, "cpu", head=True)
        routers = _routers(model)
        _check(routers, of_experts, experts, merged)
        found: dict[str, Solved] = {}
        for path, router in routers.items():
            own = [weights[path] for weights in of_experts.values()]
            inputs = [_inputs(model, router, each) for each in batches]
            found[path] = solve(own, inputs, router.weight, off_diagonal=off_diagonal)
            router.weight.copy_(found[path].weight)
    late = [path for path, solved in found.items() if solved.steps == MOST_STEPS]
    notes = [f"'{path}' was not solved after {MOST_STEPS} steps" for path in late]
    return Calibrated(model.whole, found, tuple(notes))


def _routers(model: RunningModel) -> dict[str, Any]:
    """The routers of a model by their paths, in the order in which they are made."""
    modules = {path: module for path, module in model.whole.named_modules()}
    found = {path: m for path, m in modules.items() if type(m).__name__ in _ROUTERS}
    others = sorted(
        {type(m).__name__ for m in modules.values() if "router" in type(m).__name__.lower()}
    )
    if not found or set(others) - set(_ROUTERS):
        has = f"has {', '.join(others)}" if others else "has no routers"
        raise InputError(
            f"{model.checkpoint.source} ({model.skeleton.architecture}) {has}, and HARC is for "
            f"{', '.join(_ROUTERS)}: leave its routers as they are merged"
        )
    return found


def _check(
    routers: Mapping[str, Any],
    of_experts: Mapping[str, Mapping[str, Tensor]],
    sources: Mapping[str, str | Path],
    merged: str | Path,
) -> None:
    """Refuse experts whose routers are not those of the merged model."""
    shapes = {path: list(router.weight.shape) for path, router in routers.items()}
    for name, weights in of_experts.items():
        own = {path: list(weight.shape) for path, weight in weights.items()}
        for path in shapes | own:
            if own.get(path) != shapes.get(path):
                raise InputError(
                    f"the router '{path}' is {own.get(path)} in {sources[name]} and {shapes.get(path)} in "
                    f"{merged}: name the models that it was merged of"
                )


class _Reached(Exception):
    """The forward pass came to where it shall end."""


def _inputs(model: RunningModel, router: Any, batches: Sequence[Batch]) -> Tensor:
    """Run a model up to a router and return the inputs there `(rows, d)`, without those of padding."""
    found: list[Tensor] = []

    def see(module: Any, args: tuple[Tensor, ...]) -> None:
        rows = args[0].reshape(-1, args[0].shape[-1])
        for mask in masks:
            rows = rows[mask.reshape(-1).to(rows.device)]
        found.append(rows)
        raise _Reached

    masks: list[Tensor] = []
    handle = router.register_forward_pre_hook(see)
    try:
        for batch in batches:
            masks = masks_of(batch)
            with suppress(_Reached):
                model.run(batch)
    finally:
        handle.remove()
    return torch.cat(found)
