"""The values of a method's parameters for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch

from covmerge.base.errors import RecipeError
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.arithmetic import STORED
from covmerge.maths.methods.mergekit import IN_ORDER, Drawn, places
from covmerge.plan.planning.operations import Operand
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe.varied import UNSAID, check_varied, is_varied, value_at


@dataclass(frozen=True)
class Settings:
    """The parameters that a recipe gives a method; some may differ from tensor to tensor.

    The model family decides defaults.
    """

    method: Method
    given: Mapping[str, Any]
    family: str | None

    @property
    def varied(self) -> tuple[str, ...]:
        """Names of the parameters that differ from tensor to tensor."""
        return tuple(key for key, value in self.given.items() if is_varied(value))

    def check(self) -> None:
        """Check the names of the parameters, and every value that they can have."""
        self.shown()
        for name, value in self.given.items():
            if is_varied(value):
                check_varied(value, lambda one, name=name: self._check(name, one))

    def _check(self, name: str, value: object) -> None:
        self.method.resolve({name: value}, self.family)

    def at(self, name: str, depth: float) -> dict[str, Any]:
        found = {key: value_at(value, name, depth) for key, value in self.given.items()}
        said = {key: value for key, value in found.items() if value is not UNSAID}
        parameters = self.method.resolve(said, self.family)
        if self.varied and self.method.ranked(parameters) is not None:
            raise RecipeError(
                f"method '{self.method.name}': '{self.varied[0]}' differs from tensor to tensor, and the "
                "largest entries are looked for in all of them together: rank each tensor by itself with "
                "`trim: tensor`, or give one value"
            )
        return parameters

    def shown(self) -> dict[str, Any]:
        """Return all parameters; those that differ from tensor to tensor are returned as in the recipe."""
        plain = {key: value for key, value in self.given.items() if not is_varied(value)}
        for key in self.given:
            if not self.method.has(key):
                self.method.resolve({key: None})  # raises, and names the nearest parameter
        return {**self.method.resolve(plain, self.family), **self.given}


def shown_parameters(method: str, given: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """Return all parameters of a recipe's method, as `Settings.shown` does."""
    return Settings(registry.get(method), given, family).shown()


# Parameters of methods that follow mergekit, which depend on all tensors of the plan.

DtypeOf = Callable[[str, Operand], torch.dtype]  # the dtype of an expert's operand


def as_mergekit(tensors: Sequence[TensorPlan], dtype_of: DtypeOf) -> tuple[TensorPlan, ...]:
    """Return the tensors with the values that `arithmetic: stored` and `drawn: in_order` stand for.

    The first stands for the dtype in which base and experts store the tensor, or the widest of
    their dtypes. The second stands for the number of random numbers drawn for tensors with earlier
    names.
    """
    by_dtype = [_with_dtype(tensor, dtype_of) for tensor in tensors]
    in_order = [t for t in by_dtype if _parameters(t).get("drawn") == IN_ORDER]
    found = places({tensor.name: _drawn(tensor) for tensor in in_order})
    return tuple(_with(t, "drawn", found[t.name]) if t.name in found else t for t in by_dtype)


def _parameters(tensor: TensorPlan) -> Mapping[str, Any]:
    return {} if tensor.merge is None else tensor.merge.parameters


def _with(tensor: TensorPlan, parameter: str, value: object) -> TensorPlan:
    assert tensor.merge is not None
    parameters = {**tensor.merge.parameters, parameter: value}
    return replace(tensor, operation=replace(tensor.merge, parameters=parameters))


def _with_dtype(tensor: TensorPlan, dtype_of: DtypeOf) -> TensorPlan:
    if _parameters(tensor).get("arithmetic") != STORED:
        return tensor
    operands = tensor.operands.items()
    held = [dtype_of(expert, operand) for expert, operand in operands if operand.tensor is not None]
    widest = reduce(torch.promote_types, held, tensor.stored.dtype)
    return _with(tensor, "arithmetic", str(widest).removeprefix("torch."))


def _drawn(tensor: TensorPlan) -> Drawn:
    given = _parameters(tensor)
    density: float | list[float] = given["density"]
    densities = density if isinstance(density, list) else [density] * len(tensor.operands)
    return Drawn(given["sparsify"], densities, prod(tensor.stored.shape))
