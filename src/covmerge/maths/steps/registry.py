"""The table of steps: each registers its function with its needs, cost and promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.stored import all_finite
from covmerge.maths.methods.registry import Computation, Sides, Unit
from covmerge.maths.registry import Parameters, Table

When = Literal["before", "after"]


@dataclass(frozen=True)
class Step(Computation):
    """A registered step. Only its name, its kernel and `when` have to be declared.

    What is not described here is as for a `Method`.

    Attributes:
        kernel: a pure function: `(group, *, parameters) -> LinearGroup` for a step before a method, and
            `(group, merged, *, parameters) -> Merged`, or the merged update alone, for a step after it.
        when: whether the step stands before a method or after it.
        laws: they are about the updates that the step returns, or about the merged
            update that it returns if the one it gets keeps the law. A step before a method permutes with
            its experts.
        unit: what the step must see at once; a step with the unit `matrix` leaves other
            tensors alone.
        cost: FLOPs, and workspace beside the updates that the step returns.
        factored: the sides on which the step's result turns with low-rank updates; on other sides adapters
            are multiplied out for it.
    """

    kind: ClassVar[str] = "step"

    when: When = field(kw_only=True)
    unit: Unit = "matrix"
    factored: Sides = "none"

    def __post_init__(self) -> None:
        """Check that the declarations fit together."""
        self.one_of("when", When)  # decides with what the function is called
        super().__post_init__()
        if self.laws.replicas is not None:
            raise ValueError(f"step '{self.name}': `replicas` is a law of methods; leave it out")
        if self.has("seed"):
            raise ValueError(
                f"step '{self.name}' has a parameter `seed`: only methods are given random numbers"
            )

    @property
    def operands(self) -> tuple[str, ...]:
        return ("group",) if self.when == "before" else ("group", "merged")

    def prepare(self, group: LinearGroup, parameters: Parameters) -> LinearGroup:
        """Run a step before a method.

        Raises:
            TensorError: the step returns no group of as many updates of the same shapes.
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
        # Factors and shared results that the step did not replace belong to the updates before it.
        factors = () if found.factors is group.factors else found.factors
        return replace(found, factors=factors, shared=None)

    def finish(self, group: LinearGroup, merged: Merged, parameters: Parameters) -> Merged:
        """Run a step after a method.

        Raises:
            TensorError: the step returns no merged update.
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
        name: the step's name in recipes and on the command line.
        when: `before`, for a function `(group, *, parameters) -> LinearGroup`; `after`, for a function
            `(group, merged, *, parameters) -> Merged`, or one that returns the merged update alone. The
            latter gets the experts' updates as they came, not as steps before the method changed them.
        **declared: the step's needs, cost and promises: see `Step`. All of them may be left out: the step
            then sees one oriented matrix of a linear layer at a time, and promises nothing.

    Raises:
        ValueError: the name is taken, or is not a possible name.

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
