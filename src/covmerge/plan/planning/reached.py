"""A check that the tensors of an expert reach the output, even if the recipe allows their loss."""

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
_LEAST = 0.5  # least share of an expert's parameters that must have a place in the output
_CHANCE = 4  # number of tensors that do not share the shapes of others by chance
_SHOWN = 3
_DIRECTION = re.compile(r"direction\.\d+")  # name in llama.cpp's control vectors


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
    """Raise if the output would contain almost nothing of an expert's updates.

    Args:
        base: the base.
        described: description of the base's tensors.
        expert_name: name of the expert.
        expert: its checkpoint.
        sizes: for each of the expert's tensors that count, the number of its stored numbers.
        placed: by the base's name, the expert's tensor that it is merged with, or that is kept
            beside it.
        lost: the expert's names of tensors that have no counterpart in the base.
        missing: the base's names of tensors that the expert lacks.

    Raises:
        TensorError: less than half of the expert's parameters have a place in the base; or, for a
            full model, less than half of the base's are in the expert; or none of its layers has a
            place; or tensors that it lacks may be lost ones under other names. Only rules that name
            the lost tensors allow this.
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
    """Return advice, which depends on whether the whole base would be merged with the expert."""
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
    """Return missing tensors that may be lost ones under other names, if they are half or more, else none.

    A few shapes may agree by chance, so a few tensors must have similar names too.
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
    """Return whether two names agree, from the beginning and from the end, in half of their parts.

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
