"""By which names the merged adapter knows the layers: those of the model that it is loaded over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from covmerge.files.checkpoints import Checkpoint
from covmerge.plan.planning.work import TensorPlan


@dataclass(frozen=True)
class Naming:
    """Names in the model, from those of its parameters as the base's config.json has them.

    Attributes:
        added: what comes before them: `bert.` where the adapters are of a model with a head, and the
            base is without.
        removed: what they lose: the other way round.
        stored: names as the base's files have them, in place of the parameters'.
        note: what a user should know of the choice.
    """

    added: str = ""
    removed: str = ""
    stored: bool = False
    note: str = ""

    def of(self, tensor: TensorPlan) -> str:
        """Return the name of a tensor."""
        return self.parameter(tensor.name if self.stored else tensor.parameter)

    def parameter(self, name: str) -> str:
        """Return the name of a parameter."""
        return f"{self.added}{name.removeprefix(self.removed)}"

    def module(self, name: str) -> str:
        """Return the name of a module."""
        return self.parameter(f"{name}.").removesuffix(".")


def naming_of(tensors: Sequence[TensorPlan], adapters: Mapping[str, Checkpoint]) -> Naming:
    """Return the names that all adapters have; of several or none, those of the base's own model."""
    pairs = list(_named_by_adapters(tensors, adapters))
    for stored in (False, True):
        names = [(t.name if stored else t.parameter, found) for t, found in pairs]
        candidates = {_difference(name, found) for name, found in names}
        if len(candidates) == 1 and (only := candidates.pop()) is not None:
            return Naming(*only, stored=stored)
    if not pairs:
        return Naming()
    return Naming(
        note="the adapters name the layers in different ways, as models with and without a head do: "
        "the merged one names them as the model of the base's config.json does"
    )


def _named_by_adapters(
    tensors: Sequence[TensorPlan], adapters: Mapping[str, Checkpoint]
) -> Iterator[tuple[TensorPlan, str]]:
    for tensor in tensors:
        for expert, operand in tensor.operands.items():
            if operand.tensor and expert in adapters:
                yield tensor, operand.tensor


def _difference(name: str, found: str) -> tuple[str, str] | None:
    """Return what is added to a name and what is removed to get another one; None: more than that."""
    if found.endswith(name):
        return found.removesuffix(name), ""
    if name.endswith(found):
        return "", name.removesuffix(found)
    return None
