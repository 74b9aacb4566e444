"""Findings on values that cannot be merged: integers unlike the base's, and NaN or Inf."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

from covmerge.base.errors import NotFiniteError, TensorError
from covmerge.base.findings import LOST, Finding, Severity
from covmerge.base.settings import rules_for
from covmerge.base.text import counted, of_all_layers, some
from covmerge.base.types import Json, LowRank
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.names import layer_name
from covmerge.maths.linalg.stored import all_finite
from covmerge.plan.planning.operations import Copy
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import TensorPlan

# Tensors that are not floating point are copied from the base: which experts differ, and does it matter?

# Tensors that no output needs from an expert, by the last part of their names. `num_batches_tracked` is
# BatchNorm's count of training batches, which it reads only if it has no momentum. The others are index
# tables that the model's code makes from its config.
HARMLESS = {
    "num_batches_tracked": "counters of training batches",
    "position_ids": "tables of positions",
    "relative_position_index": "tables of positions",
}
_SHOWN = 5
_LEAST = 0.5  # an expert is lost if more than this share of its numbers cannot be merged


def changed_integers(
    plan: Plan, done: Sequence[Mapping[str, Json]], whose: str
) -> Iterator[Finding]:
    """Say which experts have other values than the output in tensors of integers or truth values."""
    found = _differing(plan, done)
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    scales = {t.name: t.operation.scale for t in plan.tensors if isinstance(t.operation, Copy)}
    for expert in plan.recipe.experts:
        names = [name for name, experts in found.items() if expert in experts]
        lost = [name for name in names if _harmless(tensors[name]) is None]
        share = _numbers(map(tensors.__getitem__, lost)) / max(1, _numbers(plan.tensors))
        if share > _LEAST:
            yield _integers_of_most(expert, lost, share, whose)
            continue
        codes = [name for name in names if scales[name]]
        if codes:
            yield _of_codes(expert, codes, scales, whose)
        others = {name: _harmless(tensors[name]) for name in names if not scales[name]}
        strange = [name for name, meaning in others.items() if meaning is None]
        if strange:
            yield _of_integers(expert, strange, whose)
        for meaning in dict.fromkeys(filter(None, others.values())):
            same = tuple(name for name in others if others[name] == meaning)
            text = (
                f"has other values in {counted(len(same), 'tensor')} ({some(same, 1, quoted=True)}), "
                f"{meaning}: the output has those of {whose}"
            )
            yield Finding(Severity.NOTE, text, expert, same)


def _differing(plan: Plan, done: Sequence[Mapping[str, Json]]) -> dict[str, set[str]]:
    """Return by tensor the experts that have another shape or other values, if any do."""
    found = {
        tensor.name: set(tensor.operation.reshaped)
        for tensor in plan.tensors
        if isinstance(tensor.operation, Copy) and tensor.operation.compared
    }
    for item, facts in zip(plan.items, done, strict=True):
        if "differ" in facts:
            found[item.tensor.name].update(cast("Sequence[Any]", facts["differ"]))
    return {name: experts for name, experts in found.items() if experts}


def _integers_of_most(expert: str, names: Sequence[str], share: float, whose: str) -> Finding:
    """Return a fault that no rule and no `allow` lifts: hardly any number would be merged."""
    text = (
        f"has other values than {whose} in {counted(len(names), 'integer tensor')} "
        f"({some(names, _SHOWN, quoted=True)}), {share:.0%} of all numbers, and integers are not merged: "
        f"the output would be nearly {whose}. Give the models in a floating-point dtype"
    )
    return Finding(Severity.FAULT, text, expert, tuple(names), LOST)


def _of_codes(expert: str, codes: Sequence[str], scales: Mapping[str, str], whose: str) -> Finding:
    first = codes[0]
    text = (
        f"has other values than {whose} in {counted(len(codes), 'integer tensor')} "
        f"({some(codes, _SHOWN, quoted=True)}), and '{scales[first]}' beside '{first}' would be merged: "
        "these look like quantised weights and their scales, in a format that is not read. Give "
        "the models in a floating-point dtype, or leave both tensors to the base by "
        f"{rules_for(of_all_layers(first), of_all_layers(scales[first]))}"
    )
    return Finding(Severity.FAULT, text, expert, tuple(codes))


def _of_integers(expert: str, names: Sequence[str], whose: str) -> Finding:
    text = (
        f"has other values than {whose} in {counted(len(names), 'tensor')} of integers or truth values, "
        f"which are not merged: {some(names, _SHOWN, quoted=True)}. The output would have those of "
        f"{whose}. If that is right, say it by "
        f"{rules_for(of_all_layers(names[0]))}"
    )
    return Finding(Severity.FAULT, text, expert, tuple(names), "changed-integers")


def _numbers(tensors: Iterable[TensorPlan]) -> int:
    return sum(prod(tensor.stored.shape) for tensor in tensors)


def _harmless(tensor: TensorPlan) -> str | None:
    """Return what a tensor is if no output needs it from an expert, else None."""
    made_again = "buffers that are made again when the model is loaded"
    return HARMLESS.get(tensor.name.rpartition(".")[2], made_again if tensor.info.rebuilt else None)


# Experts with NaN or Inf nearly everywhere: no rule helps, as the output would be nearly the base.

_BLOCK_ELEMENTS = 2**20
# Elements that are read from a tensor that a rule leaves to the base; otherwise it would not be read.
_SAMPLED_ELEMENTS = 2**16
_LISTED = 3


@contextmanager
def naming_lost(experts: Mapping[str, Checkpoint]) -> Generator[None]:
    """Check a whole expert once one of its tensors is not finite, before the error advises a rule.

    Raises:
        TensorError: the expert is not finite nearly everywhere; no rule is advised.
        NotFiniteError: the expert is not finite in some tensors.
    """
    try:
        yield
    except NotFiniteError as error:
        expert = None if error.expert is None else experts.get(error.expert)
        if expert is not None and error.expert is not None:
            bad = [name for name in _sizes(expert) if not _is_finite(expert, name)]
            if (finding := _not_finite_of_most(error.expert, expert, bad)) is not None:
                raise TensorError(f"{finding.name}: {finding}") from error
        raise


def left_for_nan(plan: Plan, experts: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield a fault for each expert with NaN or Inf in most of its weights, which rules leave to the base.

    Only the first rows of each of these tensors are read.
    """
    left = [tensor.name for tensor in plan.tensors if tensor.operation.copies]
    for key, expert in experts.items():
        sizes = _sizes(expert)
        bad = [name for name in left if name in sizes and not _is_finite(expert, name, whole=False)]
        if (finding := _not_finite_of_most(key, expert, bad)) is not None:
            yield finding


def _not_finite_of_most(key: str, expert: Checkpoint, bad: list[str]) -> Finding | None:
    """Return a fault if `bad` has over half of the expert's numbers, or every layer's matrix, else None."""
    sizes = _sizes(expert)
    share = sum(sizes[name] for name in bad) / max(1, sum(sizes.values()))
    vectors = {name for name, header in expert.headers.items() if len(header.shape) < 2}
    matrices = {name for name in sizes.keys() - vectors if layer_name(name) is not None}
    if not bad or (share <= _LEAST and not (matrices and matrices <= {*bad})):
        return None
    text = (
        f"holds NaN or Inf in {counted(len(bad), 'tensor')} of {expert.source} "
        f"({some(bad, _LISTED, quoted=True)}), which have {share:.0%} of its numbers: with the base's in "
        "their place the output would be nearly the base. Fetch the checkpoint again; if that is what was "
        "trained, pass a checkpoint from before the training diverged, or leave the expert out"
    )
    return Finding(Severity.FAULT, text, key, tuple(bad), LOST)


def _sizes(expert: Checkpoint) -> dict[str, int]:
    """Return the number of stored elements of each floating-point tensor and each low-rank update."""
    sizes = {n: prod(h.shape) for n, h in expert.headers.items() if h.dtype.is_floating_point}
    return sizes | {name: factors.elements for name, factors in expert.low_rank.items()}


def _is_finite(expert: Checkpoint, name: str, *, whole: bool = True) -> bool:
    if name not in expert.headers:
        update = expert.read_update(name)
        factors = (update,) if isinstance(update, LowRank) else update
        return all(all_finite(one.left) and all_finite(one.right) for one in factors)
    blocks = expert.headers[name].row_blocks(_BLOCK_ELEMENTS if whole else _SAMPLED_ELEMENTS)
    found = (all_finite(expert.read(name, rows)) for rows in blocks)
    return all(found) if whole else next(found)
