"""What becomes of every tensor when the output is an adapter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from covmerge.adapters.names import Naming
from covmerge.checkpoints import AdapterCheckpoint, Checkpoint, FactorHeader
from covmerge.errors import InputError, RecipeError, TensorError
from covmerge.export import AdaptedTensor, WholeTensor
from covmerge.methods import registry
from covmerge.plan import Merge, Plan, TensorPlan, WorkItem
from covmerge.recipe import Recipe
from covmerge.types import Role

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


def plan_tasks(
    recipe: Recipe, plan: Plan, experts: Mapping[str, Checkpoint], naming: Naming
) -> list[Task]:
    """Decide what becomes of every tensor that is merged.

    Raises:
        InputError: what the experts or the recipe ask for cannot be held by an adapter.
    """
    merged = {t.name: _Merged(t, experts, naming) for t in plan.tensors if _is_merged(t)}
    places: dict[str, Place] = {
        name: own.as_factors(recipe.output.rank) for name, own in merged.items() if own.has_factors
    }
    if not places:
        raise InputError(
            "none of the tensors that are merged is a layer that an adapter updates: merge to a full "
            "model (--as model)"
        )
    adapted = {own.module for own in merged.values() if own.has_factors}
    whole = _Whole(plan.tensors, naming, adapted)
    for name, own in merged.items():
        if name not in places and (own.trained_whole or recipe.output.whole):
            whole.add(own.tensor, must=own.trained_whole)
    places |= whole.places()
    return [
        _task(tensor, experts, places.get(tensor.name), merged.get(tensor.name))
        for tensor in plan.tensors
        if tensor.name in merged or tensor.name in places
    ]


def _task(
    tensor: TensorPlan, experts: Mapping[str, Checkpoint], place: Place | None, own: _Merged | None
) -> Task:
    thin = own is not None and own.thin
    # Of a larger table the base's rows.
    rows = range(tensor.stored.shape[0]) if tensor.stored.shape else None
    size = _stored_bytes(tensor, experts) + (0 if thin else tensor.stored.nbytes)
    return Task(WorkItem(tensor, rows, size, 0, workspace=0, flops=0.0), place, thin)


def _is_merged(tensor: TensorPlan) -> bool:
    return isinstance(tensor.action, Merge) and any(tensor.sources.values())


class _Merged:
    """One merged tensor and what the experts have of it."""

    def __init__(
        self, tensor: TensorPlan, experts: Mapping[str, Checkpoint], naming: Naming
    ) -> None:
        assert isinstance(tensor.action, Merge)
        self.tensor = tensor
        self._name = naming.of(tensor)
        self.module = self._name.rpartition(".")[0]
        self._action = tensor.action
        self._factors: list[FactorHeader] = []
        self._full = False
        self.trained_whole = False  # by an adapter
        for expert, stored in tensor.sources.items():
            if stored is not None:
                self._take(expert, experts[expert], stored)

    def _take(self, expert: str, checkpoint: Checkpoint, stored: str) -> None:
        if not isinstance(checkpoint, AdapterCheckpoint):
            self._full = True
            return
        factors = checkpoint.low_rank.get(stored)
        if factors is None or stored.endswith(f".{_BIAS}"):
            self.trained_whole = True
            return
        if factors.stacked or not stored.endswith(".weight"):
            raise RecipeError(
                f"'{self.tensor.name}': expert '{expert}' has factors of "
                + ("a stack of matrices" if factors.stacked else "a parameter that is no layer")
                + ", which a merged adapter does not hold: merge to a full model (--as model), or add "
                f"the rule {{match: '{self.tensor.name}', use: base}}"
            )
        self._factors.append(factors)

    @property
    def has_factors(self) -> bool:
        """Whether it is to be a layer with factors; PEFT adds those of tied weights twice."""
        if self.trained_whole:
            return False
        full = self.tensor.takes_factors and not self.tensor.ties
        return bool(self._factors) or (self._full and full)

    @property
    def thin(self) -> bool:
        """Whether the merge is exact on the factors of the updates."""
        layout = self._action.layout
        divided = layout is not None and (layout.stacked or layout.parts is not None)
        if self._full or self.trained_whole or divided:
            return False
        method = registry.get(self._action.method)
        return method.factored_for(self._action.parameters)

    def as_factors(self, limit: int | None) -> AdaptedTensor:
        """Return its place among the layers with factors, of rank at most `limit`."""
        name, shape = self.tensor.name, self.tensor.stored.shape
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
            embedding=self.tensor.role is Role.EMBEDDING or any(f.table for f in self._factors),
            transposed=self.tensor.role is Role.CONV1D or any(f.transposed for f in self._factors),
        )


class _Whole:
    """The tensors that the adapter holds as they are.

    PEFT holds biases by themselves, and of everything else all tensors of a module, where that has
    no module inside. What is tied it unties, so that each of the modules has a copy.
    """

    def __init__(self, tensors: Sequence[TensorPlan], naming: Naming, adapted: set[str]) -> None:
        self._naming = naming
        self._adapted = adapted
        self._pieces = Counter(tensor.parameter for tensor in tensors)
        # Every module's tensors, those of modules inside it and those that are tied to it too.
        self._inside: defaultdict[str, list[tuple[str, TensorPlan]]] = defaultdict(list)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        for tensor in tensors:
            for parameter in (tensor.parameter, *tensor.ties):
                for module in _modules_around(parameter):
                    self._inside[module].append((parameter, tensor))
        self._modules: set[str] = set()
        self._biases: set[str] = set()

    def add(self, tensor: TensorPlan, *, must: bool) -> None:
        """Hold a tensor, if there is a place for it.

        Raises:
            TensorError: there is none, and it must be held.
        """
        if tensor.parameter.endswith(f".{_BIAS}"):
            self._biases.add(tensor.name)
            return
        modules = {parameter.rpartition(".")[0] for parameter in (tensor.parameter, *tensor.ties)}
        if self._pieces[tensor.parameter] == 1 and all(map(self._can_be_replaced, modules)):
            self._modules |= modules
        elif must:
            raise TensorError(
                f"'{tensor.name}': an expert trained it whole, and an adapter has no place for it. "
                "Merge to a full model, or add the rule "
                f"{{match: '{tensor.name}', use: base}} (or head, to keep it per expert)."
            )

    def places(self) -> dict[str, WholeTensor]:
        """Return the place of everything that is held."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for module in sorted(self._modules):
            for parameter, tensor in self._inside[module]:
                names[tensor.name].append(parameter)
        for name in self._biases:
            own = self._tensors[name].parameter
            if own not in names[name]:
                names[name].insert(0, own)
        return {name: self._place(self._tensors[name], held) for name, held in names.items()}

    def _place(self, tensor: TensorPlan, held: Sequence[str]) -> WholeTensor:
        modules = [parameter.rpartition(".")[0] for parameter in held]
        first = self._naming.module(modules[0])
        return WholeTensor(
            names=tuple(self._naming.parameter(parameter) for parameter in held),
            stored=tensor.output,
            modules=tuple(self._naming.module(m) for m in modules if m in self._modules),
            beside_factors=first in self._adapted,
        )

    def _can_be_replaced(self, module: str) -> bool:
        alone = all(p.rpartition(".")[0] == module for p, _ in self._inside[module])
        return alone and self._naming.module(module) not in self._adapted


def _modules_around(parameter: str) -> Iterator[str]:
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        yield module


def _stored_bytes(tensor: TensorPlan, experts: Mapping[str, Checkpoint]) -> int:
    """Bytes that the experts store of a tensor."""
    size = 0
    for expert, stored in tensor.sources.items():
        checkpoint = experts[expert]
        if stored is None:
            continue
        if isinstance(checkpoint, AdapterCheckpoint) and stored in checkpoint.low_rank:
            factors = checkpoint.low_rank[stored]
            size += factors.elements * factors.dtype.itemsize
        else:
            size += checkpoint.headers[stored].nbytes
    return size


def describe_left_out(plan: Plan, tasks: Sequence[Task], changed: set[str]) -> list[str]:
    """Say which tensors the adapter does not have, of those that the experts may have changed.

    Args:
        plan: the plan.
        tasks: the work.
        changed: tensors whose merged update is not zero.
    """
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in plan.tensors:
        if not isinstance(tensor.action, Merge) and any(tensor.sources.values()):
            reasons[f"by the rule '{tensor.rule}'"].append(tensor.name)
    for task in tasks:
        tensor = task.item.tensor
        if task.place is None and tensor.name in changed:
            why = (
                "PEFT would add factors of tied weights twice, so they are only held whole (--whole)"
                if tensor.ties
                else "they are no layers with factors (--whole holds them where PEFT can)"
            )
            reasons[why].append(tensor.name)
    return [
        f"{len(names)} tensors are not in the adapter ('{names[0]}'"
        + (", ..." if len(names) > 1 else "")
        + f"): {why}"
        for why, names in reasons.items()
    ]
