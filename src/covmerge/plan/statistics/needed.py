"""Memory for running models and for the sums of their layers, estimated before they are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch

from covmerge.base.errors import ResourceError
from covmerge.base.memory import allowance
from covmerge.base.types import Role
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.describe import describe_checkpoint
from covmerge.files.tensors.remembered import remembered_skeleton
from covmerge.files.tensors.skeleton import SkeletonUnavailable
from covmerge.files.tensors.views import matrix_shapes
from covmerge.plan.statistics.examples import MADE, Batch, size_of
from covmerge.plan.statistics.generated import LONG
from covmerge.plan.statistics.model import OUTSIDE, unread

_BESIDE = 512 * 2**20  # for transformers, and a batch on its way through the model
_SUM = torch.float64.itemsize
_VALUE = torch.float32.itemsize
_HELD = 4  # tensors of the size of a batch's hidden states that are held while the batch waits
_AROUND = 8  # tokens at most, before a text and after it
_TEMPLATE = 64  # tokens of a usual chat template
_LOGITS = 3  # as returned, as changed for sampling, as probabilities
_ALWAYS = "*"  # stands for a block: in memory while any block is run
_GIB = 2**30
_MOST = 2**40


def memory_needed(model: Checkpoint, *, grams: bool = True, fisher: bool = False) -> int:
    """Return an upper bound of the memory for running a model to observe its layers' inputs.

    It covers the weights as stored and in float32, and a sum for every layer. Layers with the same
    input share a sum, but which layers these are is known only when they are called. A batch is
    assumed to be small. The memory of the process itself is not included. Fisher information is summed
    for each weight, and needs gradients.
    """
    headers = model.headers.values()
    total = _BESIDE + sum(h.nbytes + h.numel * _VALUE for h in headers)
    if grams:
        total += sum(_SUM * d_in**2 for _, d_in in _inputs(model))
    if fisher:
        total += sum(h.numel * (_SUM + _VALUE) for h in headers)
    return total


@dataclass(frozen=True)
class _Parts:
    """The memory of a model that is run block by block, in bytes."""

    always: int  # of everything outside of blocks, with its sums
    block: int  # of the largest block with its sums, and of what one batch adds to a sum
    width: int  # size of the hidden states between blocks


def memory_by_block(model: Checkpoint, examples: int = MADE) -> int:
    """Return an upper bound of the memory for running a model block by block; see `Blocks`.

    All inputs on their way count too, for the kind of inputs drawn for the model.
    """
    try:
        parts = _parts(model)
    except SkeletonUnavailable:  # running it will raise the error
        return memory_needed(model)
    on_the_way = examples * _VALUE * _values(model.config or {}, parts.width)
    return _BESIDE + parts.always + parts.block + on_the_way


def memory_of_batches(model: Checkpoint, batches: Sequence[Batch]) -> int:
    """Return the memory still needed for blocks and batches on their way, when all else is in memory."""
    try:
        parts = _parts(model)
    except SkeletonUnavailable:
        return _BESIDE
    each = _values(model.config or {}, parts.width)
    values = 0
    for batch in batches:
        ids = batch.get("input_ids")
        values += size_of(batch) * each if ids is None else ids.numel() * _HELD * parts.width
    return _BESIDE + parts.block + _VALUE * values


def _parts(model: Checkpoint) -> _Parts:
    skeleton = remembered_skeleton(model.headers, model.config or {})
    later = unread(skeleton, model.headers)
    of_block: Counter[str] = Counter()
    widest, width = 0, 0
    for name, header in model.headers.items():
        of_block[later.get(name, _ALWAYS)] += header.nbytes + header.numel * _VALUE
    for name, d_in in _inputs(model):
        block = later.get(name, _ALWAYS)
        of_block[block] += _SUM * d_in**2
        if block != OUTSIDE:
            widest = max(widest, d_in)
            width = max(width, min(model.headers[name].shape[-2:]))
    always, _ = of_block.pop(_ALWAYS, 0), of_block.pop(OUTSIDE, 0)
    return _Parts(always, max(of_block.values(), default=0) + _VALUE * widest**2, width)


def memory_of_text(config: Mapping[str, Any], tokens: int) -> int:
    """Return roughly the memory of one text that a language model writes, and is then watched on.

    It covers keys and values of all layers, one layer's states, attention between all tokens, and
    the probabilities of a token. Sizes missing in the config count as 0.
    """
    width = _number(config, "hidden_size", "n_embd")
    layers = _number(config, "num_hidden_layers", "n_layer")
    inner = _number(config, "intermediate_size") or 4 * width
    states = 2 * layers * width + 2 * _HELD * width + _HELD * inner
    heads = _number(config, "num_attention_heads", "n_head")
    scores = 2 * heads * tokens**2
    return _VALUE * (tokens * states + scores + _LOGITS * _number(config, "vocab_size"))


def texts_at_once(
    config: Mapping[str, Any], tokens: int, needed: int, max_memory: int | None, most: int
) -> int:
    """Return how many texts, at most `most`, a language model can write at once; 0 if not even one.

    `tokens` are those to write for each, without a chat template's; `needed` are the bytes of the model
    and its sums.
    """
    each = memory_of_text(config, tokens + _TEMPLATE)
    count = most
    while count and not fits(needed + count * each, max_memory):
        count //= 2
    return count


def _number(config: Mapping[str, Any], *names: str) -> int:
    """Return a size from a config or its text config; 0 if there is no valid one."""
    within: Any = config.get("text_config")
    places = [config, cast("Mapping[str, Any]", within)] if isinstance(within, dict) else [config]
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, int) and 0 < value < _MOST:
                return value
    return 0


def _inputs(model: Checkpoint) -> Iterator[tuple[str, int]]:
    """Yield the names of the backbone's linear layers, with the sizes of their inputs."""
    described = describe_checkpoint(model).tensors
    for name, header in model.headers.items():
        info = described[name]
        if info.role in (Role.LINEAR, Role.CONV1D) and not info.outside_backbone:
            yield name, matrix_shapes(header.shape, info.layout)[0][1]


def _values(config: Mapping[str, Any], width: int) -> int:
    """Return how many numbers are held of one input on its way through a model."""
    side, patch = config.get("image_size"), config.get("patch_size", 1)
    first = config.get("embed_dim", width)  # for models whose pictures shrink on the way
    if isinstance(side, int) and isinstance(patch, int) and isinstance(first, int) and patch > 0:
        return 3 * side**2 + _HELD * ((side // patch) ** 2 + 1) * first
    return _HELD * (sum(LONG) // len(LONG) + _AROUND) * width


def fits(needed: int, max_memory: int | None) -> bool:
    """Return whether `needed` bytes fit in addition to the memory of the process."""
    allowed = allowance(max_memory)
    return needed + (psutil.Process().memory_info().rss if allowed.in_all else 0) <= allowed.size


def check_memory(needed: int, max_memory: int | None, what: str, otherwise: str) -> None:
    """Raise if `what` does not fit into memory in addition to the process; the advice is `otherwise`."""
    if not fits(needed, max_memory):
        allowed = allowance(max_memory)
        if allowed.in_all:
            needed += psutil.Process().memory_info().rss
        raise ResourceError(
            f"{what} take up to {needed / _GIB:.3g} GiB, and {allowed.size / _GIB:.3g} GiB "
            f"{allowed.given}: {otherwise}"
        )
