"""Reads the rows of an item and turns them into updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import NotFiniteError, TensorError
from covmerge.base.settings import Hint, rules_for
from covmerge.base.threads import ThreadPool
from covmerge.base.types import LowRank, Measured
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.maths.linalg.lapack import dot, square_norm
from covmerge.maths.measures.rounding import rounded_to
from covmerge.plan.planning.data import Statistics
from covmerge.plan.planning.operations import Inspect, Operand
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.thread_count import use_threads

# An adapter has factors of each matrix of a stack.
Stored = Tensor | LowRank | tuple[LowRank, ...]
# None: the expert has nothing for these rows, which counts as unchanged.
Update = Stored | None

_AT_ONCE = 8  # sources on other machines that are read at the same time


@dataclass(frozen=True)
class Sources:
    """The checkpoints (by `Operand.source`) and the statistics files (by expert) that a run reads."""

    checkpoints: Mapping[str, Checkpoint]
    statistics: Statistics = field(default_factory=dict[str, Any])

    def read(self, operand: Operand, rows: range | None) -> Update:
        """Read the rows of an operand; for an adapter, the factors of its update."""
        if operand.tensor is None:
            return None
        checkpoint = self.checkpoints[operand.source]
        if operand.tensor in checkpoint.low_rank:
            return checkpoint.read_update(operand.tensor, rows)
        return checkpoint.read(operand.tensor, operand.held(rows))

    def together(self, reads: Sequence[tuple[str, Callable[[], Update]]]) -> list[Update]:
        """Do reads, each given with the key of its source; those from other machines at the same time.

        A network link can carry more than the rows of one source. Sources on this machine, and sources that
        are dequantised while they are read, are read in turn: the plan counts the workspace of one read.
        """
        far = [key in self.checkpoints and self.checkpoints[key].is_far for key, _ in reads]
        if sum(far) < 2:
            return [read() for _, read in reads]
        with ThreadPool(_AT_ONCE, "covmerge-far", use_threads, (1,)) as pool:
            begun = [
                pool.submit(read) if is_far else None
                for is_far, (_, read) in zip(far, reads, strict=True)
            ]
            return [
                read() if future is None else future.result()
                for future, (_, read) in zip(begun, reads, strict=True)
            ]

    def read_packed(self, item: WorkItem) -> tuple[Tensor, ...]:
        """Read the base's packed tensors of an item's rows; () unless the output packs them alike."""
        base = item.tensor.base
        own = None if base is None else self.checkpoints[base.source].quantisation
        return () if own is None else item.tensor.form.read_stored(own.stored.read, item.rows)


@dataclass(frozen=True)
class Inputs:
    """Stored rows of one work item, on the CPU, or already on the device (`covmerge.run.engine.transfer`).

    The computation removes entries of `experts` one by one, so that stored rows and their updates are
    not all in memory together.

    Attributes:
        base: rows of the base; on the meta device (without content) where they were not read.
        experts: rows by expert; for an adapter, the factors of its update.
        merged: rows of the merged model that is inspected.
        measured: statistics by kind, then by expert.
        known: findings of the tensor pass for these rows, by expert.
        sources: only before a tensor pass, which reads the tensor itself; the other fields are then empty.
        packed: the base's packed tensors of these rows, where the output is packed in the same way.
    """

    base: Tensor
    experts: dict[str, Update]
    measured: Mapping[str, Mapping[str, Measured]] = field(
        default_factory=dict[str, Mapping[str, Measured]]
    )
    merged: Update = None
    known: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: Sources | None = None
    packed: tuple[Tensor, ...] = ()

    def rounded_to(self) -> dict[str, torch.dtype]:
        """Return the dtype that each expert's weights were rounded to; adapters are left out."""
        return {n: rounded_to(w) for n, w in self.experts.items() if isinstance(w, Tensor)}


@dataclass(frozen=True)
class Sizes:
    """Square norms of the updates of some rows, and dot products with the base; both can be added up."""

    updates: dict[str, float]  # ‖Δ_t‖² by expert
    along: dict[str, float]  # ⟨Δ_t, W_0⟩ by expert, for experts that are no adapters
    base: float  # ‖W_0‖²; 0 where `along` is empty


def read_inputs(items: Sequence[WorkItem], sources: Sources) -> Inputs:
    """Read the operands of a batch (one item for each plan) in their stored dtypes."""
    first = items[0]
    if first.tensor_pass:
        return Inputs(torch.empty(0), {}, sources=sources)
    merging = [item for item in items if not item.tensor.operation.copies]
    reading = merging or [item for item in items if item.tensor.operation.compared]
    base = next((item.tensor.base for item in items if item.tensor.base is not None), None)
    packed = next((stored for item in items if (stored := sources.read_packed(item))), ())
    as_stored = (
        bool(packed) and not reading
    )  # packed rows that are copied are compared with nothing

    operands: Mapping[str, Operand] = reading[0].tensor.operands if reading else {}
    of_base = () if base is None or as_stored else (base,)
    # Without a base, an expert's tensor stands for the base's; it is read once.
    wanted = dict.fromkeys([*of_base, *operands.values()])
    read = [(operand.source, partial(sources.read, operand, first.rows)) for operand in wanted]
    found = dict(zip(wanted, sources.together(read), strict=True))
    unread = torch.empty(first.shape, dtype=first.tensor.stored.dtype, device="meta")
    base_rows = found[base] if base is not None and of_base else unread
    assert isinstance(base_rows, Tensor)
    rows = {expert: found[operand] for expert, operand in operands.items()}
    if not merging:
        return Inputs(base_rows, rows, packed=packed)
    tensor = merging[0].tensor
    operation = tensor.operation
    of_merged = operation.merged if isinstance(operation, Inspect) else None
    merged = sources.read(of_merged, first.rows) if of_merged else None
    measured: dict[str, dict[str, Measured]] = {}
    for item in merging:
        if not item.tensor.statistics or item.tensor.merge is None:
            continue
        kind = item.tensor.merge.procedure.data
        if kind not in measured:
            measured[kind] = {
                expert: _read_measured(kind, sources, expert, name, item)
                for expert, name in item.tensor.statistics.items()
            }
    return Inputs(base_rows, rows, measured, merged, packed=packed)


def in_parts(
    item: WorkItem, inputs: Inputs, device: torch.device
) -> Iterator[tuple[WorkItem, Inputs]]:
    """Divide an item and its inputs into parts of `at_once` rows, which are merged one after another.

    An accelerator gets the whole item: small parts would gain no cache there, and every call costs time.
    """
    rows, step = item.rows, item.at_once
    if device.type != "cpu" or rows is None or step is None or step >= len(rows):
        yield item, inputs
        return
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        experts: dict[str, Update] = {}
        for expert, stored in inputs.experts.items():
            assert stored is None or isinstance(stored, Tensor), "the plan divides tensors only"
            experts[expert] = None if stored is None else stored[part]
        measured = {
            kind: {expert: replace(stat, value=stat.value[part]) for expert, stat in found.items()}
            for kind, found in inputs.measured.items()
        }
        yield replace(item, rows=rows[part]), Inputs(inputs.base[part], experts, measured)


def _read_measured(kind: str, sources: Sources, expert: str, name: str, item: WorkItem) -> Measured:
    file = sources.statistics[expert]
    # A Gram matrix belongs to the whole tensor, Fisher information to each of its elements.
    rows = None
    if kind == "fisher" and item.rows is not None:
        held = file.header(kind, name).shape[0]
        rows = range(min(item.rows.start, held), min(item.rows.stop, held))
    return Measured(file.read(kind, name, rows), file.rows(kind, name), file.total(kind))


def take_updates(
    item: WorkItem,
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device,
    models: dict[str, Tensor] | None = None,
    *,
    keep: bool = True,
) -> tuple[dict[str, Update], Sizes]:
    """Turn the stored rows of the experts into updates, with their sizes.

    The experts' rows are removed from `inputs`. `models` receives the experts' weights W_t as they are
    stored, for methods that see weights. Unless `keep`, the updates are measured and dropped (None in the
    result).

    Raises:
        NotFiniteError: the base or an expert has NaN or Inf, or an update overflows.
        TensorError: float64 weights are too small for the dtype of the computation.
    """
    base = inputs.base if inputs.base.is_meta else inputs.base.to(device).to(dtype)
    updates: dict[str, Update] = {}
    squares: dict[str, float] = {}
    along: dict[str, float] = {}
    for expert in list(inputs.experts):
        stored = inputs.experts.pop(expert)
        if models is not None and isinstance(stored, Tensor):
            models[expert] = _weights(stored.to(device), inputs.base.to(device))
            update = models[expert].to(dtype) - base
        else:
            update = None if stored is None else _update(stored, base, dtype, device)
            if models is not None:
                whole = None if update is None else dense(update, base, dtype, device)
                models[expert] = base if whole is None else base + whole
        updates[expert] = update if keep else None
        squares[expert] = _square(update)
        if stored is not None and not isfinite(squares[expert]):
            _name_what_is_not_finite(
                item, inputs.base, expert, stored, dtype, in_place=update is stored
            )
        if not squares[expert] and isinstance(stored, Tensor):
            _check_not_lost(item, expert, stored, dtype)
        if isinstance(update, Tensor):
            along[expert] = dot(update, base)
        del stored, update
    return updates, Sizes(squares, along, dot(base, base) if along else 0.0)


def _update(stored: Stored, base: Tensor, dtype: torch.dtype, device: torch.device) -> Stored:
    """Return Δ_t = W_t − W_0; rows that the expert's table lacks count as unchanged."""
    if isinstance(stored, tuple):
        return tuple(matrix.to(device).to(dtype) for matrix in stored)
    update = stored.to(device).to(dtype)
    if isinstance(update, LowRank):
        return update
    if update.shape == base.shape:
        # In place: the tensor is fresh from the reader or from the cast, and has no other user but where an
        # expert stands for the base.
        return update - base if update.data_ptr() == base.data_ptr() else update.sub_(base)
    padded = torch.zeros_like(base)
    torch.sub(update, base[: len(update)], out=padded[: len(update)])
    return padded


def update_of(stored: Update, base: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the update of some rows as a tensor."""
    found = None if stored is None else _update(stored, base, dtype, device)
    return dense(found, base, dtype, device)


def weights_of(stored: Update, base: Tensor, device: torch.device) -> Tensor:
    """Return W_t of some rows as it is stored."""
    assert stored is None or isinstance(stored, Tensor), "adapters are merged whole"
    return base if stored is None else _weights(stored.to(device), base)


def _weights(stored: Tensor, base: Tensor) -> Tensor:
    """Return W_t, with the base's rows where the expert's table lacks rows."""
    return stored if stored.shape == base.shape else torch.cat([stored, base[len(stored) :]])


def seen_as(half: str | None, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return weights in the dtype in which a method sees them: that of the computation.

    If the method's steps round to the half-precision dtype in which all are stored, they stay as they are.
    The method would cast them back.
    """
    steps = None if half is None else getattr(torch, half)
    kept = all(tensor.dtype == steps for tensor in weights)
    return list(weights) if kept else [tensor.to(dtype) for tensor in weights]


def _square(update: Update) -> float:
    """Return ‖Δ‖²_F."""
    if update is None:
        return 0.0
    if isinstance(update, tuple):
        return sum(matrix.square_norm() for matrix in update)
    return update.square_norm() if isinstance(update, LowRank) else square_norm(update)


def dense(update: Update, base: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an update as a tensor of the base's shape."""
    if update is None:
        return torch.zeros(base.shape, dtype=dtype, device=device)
    if isinstance(update, Tensor):
        return update
    return _multiplied_out(update).view(base.shape)


def _multiplied_out(update: LowRank | tuple[LowRank, ...]) -> Tensor:
    if isinstance(update, LowRank):
        return update.dense()
    return torch.stack([matrix.dense() for matrix in update])


def _check_not_lost(item: WorkItem, expert: str, stored: Tensor, dtype: torch.dtype) -> None:
    """Raise TensorError for float64 weights all below the smallest normal number of the compute dtype."""
    if stored.dtype != torch.float64 or dtype == torch.float64 or not stored.numel():
        return
    largest = max(map(abs, map(float, torch.aminmax(stored))))
    if 0.0 < largest < torch.finfo(dtype).tiny:
        raise TensorError(
            f"'{item.tensor.name}': the weights of expert '{expert}' are {largest:.2g} at most, which is "
            f"nothing in {str(dtype).removeprefix('torch.')}: compute in float64 "
            f"({Hint('dtype', 'float64')})"
        )


def _name_what_is_not_finite(
    item: WorkItem,
    base: Tensor,
    expert: str,
    stored: Stored,
    dtype: torch.dtype,
    *,
    in_place: bool,
) -> None:
    """Raise NotFiniteError for an update whose norm is not finite; name the first NaN or Inf.

    `in_place`: the update was written over the stored weights.
    """
    start = 0 if item.rows is None else item.rows.start
    tensor = stored if isinstance(stored, Tensor) else _multiplied_out(stored)
    read: list[tuple[str | None, Tensor]] = [] if base.is_meta else [(None, base)]
    name = item.tensor.name
    for source, values in (*read, (expert, tensor)):
        bad = ~torch.isfinite(values.double())
        if in_place and source is not None and isinstance(stored, Tensor):
            # W_t − W_0 of finite weights is Inf only if |W_0| is at least half a step of the dtype's
            # largest number; an Inf there is not counted as one of the stored weights.
            limit = torch.finfo(dtype).max * torch.finfo(dtype).eps / 4
            bad &= ~(values.isinf() & (base.to(values.device).abs() >= limit))
        if bad.any():
            where = [int(axis) for axis in bad.nonzero()[0]] or [0]
            where[0] += start
            of_base = source is None  # the base's values are in the output whatever a rule says
            hint = f", or leave the tensor to the base with {rules_for(name)}"
            raise NotFiniteError(
                name,
                source,
                f"holds {int(bad.sum())} NaN or Inf values, the first at {where}. Fetch the "
                f"checkpoint again{'' if of_base else hint}.",
            )
    problem = (
        "gives an update of which no number in float64 is the square norm. Fetch the checkpoint again, or "
        f"leave the tensor to the base with {rules_for(name)}."
    )
    if dtype != torch.float64:
        problem = (
            "gives an update that overflows the compute dtype; compute in float64 "
            f"({Hint('dtype', 'float64')})."
        )
    raise NotFiniteError(name, expert, problem)
