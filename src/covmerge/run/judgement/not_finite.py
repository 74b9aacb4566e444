"""Experts that hold NaN or Inf nearly everywhere: no rule helps, as the output would be nearly the base."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from math import prod

from covmerge.base.errors import NotFiniteError, TensorError
from covmerge.base.findings import LOST, Finding, Severity
from covmerge.base.text import counted, some
from covmerge.base.types import LowRank
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.layers import layer_name
from covmerge.maths.linalg.stored import all_finite
from covmerge.plan.planning.operations import Copy
from covmerge.plan.planning.types import Plan

_LEAST = 0.5  # share of an expert's numbers that must be finite
_BLOCK_ELEMENTS = 2**20
_SAMPLED_ELEMENTS = (
    2**16
)  # of a tensor that a rule leaves to the base, and that is not read otherwise
_SHOWN = 3


@contextmanager
def naming_lost(experts: Mapping[str, Checkpoint]) -> Generator[None]:
    """Look an expert over whose tensor is not finite, before a rule for this tensor is advised.

    Raises:
        TensorError: it is so nearly everywhere; no rule is advised.
        NotFiniteError: it is so in a part of it.
    """
    try:
        yield
    except NotFiniteError as error:
        expert = None if error.expert is None else experts.get(error.expert)
        if expert is not None and error.expert is not None:
            bad = [name for name in _sizes(expert) if not _is_finite(expert, name)]
            if (finding := _of_most(error.expert, expert, bad)) is not None:
                raise TensorError(f"{finding.name}: {finding}") from error
        raise


def left_for_nan(plan: Plan, experts: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Say which experts have NaN or Inf in most of what rules of the recipe leave to the base.

    Of each such tensor the first rows are read.
    """
    left = [tensor.name for tensor in plan.tensors if isinstance(tensor.operation, Copy)]
    for key, expert in experts.items():
        sizes = _sizes(expert)
        bad = [name for name in left if name in sizes and not _is_finite(expert, name, whole=False)]
        if (finding := _of_most(key, expert, bad)) is not None:
            yield finding


def _of_most(key: str, expert: Checkpoint, bad: list[str]) -> Finding | None:
    """What is said if the other tensors are less than half, or none of the layers' matrices."""
    sizes = _sizes(expert)
    share = sum(sizes[name] for name in bad) / max(1, sum(sizes.values()))
    matrices = {name for name in sizes if layer_name(name) is not None and _is_matrix(expert, name)}
    if not bad or (share <= _LEAST and not (matrices and matrices <= {*bad})):
        return None
    text = (
        f"holds NaN or Inf in {counted(len(bad), 'tensor')} of {expert.source} "
        f"({some(bad, _SHOWN, quoted=True)}), which have {share:.0%} of its numbers: with the base's in "
        "their place the output would be nearly the base. Fetch the checkpoint again; if that is what was "
        "trained, pass a checkpoint from before the training diverged, or leave the expert out"
    )
    return Finding(Severity.FAULT, text, key, tuple(bad), LOST)


def _sizes(expert: Checkpoint) -> dict[str, int]:
    """How many numbers are stored of each tensor, of those that can be NaN."""
    sizes = {n: prod(h.shape) for n, h in expert.headers.items() if h.dtype.is_floating_point}
    return sizes | {name: factors.elements for name, factors in expert.low_rank.items()}


def _is_matrix(expert: Checkpoint, name: str) -> bool:
    return name not in expert.headers or len(expert.headers[name].shape) > 1


def _is_finite(expert: Checkpoint, name: str, *, whole: bool = True) -> bool:
    if name not in expert.headers:
        update = expert.read_update(name)
        factors = (update,) if isinstance(update, LowRank) else update
        return all(all_finite(one.left) and all_finite(one.right) for one in factors)
    blocks = expert.headers[name].row_blocks(_BLOCK_ELEMENTS if whole else _SAMPLED_ELEMENTS)
    found = (all_finite(expert.read(name, rows)) for rows in blocks)
    return all(found) if whole else next(found)
