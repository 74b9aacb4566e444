"""The plan as data classes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import torch

from covmerge.base.code import own_version
from covmerge.base.text import counted, some
from covmerge.base.types import Json, Module, Role, TensorHeader
from covmerge.files.quantised.writing.gguf import GgufHead
from covmerge.maths.methods import registry
from covmerge.maths.registry import Origin
from covmerge.maths.steps import registry as steps
from covmerge.plan.planning.forms import MODEL, Unwritten, module_part
from covmerge.plan.planning.operations import Count, Merge
from covmerge.plan.planning.work import TensorPlan, WorkItem
from covmerge.plan.recipe import Recipe, dump_recipe

# By compute dtype: the number of passes of an exact selection (`covmerge.maths.linalg.select`), and
# the number that is left after a good guess.
_PASSES = {"float32": (2, 1), "float64": (4, 3)}
# The guess uses this share of the entries, in global passes over enough entries to be slow.
_SAMPLED, _LEAST_SAMPLED = 1 / 16, 2**22


@dataclass(frozen=True)
class PlannedPass:
    """A pass over all tensors of a method, needed before the first is merged."""

    merge: Merge  # one of the merges that need the pass; all of them have its key
    density: float  # share of each expert's entries that is kept
    items: tuple[WorkItem, ...]  # the items that count, on the same rows as the items that merge

    @cached_property
    def sample(self) -> tuple[WorkItem, ...]:
        """Leading rows of every item, from which the thresholds can nearly be told.

        It is empty if the method needs whole matrices, or if all entries can be read quickly.
        """
        elements = sum(prod(item.shape) for item in self.items)
        if self.merge.layout is not None or elements < _LEAST_SAMPLED:
            return ()
        return tuple(item.leading(_SAMPLED) for item in self.items)

    @cached_property
    def experts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e for item in self.items for e in item.tensor.operands))

    @staticmethod
    def counting(items: Iterable[WorkItem], plan: int = 0) -> Iterator[WorkItem]:
        """Yield items that count the entries of given items, for one of the plans that run together."""
        for _, neighbours in groupby(items, key=lambda item: id(item.tensor)):
            first, *others = neighbours
            tensor, operation = first.tensor, first.tensor.operation
            if isinstance(operation, Count) and operation.plan == plan:
                yield from (first, *others)
                continue
            assert operation.merge is not None
            counted = replace(tensor, operation=Count(operation.merge, plan), form=Unwritten())
            yield from (replace(i, tensor=counted, write_bytes=0) for i in (first, *others))

    def passes(self, dtype: str) -> tuple[int, int]:
        """Return the number of readings of the sample and then of the items, if the guess is good."""
        usual, guessed = _PASSES[dtype]
        return (usual, guessed) if self.sample else (0, usual)


@dataclass(frozen=True)
class Formed:
    """An output's tensors with their forms, and what else its files need."""

    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...] = ()
    # In an adapter, the tensors whose merge on the factors of the updates is exact.
    thin: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()  # all tensors of the model that an adapter is loaded over
    settings: Mapping[str, Any] | None = None  # `quantization_config` of config.json, if it has one
    gguf: GgufHead | None = None  # what a GGUF file has beside its tensors


@dataclass(frozen=True, repr=False)
class Plan:
    """All decisions made before the first tensor is read.

    Attributes:
        recipe: the recipe with all defaults, and with a method.
        tensors: the plans of the output's tensors, in output order.
        items: the work, in output order; task heads are copied last.
        global_passes: passes over some of the items before the work.
        heads: for each expert, the tensors that are kept only for it: name in the expert -> header.
        family: model family, which decides family defaults.
        notes: notes for the user.
        tied: by expert (None: the base), stored tensors that are left out because the config ties
            them to another stored one, which stands for both.
        metadata: entries for the header of every output file.
        chosen: the reason for the method; None: the recipe names it.
        parameters: for an adapter, names of all tensors of the model that it is loaded over.
        stem: beginning of the names of a model's files, by which its library finds them.
        quantisation: config.json's settings for packed weights; None: all weights are plain, or the
            output is a GGUF file.
        gguf: the content of a GGUF file besides its tensors; None: the output is no GGUF file.
    """

    recipe: Recipe
    tensors: tuple[TensorPlan, ...]
    items: tuple[WorkItem, ...]
    heads: Mapping[str, Mapping[str, TensorHeader]]
    family: str | None
    global_passes: tuple[PlannedPass, ...] = ()
    notes: tuple[str, ...] = ()
    tied: Mapping[str | None, Mapping[str, str]] = field(
        default_factory=dict[str | None, Mapping[str, str]]
    )
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    chosen: str | None = None
    parameters: tuple[str, ...] = ()
    stem: str = "model"
    quantisation: Mapping[str, Any] | None = None
    gguf: GgufHead | None = None

    def __repr__(self) -> str:
        tensors, items = counted(len(self.tensors), "tensor"), counted(len(self.items), "item")
        return f"<Plan: {some(self.recipe.experts)} by {self.recipe.method}; {tensors}, {items} of work>"

    @property
    def read_bytes(self) -> int:
        """Bytes read from all checkpoints and statistics, global passes and tensor passes included."""
        total = sum(i.pass_bytes + i.read_bytes + i.statistics_bytes for i in self.items)
        for counting in self.global_passes:
            of_sample, of_items = counting.passes(self.recipe.dtype)
            total += of_sample * sum(item.read_bytes for item in counting.sample)
            total += of_items * sum(item.read_bytes for item in counting.items)
        return total

    @property
    def write_bytes(self) -> int:
        """Bytes of the output's tensors, heads included."""
        return sum(item.write_bytes for item in self.items)

    @property
    def parts(self) -> dict[str, list[TensorHeader]]:
        """The headers of the tensors in each part of the output, in output order."""
        found: dict[str, list[TensorHeader]] = {MODEL: []}
        tensors = {item.tensor.key: item.tensor for item in self.items}
        for tensor in tensors.values():
            for place in tensor.form.places(tensor.output, None):
                found.setdefault(place.part, []).append(place.header)
        if self.modules and not found[MODEL]:
            del found[MODEL]  # all weights are in folders of modules
        return found

    @property
    def modules(self) -> dict[str, Module]:
        """The modules whose weights are in separate folders, by part of the output."""
        return {
            place.part: tensor.output.module
            for tensor in self.tensors
            if tensor.output.module is not None
            for place in tensor.form.places(tensor.output, None)
            if place.part == module_part(tensor.output)
        }

    @property
    def masked(self) -> frozenset[str]:
        """Names of the tensors that have masks."""
        return frozenset(tensor.name for tensor in self.tensors if tensor.form.masks)

    @property
    def flops(self) -> float:
        """Floating-point operations of all items."""
        return sum(item.flops for item in self.items)

    @property
    def peak_item(self) -> WorkItem:
        """The item that needs the most memory."""
        return max(self.items, key=lambda item: item.memory)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origins of methods and steps that are not covmerge's own."""
        merges = [t.merge for t in self.tensors if t.merge is not None]
        methods = dict.fromkeys(merge.method for merge in merges)
        used = dict.fromkeys(use.name for m in merges for use in (*m.before, *m.after))
        found = [*map(registry.origin, methods), *map(steps.origin, used)]
        return tuple(origin for origin in found if origin is not None)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return getattr(torch, self.recipe.dtype)

    def by_rule(self) -> list[tuple[Role, str, int, int]]:
        """Return role, rule, number of tensors and output bytes, in order of first appearance."""
        counts: Counter[tuple[Role, str]] = Counter()
        sizes: Counter[tuple[Role, str]] = Counter()
        for tensor in self.tensors:
            counts[tensor.info.role, tensor.rule] += 1
            sizes[tensor.info.role, tensor.rule] += tensor.written_bytes(None)
        return [(role, rule, counts[role, rule], sizes[role, rule]) for role, rule in counts]

    def digest(self, sources: Mapping[str, Json]) -> str:
        """Return a hash of everything that the output depends on: recipe, sources, code, tensors, actions.

        The order of the experts counts, because they are summed in it.
        """
        content: dict[str, Any] = {
            "covmerge": own_version(),
            "recipe": dump_recipe(self.recipe),
            "sources": sources,
            "torch": torch.__version__,
            "origins": [origin.as_json() for origin in self.origins],
            "experts": list(self.recipe.experts),
            "tensors": [
                [t.name, list(t.output.shape), str(t.output.dtype), t.rule, repr(t.operation)]
                + [repr(t.base), dict(t.statistics)]
                + [[expert, repr(operand)] for expert, operand in t.operands.items()]
                for t in self.tensors
            ],
            "forms": [repr(t.form) for t in self.tensors],
            "quantisation": self.quantisation,
        }
        if self.gguf is not None:
            content["gguf"] = hashlib.sha256(self.gguf.start).hexdigest()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def summary(self) -> dict[str, Json]:
        """Return the plan's totals as plain JSON."""
        return {
            "tensors": len(self.tensors),
            "items": len(self.items),
            "by_rule": [
                {"role": str(role), "rule": rule, "tensors": count, "bytes": size}
                for role, rule, count, size in self.by_rule()
            ],
            "heads": {expert: sorted(heads) for expert, heads in self.heads.items()},
            "method": self.recipe.method,
            "chosen": self.chosen,
            "family": self.family,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "flops": self.flops,
            "peak_item": {"tensor": self.peak_item.tensor.name, "bytes": self.peak_item.memory},
            "notes": list(self.notes),
        }
