"""Whether what an expert stores reaches the output, whatever the recipe lets pass."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import prod

from covmerge.base.errors import TensorError
from covmerge.base.findings import LOST
from covmerge.base.settings import rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Role, TensorHeader
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.beside import modules_of
from covmerge.files.tensors.describe import ModelDescription

_LAYERS = (Role.LINEAR, Role.CONV1D, Role.CONV, Role.EXPERT_STACK)
_LEAST = 0.5  # share of an expert's parameters that must have a place in the output
_CHANCE = 4  # so many tensors do not have the shapes of others by chance
_SHOWN = 3
_DIRECTION = re.compile(r"direction\.\d+")  # of llama.cpp's control vectors


def check_reached(
    base: Checkpoint,
    described: ModelDescription,
    expert_name: str,
    expert: Checkpoint,
    *,
    sizes: Mapping[str, int],
    placed: Mapping[str, str],
    lost: Collection[str],
    missing: Collection[str],
) -> None:
    """Refuse an expert of whose updates the output would have next to nothing.

    Args:
        base: the base.
        described: what the base's tensors are.
        expert_name: of the expert.
        expert: its checkpoint.
        sizes: how many numbers the expert stores of each tensor, of those that count.
        placed: the expert's name by that of the base's tensor that it is merged with, or kept beside.
        lost: names in the expert of what no tensor of the base takes up.
        missing: the base's names that the expert lacks.

    Raises:
        TensorError: less than half of its parameters have a place in the base, or of the base's in a full
            expert, or none of its layers has; or what it lacks may be what is left out, under another name.
            No setting allows that except rules that name what is left out.
    """
    if not lost:
        return
    every = sum(sizes[name] for name in (*placed.values(), *lost))
    share, whose = 1 - sum(sizes[name] for name in lost) / max(1, every), "its"
    is_model = not expert.is_adapter
    if is_model:
        reached, lacking = (sum(_size(base, name) for name in names) for names in (placed, missing))
        if reached < share * (reached + lacking):
            share, whose = reached / (reached + lacking), "the base's"
    layers = any(described.tensors[name].role in _LAYERS for name in placed)
    has_layers = any(len(_shape(expert, name)) > 1 for name in lost)
    nearly_the_base = share < _LEAST or (has_layers and not layers)
    renamed = _renamed(base, missing, expert, lost)
    if not nearly_the_base and not renamed:
        return
    modules = set[str]() if placed else modules_of(base.headers)
    if all(_DIRECTION.fullmatch(name) or name in modules for name in lost):
        raise TensorError(
            f"expert '{expert_name}' ({expert.source}) has vectors that are named by layers, such as "
            f"'{next(iter(lost))}': a control vector, which is added to what layers give, and no weight. "
            "Leave it out, and give it to what runs the output; such files are averaged with one another "
            "by a recipe with `base: null` and `method: linear`"
        )
    whole = layers and not missing and is_model
    raise TensorError(
        f"{LOST}: expert '{expert_name}' ({expert.source}) would lose {counted(len(lost), 'tensor')}: "
        f"{_some(lost)} are no names of the base ({base.source}), which has {_some(base.headers)}. "
        f"{100 * share:.0f} % of {whose} parameters would be merged. {_said_of(renamed)}"
        f"{_way_out(lost, whole, nearly_the_base)}"
    )


def _said_of(renamed: Sequence[str]) -> str:
    if not renamed:
        return ""
    return (
        f"The expert lacks {_some(renamed)}, of the same shapes as what is left out, which could be these "
        "under other names. "
    )


def _way_out(lost: Collection[str], whole: bool, nearly_the_base: bool) -> str:
    """Say what to do, where all of the base would be merged with the expert, and where it would not."""
    rename = (
        "Rename the expert's tensors to the base's names, or pass the base that it was trained from"
    )
    if nearly_the_base and not whole:
        return f"Such a merge is nearly the base, and no setting allows it. {rename}"
    if whole:
        merged, otherwise = (
            "All that the base has would be merged, and no",
            "no part that the base lacks",
        )
    else:
        merged, otherwise = (
            "What is left out is lost, and no",
            "one that the expert lacks, under another name",
        )
    return (
        f"{merged} setting allows it except one that names what is left out, such as "
        f"{rules_for(next(iter(lost)))}; `*` stands for any part of a name. If it is {otherwise}: "
        f"{rename[0].lower()}{rename[1:]}"
    )


def _renamed(
    base: Checkpoint, missing: Collection[str], expert: Checkpoint, lost: Collection[str]
) -> list[str]:
    """What the expert lacks and may have under another name: half of it at least, or nothing.

    One of few shapes agrees with a stranger's by chance, so a few must have names that agree in part.
    """
    by_shape: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in lost:
        by_shape[_shape(expert, name)].append(name)
    matching = Counter(_shape(base, n) for n in missing) & Counter(_shape(expert, n) for n in lost)
    found = [name for name in missing if _shape(base, name) in by_shape]
    if matching.total() < _CHANCE:
        alike = ((n, any(_are_near(n, o) for o in by_shape[_shape(base, n)])) for n in found)
        found = [name for name, near in alike if near]
        matching = Counter(found)
    return found if missing and 2 * matching.total() >= len(missing) else []


def _are_near(one: str, other: str) -> bool:
    """Whether two names agree, from their beginning and from their end, in half of their parts.

    Example:
        >>> _are_near("norm.weight", "norm.gamma"), _are_near("final.norm.weight", "other.scale.weight")
        (True, False)
    """
    left, right = one.split("."), other.split(".")
    ahead = _agreeing(left, right)
    behind = _agreeing(left[ahead:][::-1], right[ahead:][::-1])
    return 2 * (ahead + behind) >= min(len(left), len(right))


def _agreeing(left: Sequence[str], right: Sequence[str]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def _size(checkpoint: Checkpoint, name: str) -> int:
    return prod(_shape(checkpoint, name))


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    header: TensorHeader | None = checkpoint.headers.get(name)
    return () if header is None else header.shape


def _some(names: Collection[str]) -> str:
    return some(names, _SHOWN, quoted=True)
