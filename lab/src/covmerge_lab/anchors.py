"""Inputs at which a block pulls the base towards an expert (FDA, arXiv 2510.21223), as statistics.

For a block φ with the base's weights θ₀ and an expert's θ_t, sequences X of vectors at its entry are moved
by AdamW until the gradient that they give points along the task vector:

    max_X  cos(−∇_θ Σ_x (1 − cos(φ(θ, x), φ(θ_t, x))) at θ₀,  θ_t − θ₀)

FDA then trains the merged block on them. Here they are shown to the expert's block, and what its linear
layers see is their covariance, as of any other inputs.

Departs from the paper: nothing is trained on them; the authors take 64 sequences of 5 to 50 vectors and
1200 steps, and `Effort` says what is taken here; all begin as normal vectors, of one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from covmerge import open_checkpoint
from covmerge.errors import InputError
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import RunningModel, load_model
from covmerge.plan.statistics.write import Contents, write_statistics
from covmerge_lab.workers import OnProgress

# Its annotations are partial.
_functional_call: Any = torch.func.functional_call


_NOTHING = 1e-30  # beside the square of lengths: a block that no update moved pulls nowhere


@dataclass(frozen=True)
class Effort:
    """How much is spent on a block.

    Attributes:
        sequences: that are moved.
        length: vectors of each.
        steps: of AdamW.
        rate: its learning rate, in units of the vectors' deviation at the start, 1.
        seed: of where they begin: normal vectors.
    """

    sequences: int = 16
    length: int = 24
    steps: int = 100
    rate: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """A block of a model, and what the model calls it with.

    Attributes:
        block: it.
        args: positional arguments behind the hidden states.
        named: named ones.
    """

    block: nn.Module
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, states: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return what leaves the block, with these weights for its own where they are given."""
        given = (states, *self.args)
        if weights is None:
            left = self.block(*given, **self.named)
        else:
            left = _functional_call(self.block, weights, given, dict(self.named))
        return left if isinstance(left, Tensor) else left[0]


def collect_anchors(
    base: Path, expert: Path, out: Path, effort: Effort, on_progress: OnProgress
) -> list[tuple[float, float]]:
    """Write the Gram matrices of what an expert's linear layers see of its anchors.

    Args:
        base: folder of the base.
        expert: folder of the whole expert.
        out: the file of statistics.
        effort: what is spent.
        on_progress: called with the steps done and all steps.

    Returns:
        For each block the cosine of gradient and task vector, before and after.

    Raises:
        InputError: see `calls`.
    """
    with closing(open_checkpoint(base)) as start, closing(open_checkpoint(expert)) as end:
        origin, model = (load_model(each, "cpu", head=False) for each in (start, end))
        grams = GramCollector(model.layers())
        blocks = list(zip(calls(origin, effort), calls(model, effort), strict=True))
        cosines: list[tuple[float, float]] = []
        states = torch.empty(0)
        for number, (old, new) in enumerate(blocks):
            found, before, after = anchors(old, new, _width(model), effort, number)
            cosines.append((before, after))
            with torch.no_grad(), grams.watching({}):
                states = new(found)
            on_progress(number + 1, len(blocks))
        # What lies behind the blocks sees what leaves the last of them.
        pooler = getattr(model.backbone, "pooler", None)
        if pooler is not None:
            with torch.no_grad(), grams.watching({}):
                pooler(states)
        contents = Contents(
            end, {"gram": grams.statistics()}, effort.sequences, notes=grams.notes()
        )
        write_statistics({out: contents}, overwrite=True)
    return cosines


def anchors(
    old: Call, new: Call, width: int, effort: Effort, number: int = 0
) -> tuple[Tensor, float, float]:
    """Return the anchors `(sequences, length, width)` of a block, and the cosine before and after.

    Args:
        old: the base's block.
        new: the expert's.
        width: of what enters it.
        effort: what is spent.
        number: of the block, for the seed.
    """
    draw = torch.Generator().manual_seed(1000 * effort.seed + number)
    shape = (effort.sequences, effort.length, width)
    found = torch.randn(shape, generator=draw).requires_grad_()
    weights, ends = dict(old.block.named_parameters()), dict(new.block.named_parameters())
    target = {name: (ends[name] - weight).detach() for name, weight in weights.items()}
    optimizer: Any = torch.optim.AdamW([found], lr=effort.rate, weight_decay=0.0)
    first = 0.0
    for step in range(effort.steps):
        reached = _agreement(old, new, weights, target, found)
        first = reached.item() if step == 0 else first
        (found.grad,) = torch.autograd.grad(-reached, [found])
        optimizer.step()
    last = _agreement(old, new, weights, target, found).item()
    return found.detach(), first, last


def _agreement(
    old: Call,
    new: Call,
    weights: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    found: Tensor,
) -> Tensor:
    """cos(−∇_θ Σ (1 − cos(φ(θ, x), φ(θ_t, x))), θ_t − θ₀), with a graph to x."""
    free = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    ours, theirs = old(found, free), new(found)
    apart = (1 - nn.functional.cosine_similarity(ours, theirs, dim=-1)).sum()
    pulls = torch.autograd.grad(
        apart, list(free.values()), create_graph=True, allow_unused=True, materialize_grads=True
    )
    pairs = [(-pull, target[name]) for name, pull in zip(free, pulls, strict=True)]
    along = torch.stack([(pull * towards).sum() for pull, towards in pairs]).sum()
    pulled = torch.stack([pull.square().sum() for pull, _ in pairs]).sum()
    moved = torch.stack([towards.square().sum() for _, towards in pairs]).sum()
    return along / (pulled * moved + _NOTHING).sqrt()


def blocks_of(model: RunningModel) -> list[Any]:
    """Return the blocks of a model: its longest list of modules."""
    lists: Iterator[nn.ModuleList] = (
        module for module in model.backbone.modules() if isinstance(module, nn.ModuleList)
    )
    return list(max(lists, key=len))


def calls(model: RunningModel, effort: Effort) -> list[Call]:
    """Return a model's blocks, each with what it is given beside hidden states: positions, a mask.

    A model of text says that when it runs on so many tokens, whichever they are. The blocks of other
    models are given nothing.

    Raises:
        InputError: it runs its blocks otherwise than one after another, once each.
    """
    blocks = blocks_of(model)
    if model.whole.main_input_name != "input_ids":
        return [Call(block) for block in blocks]
    found: list[Call] = []

    def note(block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(Call(block, args[1:], named))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    shape = (effort.sequences, effort.length)
    try:
        with torch.no_grad():
            model.run({"input_ids": torch.zeros(shape, dtype=torch.long)})
    finally:
        for hook in hooks:
            hook.remove()
    if [call.block for call in found] != blocks:
        raise InputError(
            f"{model.checkpoint.source} runs {len(blocks)} blocks, and calls them {len(found)} times on "
            "tokens: anchors are made for models that call each once, in order"
        )
    return found


def _width(model: RunningModel) -> int:
    return cast("int", model.whole.config.hidden_size)
