"""What becomes of every tensor when the output is an adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from covmerge.checkpoints import AdapterCheckpoint, Checkpoint, FactorHeader
from covmerge.errors import InputError, RecipeError, TensorError
from covmerge.export import AdaptedTensor, WholeTensor
from covmerge.methods import registry
from covmerge.plan import Merge, Plan, TensorPlan, WorkItem
from covmerge.recipe import Recipe
from covmerge.types import Role

_LAYERS = (Role.LINEAR, Role.CONV1D, Role.CONV, Role.OUTPUT, Role.EMBEDDING)
_BIAS = "bias"

Place = AdaptedTensor | WholeTensor


@dataclass(frozen=True)
class Task:
    """One tensor to merge, or to take from the base.

    Attributes:
        item: the whole tensor.
        place: what it is in the adapter; None: it has no place there, and is merged only to say how
            much is left out.
        thin: nothing of it is ever as large as the tensor: factors in, factors out.
    """

    item: WorkItem
    place: Place | None
    thin: bool


def plan_tasks(recipe: Recipe, plan: Plan, experts: Mapping[str, Checkpoint]) -> list[Task]:
    """Decide what becomes of every tensor that is merged.

    Raises:
        InputError: what the experts or the recipe ask for cannot be held by an adapter.
    """
    changed = [_Changed(tensor, experts) for tensor in plan.tensors if _is_merged(tensor)]
    places: dict[str, Place] = {
        own.tensor.name: own.as_factors(recipe.output.rank) for own in changed if own.has_factors
    }
    if not places:
        raise InputError(
            "none of the tensors that are merged is a layer that an adapter updates: merge to a full "
            "model (--as model)"
        )
    adapted = {own.module for own in changed if own.has_factors}
    modules = _by_module(plan.tensors)
    for own in changed:
        if not own.has_factors and (own.trained_whole or recipe.output.whole):
            places |= own.as_whole(modules, adapted)
    merged = {own.tensor.name: own for own in changed}
    return [
        Task(
            _whole_item(tensor, experts),
            places.get(tensor.name),
            tensor.name in merged and merged[tensor.name].thin,
        )
        for tensor in plan.tensors
        if tensor.name in merged or tensor.name in places
    ]


def _is_merged(tensor: TensorPlan) -> bool:
    return isinstance(tensor.action, Merge) and any(tensor.sources.values())


class _Changed:
    """One merged tensor and what the experts have of it."""

    def __init__(self, tensor: TensorPlan, experts: Mapping[str, Checkpoint]) -> None:
        assert isinstance(tensor.action, Merge)
        self.tensor = tensor
        self._action = tensor.action
        self._factors: list[FactorHeader] = []
        self._full = False
        self.trained_whole = False  # by an adapter
        self._name = tensor.parameter
        for expert, stored in tensor.sources.items():
            checkpoint = experts[expert]
            if stored is None:
                continue
            if not isinstance(checkpoint, AdapterCheckpoint):
                self._full = True
                continue
            # As the model calls it that the adapter was trained on.
            self._name = stored
            if stored in checkpoint.low_rank and checkpoint.low_rank[stored].stacked:
                raise RecipeError(
                    f"'{tensor.name}': expert '{expert}' adapts it in a stack of matrices, which a "
                    "merged adapter does not hold: merge to a full model (--as model), or add the "
                    f"rule {{match: '{tensor.name}', use: base}}"
                )
            if stored in checkpoint.low_rank and stored.endswith(".weight"):
                self._factors.append(checkpoint.low_rank[stored])
            else:
                self.trained_whole = True
        self.module, _, self._leaf = self._name.rpartition(".")

    @property
    def has_factors(self) -> bool:
        """Whether it is to be a layer with factors."""
        if self.trained_whole:
            return False
        return not self._full or bool(self._factors) or self._is_layer

    @property
    def _is_layer(self) -> bool:
        """Whether PEFT has factors for it; of tied weights it would add them twice on merging."""
        layout = self._action.layout
        return (
            self.tensor.role in _LAYERS
            and self._leaf == "weight"
            and len(self.tensor.stored.shape) in (2, 4)
            and not (layout is not None and layout.stacked)
            and not self.tensor.ties
        )

    @property
    def thin(self) -> bool:
        """Whether the merge is exact on the factors of the updates."""
        layout = self._action.layout
        divided = layout is not None and (layout.stacked or layout.parts is not None)
        if self._full or self.trained_whole or divided:
            return False
        method = registry.get(self._action.method)
        return bool(method.factored_for(self._action.parameters))

    def as_factors(self, limit: int | None) -> AdaptedTensor:
        """Return its place among the layers with factors, of rank at most `limit`."""
        name, shape, layout = self.tensor.name, self.tensor.stored.shape, self._action.layout
        if layout is not None and layout.stacked:
            raise RecipeError(
                f"'{name}' is a stack of matrices, which a merged adapter does not hold: merge to a "
                f"full model (--as model), or add the rule {{match: '{name}', use: base}}"
            )
        if registry.get(self._action.method).writes_masks:
            raise RecipeError(
                f"'{name}': method '{self._action.method}' makes a model per expert by masks, which "
                "an adapter has no place for: merge to a full model (--as model)"
            )
        if limit is None and not self.thin:
            why = (
                "a full model changed it"
                if self._full
                else f"method '{self._action.method}' does not keep to the span of the updates"
            )
            raise RecipeError(
                f"'{name}': {why}, so the result has full rank. Say with `output.rank` (--rank) what "
                "to truncate it to, or merge to a full model"
            )
        sides = (shape[0], prod(shape[1:]))
        rank = (
            min(*sides, sum(factor.rank for factor in self._factors)) if self.thin else min(sides)
        )
        return AdaptedTensor(
            name=self._name,
            shape=shape,
            rank=min(rank, limit or rank),
            embedding=self.tensor.role is Role.EMBEDDING,
            transposed=self.tensor.role is Role.CONV1D or any(f.transposed for f in self._factors),
        )

    def as_whole(
        self, modules: Mapping[str, Sequence[TensorPlan]], adapted: set[str]
    ) -> dict[str, Place]:
        """Return its place among what the adapter holds whole, and those of its module.

        PEFT holds biases by themselves, and of everything else all tensors of a module. Nothing:
        there is no such place.

        Raises:
            TensorError: there is no such place, and an adapter trained it whole.
        """
        owner = self.tensor.parameter.rpartition(".")[0]
        inside = modules[owner]
        if self._leaf == _BIAS:
            bias = WholeTensor(
                self._name, self.tensor.output, beside_factors=self.module in adapted
            )
            return {self.tensor.name: bias}
        alone = all(other.parameter.rpartition(".")[0] == owner for other in inside)
        if alone and self.module not in adapted:
            return {
                other.name: WholeTensor(
                    f"{self.module}.{other.parameter.rpartition('.')[2]}",
                    other.output,
                    with_module=True,
                    ties=other.ties,
                )
                for other in inside
            }
        if self.trained_whole:
            raise TensorError(
                f"'{self.tensor.name}': an expert trained it whole, and an adapter has no place for "
                "it. Merge to a full model, or add the rule "
                f"{{match: '{self.tensor.name}', use: base}} (or head, to keep it per expert)."
            )
        return {}


def _by_module(tensors: Sequence[TensorPlan]) -> dict[str, list[TensorPlan]]:
    """Every module's tensors, those of modules inside it too."""
    found: defaultdict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in tensors:
        for module in _modules_around(tensor.parameter):
            found[module].append(tensor)
    return dict(found)


def _modules_around(parameter: str) -> Iterator[str]:
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        yield module


def _whole_item(tensor: TensorPlan, experts: Mapping[str, Checkpoint]) -> WorkItem:
    """The work on a tensor, with what is read for it."""
    size = tensor.stored.nbytes
    for expert, stored in tensor.sources.items():
        checkpoint = experts[expert]
        if stored is None:
            continue
        if isinstance(checkpoint, AdapterCheckpoint) and stored in checkpoint.low_rank:
            factors = checkpoint.low_rank[stored]
            size += factors.rank * sum(factors.shape) * factors.dtype.itemsize
        else:
            size += checkpoint.headers[stored].nbytes
    return WorkItem(tensor, None, size, 0, workspace=0, flops=0.0)


def describe_left_out(plan: Plan, tasks: Sequence[Task]) -> list[str]:
    """Say which changed tensors the adapter does not have."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in plan.tensors:
        if not isinstance(tensor.action, Merge) and any(tensor.sources.values()):
            reasons[f"the rule '{tensor.rule}'"].append(tensor.name)
    for task in tasks:
        if task.place is None:
            tensor = task.item.tensor
            why = (
                "PEFT would add factors of tied weights twice, so they are only held whole (--whole)"
                if tensor.ties
                else "they are no layers with factors (--whole holds them where PEFT can)"
            )
            reasons[why].append(tensor.name)
    return [
        f"{len(names)} changed tensors are not in the adapter ('{names[0]}'"
        + (", ..." if len(names) > 1 else "")
        + f"): {why}"
        for why, names in reasons.items()
    ]
