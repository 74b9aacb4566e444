"""The plan as data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from covmerge.linalg.random import Stream
from covmerge.methods import registry
from covmerge.recipe import Recipe, dump_recipe
from covmerge.tensors import MatrixLayout
from covmerge.types import Json, Role, TensorHeader

# Passes that an exact selection takes (`covmerge.linalg.select`), and with a good guess, by compute
# dtype.
_PASSES = {"float32": (2, 1), "float64": (4, 3)}
# A guess comes from this share of the entries, of surveys of so many that passes take time.
_SAMPLED, _LEAST_SAMPLED = 1 / 16, 2**22


@dataclass(frozen=True)
class Merge:
    """Merge a tensor by a method.

    Attributes:
        method: registered name.
        parameters: all of the method's parameters, resolved.
        layout: how the tensor holds `(d_out, d_in)` matrices; None: any shape, as it lies.
    """

    method: str
    parameters: Mapping[str, Any]
    layout: MatrixLayout | None

    @property
    def key(self) -> str:
        """Method and parameters: all tensors of one key share one survey."""
        return json.dumps([self.method, dict(self.parameters)], sort_keys=True)


@dataclass(frozen=True)
class Copy:
    """Take the base's tensor as it is."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output.

    Attributes:
        stored: its header in the base.
        output: its header in the output (the base's name and shape, the output dtype).
        role: what it is, and `why` that was concluded.
        action: what happens to it, and by which `rule`.
        sources: per expert, the name of its tensor there; None where the expert has no such tensor
            and counts as unchanged. Experts that take no part in this tensor are not in it.
        statistics: per expert, the name that its statistics file has for this tensor; empty where
            the method needs no data.
        matrices: how it holds `(d_out, d_in)` matrices, whatever its method sees of them; None where
            it holds none, or they are no layer's.
        parameter: its name in the model that transformers builds of config.json.
        takes_factors: whether it is the weight of a layer that PEFT has factors for.
        ties: the other parameters that the config ties to it, for which it stands too.
    """

    stored: TensorHeader
    output: TensorHeader
    role: Role
    why: str
    action: Merge | Copy
    rule: str
    sources: Mapping[str, str | None]
    statistics: Mapping[str, str] = field(default_factory=dict[str, str])
    matrices: MatrixLayout | None = None
    parameter: str = ""
    takes_factors: bool = False
    ties: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in the base and in the output."""
        return self.output.name

    def stream(self, expert: str, first_element: int = 0) -> Stream:
        """Random numbers of one expert's update, from an element on."""
        return Stream(f"{self.name}\0{expert}", first_element)

    @property
    def writes_masks(self) -> bool:
        """Whether its method writes a mask per expert beside it."""
        return isinstance(self.action, Merge) and registry.get(self.action.method).writes_masks


@dataclass(frozen=True)
class WorkItem:
    """A row range of one tensor: read, computed and written as a whole.

    Attributes:
        tensor: its plan.
        rows: range of the first axis; None for the whole of a tensor (scalars have no rows).
        read_bytes: stored bytes of base and experts.
        write_bytes: bytes of the result.
        statistics_bytes: bytes of the experts' statistics, which are read with the tensor.
        at_once: rows that are merged at once, where what a row becomes does not depend on others;
            None: all of them.
        workspace: bytes that computing it takes beside its inputs and its result.
        flops: floating-point operations.
    """

    tensor: TensorPlan
    rows: range | None
    read_bytes: int
    write_bytes: int
    workspace: int
    flops: float
    statistics_bytes: int = 0
    at_once: int | None = None

    @property
    def memory(self) -> int:
        """Bytes alive while the item is computed."""
        return self.read_bytes + self.statistics_bytes + self.workspace + self.write_bytes

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """Identity in the journal."""
        span = (self.rows.start, self.rows.stop) if self.rows is not None else (0, 1)
        return self.tensor.name, span

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its rows."""
        whole = self.tensor.stored.shape
        return whole if self.rows is None else (len(self.rows), *whole[1:])

    @property
    def matrices(self) -> MatrixLayout | None:
        """How its rows hold whole matrices; None where they hold none, or parts of them."""
        layout, rows = self.tensor.matrices, self.rows
        if layout is None or rows is None or layout.stacked:
            return layout
        return layout if len(rows) == self.tensor.stored.shape[0] else None

    def leading(self, share: float) -> WorkItem:
        """Return the first of its rows, one at least."""
        if not self.rows:
            return self
        rows = self.rows[: max(1, int(share * len(self.rows)))]
        return replace(self, rows=rows, read_bytes=self.read_bytes * len(rows) // len(self.rows))

    @property
    def first_element(self) -> int:
        """Place of the item's first element in its tensor."""
        return 0 if self.rows is None else self.rows.start * prod(self.tensor.stored.shape[1:])


@dataclass(frozen=True)
class Survey:
    """What must be known of all tensors of a method before the first is merged.

    Attributes:
        merge: one of the actions it is for; all of them have its key.
        density: share of each expert's entries that is kept.
        items: the work items it goes through.
    """

    merge: Merge
    density: float
    items: tuple[WorkItem, ...]

    @cached_property
    def sample(self) -> tuple[WorkItem, ...]:
        """Leading rows of every item, which tell nearly what all of them will tell.

        None where the method must see whole matrices, or all of them are soon read.
        """
        elements = sum(prod(item.shape) for item in self.items)
        if self.merge.layout is not None or elements < _LEAST_SAMPLED:
            return ()
        return tuple(item.leading(_SAMPLED) for item in self.items)

    def passes(self, dtype: str) -> tuple[int, int]:
        """Return how often the sample is read, and then the items, if the guess is good."""
        usual, guessed = _PASSES[dtype]
        return (usual, guessed) if self.sample else (0, usual)


@dataclass(frozen=True)
class Plan:
    """Everything decided before the first tensor is read.

    Attributes:
        recipe: the recipe with all defaults, and a method.
        tensors: the output's tensors in output order.
        items: the work, in output order.
        surveys: passes over some of the items before the work.
        heads: per expert, tensors that are kept for it alone: name in the expert -> header.
        family: model family, which decides family defaults.
        notes: what a user should know before starting.
        tied: by expert (None: the base), stored tensors that are left out because the config ties
            them to another stored one, which stands for both.
        metadata: for the header of every output file.
        chosen: why the method is what it is; None: the recipe names it.
    """

    recipe: Recipe
    tensors: tuple[TensorPlan, ...]
    items: tuple[WorkItem, ...]
    heads: Mapping[str, Mapping[str, TensorHeader]]
    family: str | None
    surveys: tuple[Survey, ...] = ()
    notes: tuple[str, ...] = ()
    tied: Mapping[str | None, Mapping[str, str]] = field(
        default_factory=dict[str | None, Mapping[str, str]]
    )
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    chosen: str | None = None

    @cached_property
    def output_headers(self) -> tuple[TensorHeader, ...]:
        """Headers of the output in order."""
        return tuple(tensor.output for tensor in self.tensors)

    @property
    def read_bytes(self) -> int:
        """Bytes read from all checkpoints and statistics, the surveys' passes included."""
        merging = sum(item.read_bytes + item.statistics_bytes for item in self.items)
        return merging + sum(
            passes * item.read_bytes
            for survey in self.surveys
            for passes, items in zip(
                survey.passes(self.recipe.dtype), (survey.sample, survey.items), strict=True
            )
            for item in items
        )

    @property
    def write_bytes(self) -> int:
        """Bytes of the output's tensors, heads included."""
        heads = sum(h.nbytes for kept in self.heads.values() for h in kept.values())
        return sum(item.write_bytes for item in self.items) + heads

    @property
    def flops(self) -> float:
        """Floating-point operations of all items."""
        return sum(item.flops for item in self.items)

    @property
    def peak_item(self) -> WorkItem:
        """The item that needs the most memory."""
        return max(self.items, key=lambda item: item.memory)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype the methods compute in."""
        return getattr(torch, self.recipe.dtype)

    def by_rule(self) -> list[tuple[Role, str, int, int]]:
        """Role, rule, number of tensors and output bytes, in order of first appearance."""
        counts: Counter[tuple[Role, str]] = Counter()
        sizes: Counter[tuple[Role, str]] = Counter()
        for tensor in self.tensors:
            counts[tensor.role, tensor.rule] += 1
            sizes[tensor.role, tensor.rule] += tensor.output.nbytes
        return [(role, rule, counts[role, rule], sizes[role, rule]) for role, rule in counts]

    def digest(self, sources: Mapping[str, Json]) -> str:
        """Hash of all that decides the output's bytes: recipe, sources, tensors and actions."""
        content = {
            "recipe": dump_recipe(self.recipe),
            "sources": sources,
            "torch": torch.__version__,
            "tensors": [
                [t.name, list(t.output.shape), str(t.output.dtype), t.rule, repr(t.action)]
                for t in self.tensors
            ],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def summary(self) -> dict[str, Json]:
        """The plan's totals as plain JSON."""
        return {
            "tensors": len(self.tensors),
            "items": len(self.items),
            "by_rule": [
                {"role": str(role), "rule": rule, "tensors": count, "bytes": size}
                for role, rule, count, size in self.by_rule()
            ],
            "heads": {expert: sorted(kept) for expert, kept in self.heads.items()},
            "method": self.recipe.method,
            "chosen": self.chosen,
            "family": self.family,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "flops": self.flops,
            "peak_item": {"tensor": self.peak_item.tensor.name, "bytes": self.peak_item.memory},
            "notes": list(self.notes),
        }
