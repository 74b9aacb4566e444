"""A check that the tensors of an expert reach the output, even if the recipe allows their loss."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from covmerge.base.errors import TensorError
from covmerge.base.findings import LOST
from covmerge.base.settings import rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Role
from covmerge.files.checkpoints.beside import modules_of
from covmerge.plan.planning.models import Model

_LAYERS = (Role.LINEAR, Role.CONV1D, Role.CONV, Role.EXPERT_STACK)
_LEAST = 0.5  # least share of an expert's parameters that must have a place in the output
_CHANCE = 4  # number of tensors that do not share the shapes of others by chance
_SHOWN = 3
_DIRECTION = re.compile(r"direction\.\d+")  # name in llama.cpp's control vectors


def check_reached(
    base: Model,
    expert: Model,
    placed: Mapping[str, str],
    unplaced: Collection[str],
    missing: Collection[str],
) -> None:
    """Raise if the output would contain almost nothing of an expert's updates.

    Args:
        base: the base.
        expert: the expert.
        placed: by the base's name, the expert's tensor that it is merged with, or that is kept beside it.
        unplaced: the expert's tensors without a counterpart in the base; a task head is kept, not lost.
        missing: the base's tensors that the expert lacks.

    Raises:
        TensorError: less than half of the expert's parameters have a place in the base; or, for a
            full model, less than half of the base's are in the expert; or none of its layers has a
            place; or tensors that it lacks may be lost ones under other names. Only rules that name
            the lost tensors allow this.
    """
    lost = [n for n in unplaced if not expert.description.tensors[n].outside_backbone]
    if not lost:
        return
    sizes = {name: header.elements for name, header in expert.checkpoint.low_rank.items()}
    sizes |= {name: header.numel for name, header in expert.headers.items()}
    every = sum(sizes[name] for name in (*placed.values(), *lost))
    share, whose = 1 - sum(sizes[name] for name in lost) / max(1, every), "its"
    is_model = not expert.checkpoint.is_adapter
    if is_model:
        reached, lacking = (
            sum(base.headers[name].numel for name in names) for names in (placed, missing)
        )
        if reached < share * (reached + lacking):
            share, whose = reached / (reached + lacking), "the base's"
    layers = any(base.description.tensors[name].role in _LAYERS for name in placed)
    has_layers = any(len(expert.headers[name].shape) > 1 for name in lost)
    nearly_the_base = share < _LEAST or (has_layers and not layers)
    renamed = _renamed(base, missing, expert, lost)
    if not nearly_the_base and not renamed:
        return
    modules = set[str]() if placed else modules_of(base.headers)
    if all(_DIRECTION.fullmatch(name) or name in modules for name in lost):
        raise TensorError(
            f"{expert} has vectors that are named by layers, such as '{lost[0]}': a control vector, which "
            "is added to what layers give, and no weight. Leave it out, and give it to what runs the "
            "output; such files are averaged with one another by a recipe with `base: null` and `method: "
            "linear`"
        )
    whole = layers and not missing and is_model
    said = (
        f"The expert lacks {_some(renamed)}, of the same shapes as what is left out, which could be these "
        "under other names. "
        if renamed
        else ""
    )
    raise TensorError(
        f"{LOST}: {expert} would lose {counted(len(lost), 'tensor')}: {_some(lost)} are no names of "
        f"{base}, which has {_some(base.headers)}. {100 * share:.0f} % of {whose} parameters would be "
        f"merged. {said}{_way_out(lost, whole, nearly_the_base)}"
    )


def _way_out(lost: Collection[str], whole: bool, nearly_the_base: bool) -> str:
    """Return advice, which depends on whether the whole base would be merged with the expert."""
    rename = (
        "Rename the expert's tensors to the base's names, or pass the base that it was trained from"
    )
    if nearly_the_base and not whole:
        return f"Such a merge is nearly the base, and no setting allows it. {rename}"
    if whole:
        merged, otherwise = "All that the base has would be merged", "no part that the base lacks"
    else:
        merged = "What is left out is lost"
        otherwise = "one that the expert lacks, under another name"
    return (
        f"{merged}, and no setting allows it except one that names what is left out, such as "
        f"{rules_for(next(iter(lost)))}; `*` stands for any part of a name. If it is {otherwise}: "
        f"{rename[0].lower()}{rename[1:]}"
    )


def _renamed(
    base: Model, missing: Collection[str], expert: Model, lost: Collection[str]
) -> list[str]:
    """Return missing tensors that may be lost ones under other names, if they are half or more, else none.

    A few shapes may agree by chance, so a few tensors must have similar names too.
    """
    by_shape: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in lost:
        by_shape[expert.headers[name].shape].append(name)
    shapes = {name: base.headers[name].shape for name in missing}
    matching = Counter(shapes.values()) & Counter({s: len(n) for s, n in by_shape.items()})
    found = [name for name in missing if shapes[name] in by_shape]
    if matching.total() < _CHANCE:
        alike = ((n, any(_are_near(n, o) for o in by_shape[shapes[n]])) for n in found)
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


def _some(names: Collection[str]) -> str:
    return some(names, _SHOWN, quoted=True)
