"""The table of steps: each registers its function with what it needs, costs and promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.stored import all_finite
from covmerge.maths.methods.registry import (
    GENEROUS_ENTRY_COST,
    CostModel,
    Laws,
    Reference,
    Sides,
    Unit,
    check_cost,
    generous_cost,
)
from covmerge.maths.registry import Declared, Parameters, Table

When = Literal["before", "after"]


@dataclass(frozen=True)
class Step(Declared):
    """A registered step; all but its name, its function and `when` may be left undeclared.

    Attributes:
        name: as written in recipes.
        kernel: pure function `(group, *, parameters) -> LinearGroup` of a step before a method, and
            `(group, merged, *, parameters) -> Merged`, or the merged update alone, of one after it.
        when: before a method, or after it.
        equation: one line of mathematics, in Unicode.
        reference: the paper; None: there is none.
        laws: as of a method, of the updates it gives, or of the merged update that it makes of one
            that keeps the law itself. A step before a method permutes as its experts do.
        unit: what it must see at once, as of a method; one that needs a `matrix` leaves alone what
            is none.
        cost: FLOPs and workspace beside the updates that it makes, as of a method.
        factored: the sides on which what it gives turns with low-rank updates; elsewhere adapters
            are multiplied out for it.
        needs_base: `LinearGroup.base` is W_0.
    """

    kind: ClassVar[str] = "step"

    when: When
    equation: str = ""
    reference: Reference | None = None
    laws: Laws = field(default_factory=Laws)
    unit: Unit = "matrix"
    cost: CostModel = generous_cost
    factored: Sides = "none"
    needs_base: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        self.one_of("when", When)  # it decides what the function is called with
        super().__post_init__()
        self.one_of("unit", Unit)
        self.one_of("factored", Sides)
        if self.laws.replicas is not None:
            raise ValueError(f"step '{self.name}': `replicas` is a law of methods; leave it out")
        if self.has("seed"):
            raise ValueError(
                f"step '{self.name}' has a parameter `seed`: only methods are given random numbers"
            )
        if self.needs_base and self.factored != "none":
            raise ValueError(
                f"step '{self.name}' needs the base and is `factored`: the base has no basis of low "
                "rank; leave `factored` out"
            )
        check_cost(self, self.cost)
        if self.cost is generous_cost and self.unit != "matrix":
            object.__setattr__(self, "cost", GENEROUS_ENTRY_COST)

    @property
    def operands(self) -> tuple[str, ...]:
        return ("group",) if self.when == "before" else ("group", "merged")

    def scales_with(self, parameters: Parameters) -> bool:
        """Return whether Δ → sΔ gives s times its result with these parameters."""
        return self.laws.scale_equivariant is True and self.laws.scales_with(parameters)

    def prepare(self, group: LinearGroup, parameters: Parameters) -> LinearGroup:
        """Run a step before a method.

        Raises:
            TensorError: what it gives is no group of such updates.
        """
        if not group.updates[0].numel():
            return group  # there is nothing to change
        with self.leaving(group.given):
            found: object = self.kernel(group, **parameters)
        if not isinstance(found, LinearGroup) or len(found.updates) != len(group.updates):
            raise TensorError(
                f"step '{self.name}' must return the group with as many updates as it was given, as "
                "`dataclasses.replace(group, updates=...)` or `group.times(...)` do"
            )
        for update, given in zip(found.updates, group.updates, strict=True):
            self._check(update, given)
        if all(made is given for made, given in zip(found.updates, group.updates, strict=True)):
            return found
        # What it does not speak of is of the updates as they were.
        factors = () if found.factors is group.factors else found.factors
        return replace(found, factors=factors, shared=None)

    def finish(self, group: LinearGroup, merged: Merged, parameters: Parameters) -> Merged:
        """Run a step after a method.

        Raises:
            TensorError: what it gives is no merged update.
        """
        if not merged.delta.numel():
            return merged
        with self.leaving((*group.given, merged.delta)):
            found: object = self.kernel(group, merged, **parameters)
        result = replace(merged, delta=found) if isinstance(found, Tensor) else found
        if not isinstance(result, Merged):
            raise TensorError(
                f"step '{self.name}' returns a {type(found).__name__}: it must return the merged "
                "update as a tensor, or a covmerge.Merged"
            )
        self._check(result.delta, merged.delta)
        return result

    def _check(self, made: Tensor, given: Tensor) -> None:
        if (made.shape, made.dtype, made.device) != (given.shape, given.dtype, given.device):
            raise TensorError(
                f"step '{self.name}' makes {list(made.shape)} {made.dtype} on {made.device} of "
                f"{list(given.shape)} {given.dtype} on {given.device}: it must keep shape, dtype and "
                "device"
            )
        if not all_finite(made):
            raise TensorError(
                f"step '{self.name}' gives NaN or Inf from a finite update of norm {norm(given):.3g}: "
                f"sizes are too far apart for {given.dtype}; compute in float64, or leave the step out"
            )


_Function = TypeVar("_Function", bound=Callable[..., Any])

registry: Table[Step] = Table(Step, "covmerge.steps")


def register_step(name: str, *, when: When, **declared: Any) -> Callable[[_Function], _Function]:
    """Register a function as a step before every method, or after it.

    Args:
        name: as it is to be written in recipes and on the command line.
        when: `before`, for a function `(group, *, parameters) -> LinearGroup`; `after`, for one
            `(group, merged, *, parameters) -> Merged`, or the merged update alone. The latter gets
            the experts' updates as they came, whatever steps before the method made of them.
        **declared: what it needs, costs and promises: see `Step`. All of it may be left out: then it
            sees one oriented matrix of a linear layer at a time, and promises nothing.

    Raises:
        ValueError: the name is taken, or cannot be one.

    Example:
        >>> import torch, covmerge
        >>> @covmerge.register_step("halve", when="after", unit="element", factored="both")
        ... def halve(group, merged):
        ...     return merged.delta / 2
        >>> covmerge.merge_layer([torch.eye(2)], "average", after=["halve"]).tolist()
        [[0.5, 0.0], [0.0, 0.5]]
        >>> covmerge.steps.registry.unregister("halve")
    """
    return registry.register(name, when=when, **declared)
