"""A method's parameters, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covmerge.base.errors import RecipeError
from covmerge.maths.methods import Method
from covmerge.plan.recipe.varied import UNSAID, check_varied, is_varied, value_at


@dataclass(frozen=True)
class Settings:
    """The parameters that a recipe gives a method.

    Attributes:
        method: whose they are.
        given: as in the recipe; some may differ from tensor to tensor.
        family: model family, which decides defaults.
    """

    method: Method
    given: Mapping[str, Any]
    family: str | None

    @property
    def varied(self) -> tuple[str, ...]:
        """Names of those that differ from tensor to tensor."""
        return tuple(key for key, value in self.given.items() if is_varied(value))

    def check(self) -> None:
        """Check names, and every value that a parameter may have.

        Raises:
            RecipeError: an unknown name, or a value out of its range.
        """
        self.shown()
        for name, value in self.given.items():
            if is_varied(value):
                check_varied(value, lambda one, name=name: self._check(name, one))

    def at(self, name: str, depth: float) -> dict[str, Any]:
        """Return all parameters for one tensor.

        Raises:
            RecipeError: a value out of its range, or one that differs where the whole model is ranked.
        """
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
        """Return all parameters; those that differ from tensor to tensor as they are given."""
        plain = {key: value for key, value in self.given.items() if not is_varied(value)}
        for key in self.given:
            if not self.method.has(key):
                self.method.resolve({key: None})  # which refuses it, and names the nearest
        return {**self.method.resolve(plain, self.family), **self.given}

    def _check(self, name: str, value: object) -> None:
        self.method.resolve({name: value}, self.family)
