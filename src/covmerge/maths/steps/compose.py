"""Steps and a method as one method: plan, engine and adapters need not know that there are steps.

What the whole needs is the most that one of its parts needs: if a step must see a whole tensor, an
elementwise method is run on whole tensors. What it promises is what all of them promise.
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
from covmerge.maths.methods.registry import GlobalPass, Laws, Method, Sides, Unit, cost_with
from covmerge.maths.registry import Parameters
from covmerge.maths.steps.registry import Step, When, registry

Steps = Sequence[str | Mapping[str, Parameters]]  # as in a recipe: a name, or {name: {parameters}}
# Each sees what those before it see.
_UNITS: tuple[Unit, ...] = ("element", "row", "tensor", "matrix")


@dataclass(frozen=True)
class StepUse:
    """A step as a plan has it: its name and all of its parameters, resolved."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def step(self) -> Step:
        """What is registered under the name."""
        return registry.get(self.name)


def resolve_steps(entries: Steps, when: When) -> tuple[StepUse, ...]:
    """Return the steps of a recipe's list, with all of their parameters.

    Raises:
        RecipeError: an unknown step or parameter, a value out of range, or a step of the other list.
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
    """The entries of a list of steps, as a program may give them."""
    if isinstance(entries, str) or not all(isinstance(one, str | Mapping) for one in entries):
        raise RecipeError(
            f"{when}: {entries!r} is no list of steps: write [name, {{name: {{parameters}}}}]"
        )
    return list(entries)


def with_steps(method: Method, before: Sequence[StepUse], after: Sequence[StepUse]) -> Method:
    """Return a method with steps around it as one method, of the same parameters.

    Raises:
        RecipeError: its result is more than a merged update, or its data does not fit a step.

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
    """The most that one of them must see at once."""
    if not method.takes_any_shape or any(step.unit == "matrix" for step in steps):
        return "matrix"

    def widest(parameters: Parameters) -> Unit:
        units: list[Unit] = [method.unit_for(parameters), *(step.unit for step in steps)]
        return max(units, key=_UNITS.index)

    return widest


def _factored(method: Method, steps: Sequence[Step]) -> Callable[[Parameters], Sides]:
    """The sides on which all of them turn."""

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
    """What all of them promise; where one does not, nothing is known of the whole."""
    every = [method.laws, *(use.step.laws for use in uses)]
    scales = method.laws.scale_equivariant and all(u.step.scales_with(u.parameters) for u in uses)
    return Laws(
        order_invariant=all(laws.order_invariant for laws in every) or None,
        scale_equivariant=scales or None,
        rotation_equivariant=all(laws.rotation_equivariant for laws in every) or None,
        scales_with=method.laws.scales_with,
    )


def _cost(method: Method, before: Sequence[StepUse], uses: Sequence[StepUse]) -> Any:
    @wraps(method.cost)  # it follows the same parameters
    def cost(d_out: int, d_in: int, count: int, itemsize: int, **parameters: Any) -> Cost:
        # The updates as they came stay beside those that steps make of them.
        copies = (count if before else 0) * d_out * d_in * itemsize
        total = method.cost(d_out, d_in, count, itemsize, **parameters) + Cost(0.0, copies)
        for use in uses:
            total += cost_with(use.step, use.step.cost, use.parameters)(
                d_out, d_in, count, itemsize
            )
        return total

    return cost
