"""Steps and a method combined into one method, so that plan, engine and adapters need not know of steps.

The whole needs what its most demanding part needs: if a step must see a whole tensor, an elementwise method
is run on whole tensors. The whole promises what all parts promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from torch import Tensor

from covmerge.base.errors import RecipeError
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.methods.registry import GlobalPass, Laws, Method, Sides, Unit
from covmerge.maths.registry import Parameters
from covmerge.maths.steps.registry import Step, When, registry

Steps = Sequence[str | Mapping[str, Parameters]]  # as in a recipe: a name, or {name: {parameters}}
# Each unit includes the ones before it.
_UNITS: tuple[Unit, ...] = ("element", "row", "tensor", "matrix")


@dataclass(frozen=True)
class StepUse:
    """A step of a plan: its name and all of its parameters, resolved."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def step(self) -> Step:
        """The registered step of this name."""
        return registry.get(self.name)


def resolve_steps(entries: Steps, when: When) -> tuple[StepUse, ...]:
    """Return the steps of a recipe's list, with all of their parameters.

    Raises:
        RecipeError: a step or a parameter is unknown, a value is out of range, or a step belongs in the
            other list.
    """
    found: list[StepUse] = []
    for entry in _listed(entries, when):
        single: Mapping[str, Any] = {entry: {}} if isinstance(entry, str) else entry
        if len(single) != 1 or not isinstance(next(iter(single.values())), Mapping):
            raise RecipeError(f"{when}: {entry} is not one step: write {{name: {{parameters}}}}")
        ((name, given),) = single.items()
        step = registry.get(name)
        if step.when != when:
            raise RecipeError(
                f"step '{name}' is one {step.when} a method: name it under `{step.when}`"
            )
        found.append(StepUse(name, step.resolve(given)))
    return tuple(found)


def steps_around(before: Steps, after: Steps) -> tuple[tuple[StepUse, ...], tuple[StepUse, ...]]:
    """Return the steps before a method, and those after it; see `resolve_steps`."""
    return resolve_steps(before, "before"), resolve_steps(after, "after")


def _listed(entries: Any, when: When) -> list[str | Mapping[str, Any]]:
    """Check that the entries are a list of steps, for callers without a type checker, and return it."""
    if isinstance(entries, str) or not all(isinstance(one, str | Mapping) for one in entries):
        raise RecipeError(
            f"{when}: {entries!r} is no list of steps: write [name, {{name: {{parameters}}}}]"
        )
    return list(entries)


def with_steps(method: Method, before: Sequence[StepUse], after: Sequence[StepUse]) -> Method:
    """Return a method with steps around it as one method, with the method's parameters.

    Raises:
        RecipeError: the method's result is more than a merged update, or its data do not fit a step.

    Example:
        >>> import torch
        >>> from covmerge.methods import get
        >>> whole = with_steps(get("average"), (), resolve_steps([{"rescale": {}}], "after"))
        >>> group = LinearGroup((torch.eye(2), torch.eye(2).flip(0)), (1.0, 1.0))
        >>> whole.name, round(float(whole(group).delta.norm()), 6)
        ('average + rescale', 1.414214)
    """
    if not before and not after:
        return method
    if method.writes_masks:
        raise RecipeError(
            f"method '{method.name}' makes a model per expert of its masks and factors, which steps "
            "would not know of: leave out `before` and `after`"
        )
    if method.sees == "weights":
        raise RecipeError(
            f"method '{method.name}' sees the models' weights, and steps change updates: leave out "
            "`before` and `after`"
        )
    steps = [use.step for use in (*before, *after)]
    needing = next((step.name for step in steps if step.unit == "matrix"), None)
    if needing is not None and method.takes_any_shape and method.data != "none":
        raise RecipeError(
            f"method '{method.name}' has data that lies as the tensors are stored, and step '{needing}' "
            "needs oriented matrices: leave out one of them"
        )
    needs_base = method.needs_base or any(step.needs_base for step in steps)
    unit: Any = method.unit
    if any(step.unit != "element" for step in steps):
        unit = _unit(method, steps)

    def prepared(group: LinearGroup) -> LinearGroup:
        for use in before:
            group = use.step.prepare(group, use.parameters)
        return group

    @wraps(method.kernel)
    def kernel(group: LinearGroup, **parameters: Any) -> Merged:
        merged = method(prepared(group), **parameters)
        for use in after:
            merged = use.step.finish(group, merged, use.parameters)
        return merged

    global_pass = method.global_pass
    if global_pass is not None and before:
        vectors = global_pass.vectors

        def stepped(group: LinearGroup, given: Parameters) -> tuple[Tensor, ...]:
            return vectors(prepared(group), given)

        global_pass = GlobalPass(global_pass.density, stepped)
    return replace(
        method,
        name=" + ".join((*(u.name for u in before), method.name, *(u.name for u in after))),
        kernel=kernel,
        laws=_laws(method, (*before, *after)),
        unit=unit,
        cost=_cost(method, before, (*before, *after)),
        global_pass=global_pass,
        tensor_pass=None,
        factored="none" if needs_base else _factored(method, steps),
        needs_base=needs_base,
    )


def _unit(method: Method, steps: Sequence[Step]) -> Any:
    """Return the largest unit that one of the parts must see at once."""
    if not method.takes_any_shape or any(step.unit == "matrix" for step in steps):
        return "matrix"

    def widest(parameters: Parameters) -> Unit:
        units: list[Unit] = [method.unit_for(parameters), *(step.unit for step in steps)]
        return max(units, key=_UNITS.index)

    return widest


def _factored(method: Method, steps: Sequence[Step]) -> Callable[[Parameters], Sides]:
    """Return the sides on which all parts turn."""

    def common(parameters: Parameters) -> Sides:
        sides = method.sides_for(parameters)
        for step in steps:
            if sides == "both":
                sides = step.factored
            elif step.factored not in ("both", sides):
                sides = "none"
        return sides

    return common


def _laws(method: Method, uses: Sequence[StepUse]) -> Laws:
    """Return what all parts promise; where one part does not promise, the whole promises nothing."""
    every = [method.laws, *(use.step.laws for use in uses)]
    scales = method.laws.scale_equivariant and all(u.step.scales_with(u.parameters) for u in uses)
    return Laws(
        order_invariant=all(laws.order_invariant for laws in every) or None,
        scale_equivariant=scales or None,
        rotation_equivariant=all(laws.rotation_equivariant for laws in every) or None,
        scales_with=method.laws.scales_with,
    )


def _cost(method: Method, before: Sequence[StepUse], uses: Sequence[StepUse]) -> Any:
    @wraps(method.cost)  # the cost depends on the same parameters
    def cost(d_out: int, d_in: int, count: int, itemsize: int, **parameters: Any) -> Cost:
        # The updates are held beside those that the steps make of them.
        copies = (count if before else 0) * d_out * d_in * itemsize
        total = method.cost(d_out, d_in, count, itemsize, **parameters) + Cost(0.0, copies)
        for use in uses:
            total += use.step.cost_for(use.parameters)(d_out, d_in, count, itemsize)
        return total

    return cost
