"""What stands for the base of a merge that has none: the layout of its output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint, Quantisation
from covmerge.files.checkpoints.content import Content
from covmerge.files.checkpoints.view import View
from covmerge.files.tensors.layers import layer_name
from covmerge.files.tensors.stacked import comes_before


class Donor(View):
    """Names, shapes, config and companion files of a merge without a base: those of its first expert.

    Of a stacked model, whatever a slice gives is that of the first expert in it. It is no source of
    its own: what is read of it is read of the experts.

    Args:
        experts: all of them, in the recipe's order.
    """

    def __init__(self, experts: Mapping[str, Checkpoint]) -> None:
        first = next(iter(experts.values()))
        super().__init__(first)
        self.is_source = False
        self.quantisation: Quantisation | None = None
        self.notes = ()
        givers = [first] if first.order is None else list(experts.values())
        self._owners = {name: giver for giver in reversed(givers) for name in giver.headers}
        names = dict.fromkeys(name for giver in givers for name in giver.headers)
        self.headers = MappingProxyType(
            {name: self._owners[name].headers[name] for name in self._ordered(names)}
        )

    def _ordered(self, names: Iterable[str]) -> Iterable[str]:
        return names if self.order is None else sorted(names, key=_section)

    def read(self, name: str, rows: range | None = None) -> Tensor:
        return self._owners[name].read(name, rows)

    def materialize(self) -> None:
        """The experts are fetched as such."""

    def identity(self) -> dict[str, Json]:
        """The experts say who they are."""
        return {"kind": "donor"}

    def contents(self) -> Sequence[Content]:
        """The experts are hashed as such."""
        return []

    def close(self) -> None:
        """The experts are closed as such."""


def _section(name: str) -> tuple[int, int]:
    layer = layer_name(name)
    if layer is not None:
        return 1, layer.index
    return (0, 0) if comes_before(name) else (2, 0)
