"""A dense checkpoint under the names of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.text import some
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, copy_rows, find_header, refuse_adapter
from covmerge.files.checkpoints.config_counts import layer_count
from covmerge.files.checkpoints.view import View
from covmerge.plan.moe.architectures import ARCHITECTURES, EMBEDDING, MLP, Architecture
from covmerge.plan.moe.gates import Gates, gates_of
from covmerge.plan.recipe.sections import Mixture

_Read = Callable[[TensorHeader, range | None], Tensor]


class MixtureView(View):
    """A view of a dense checkpoint: each expert of the mixture is its MLP, so that any expert can be read.

    Args:
        stored: the checkpoint.
        architecture: of the mixture.
        gates: the routers.
        per_token: experts that a token is given to.
        noted: whether it says what there is to say of the routers.

    Raises:
        InputError: it is of no architecture that the architecture holds.
    """

    def __init__(
        self,
        stored: Checkpoint,
        architecture: Architecture,
        gates: Gates,
        per_token: int,
        *,
        noted: bool = False,
    ) -> None:
        super().__init__(stored, None, *(gates.notes if noted else ()))
        self._gates = gates
        if stored.config is not None:
            self.config = architecture.config(stored.config, gates.shape[0], per_token)
        self._tensors = {name: (header, read) for name, header, read in self._mixed(architecture)}
        self.headers = MappingProxyType(
            {name: replace(header, name=name) for name, (header, _) in self._tensors.items()}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        find_header(self.headers, name, rows, self.source)
        header, read = self._tensors[name]
        return read(header, rows)

    def _as_stored(self, header: TensorHeader, rows: range | None) -> Tensor:
        return self._stored.read(header.name, rows)

    def _halved(self, header: TensorHeader, rows: range | None) -> Tensor:
        stored = self._as_stored(header, rows)
        wide = stored if stored.dtype.itemsize > 1 else stored.float()  # torch divides no others
        return (wide / 2).to(stored.dtype)

    def _zero(self, header: TensorHeader, rows: range | None) -> Tensor:
        return copy_rows(torch.zeros(header.shape, dtype=header.dtype), rows)

    def _router(self, layer: int, header: TensorHeader, rows: range | None) -> Tensor:
        return copy_rows(self._gates.of(layer).to(header.dtype), rows)

    def _mixed(self, architecture: Architecture) -> Iterator[tuple[str, TensorHeader, _Read]]:
        """Name of each tensor, the header of what is stored or made, and what reads that."""
        count, hidden = self._gates.shape
        for name, header in self._stored.headers.items():
            found = MLP.fullmatch(name)
            if ".mlp." in name and (found is None or found["part"] not in architecture.parts):
                raise InputError(
                    f"{self.source} has '{name}', and an expert of a mixture has "
                    f"{some(architecture.parts)} alone: this model cannot become one"
                )
            if found is None:
                yield name, header, self._as_stored
                continue
            layer, part = found["layer"], found["part"]
            if part == next(iter(architecture.parts)):
                number = int(layer.rpartition(".")[2])
                gate = replace(header, shape=(count, hidden))
                yield architecture.gate(layer), gate, partial(self._router, number)
                if architecture.shared is not None:
                    yield (
                        architecture.shared_gate(layer),
                        replace(header, shape=(1, hidden)),
                        self._zero,
                    )
            read = self._as_stored
            if architecture.shared is not None:
                yield architecture.shared_expert(layer, part), header, read
                read = self._halved if part == "down_proj" else read
            for index in range(count):
                yield architecture.expert(layer, index, part), header, read


def mixed(
    moe: Mixture | None, sources: Mapping[str | None, Checkpoint], experts: Sequence[str]
) -> Mapping[str | None, Checkpoint]:
    """Return base (None) and experts as they look to a plan of this mixture; themselves without one.

    Args:
        moe: of the recipe.
        sources: those that the plan reads; the base is among them.
        experts: names of all experts, in their order.

    Raises:
        InputError: a source is an adapter, or of another architecture; gates cannot be made.
    """
    if moe is None or isinstance(sources[None], MixtureView):
        return sources
    architecture, base = ARCHITECTURES[moe.architecture], sources[None]
    for name, source in sources.items():
        refuse_adapter(source, "a mixture is made of models", str(name))
    layers = layer_count(base.config)
    if layers is None or EMBEDDING not in base.headers:
        raise InputError(
            f"{base.source} lacks a config.json with the number of layers, or '{EMBEDDING}': a mixture is "
            f"made of models of {' or '.join(architecture.bases)}"
        )
    found = {int(m["layer"].rpartition(".")[2]) for n in base.headers if (m := MLP.fullmatch(n))}
    if found != set(range(layers)):
        raise InputError(
            f"{base.source}: config.json says {layers} layers, and {len(found)} of them have an MLP: "
            "correct config.json"
        )
    gates = gates_of(moe, sources, experts, layers)
    return {
        name: MixtureView(source, architecture, gates, moe.experts_per_token, noted=name is None)
        for name, source in sources.items()
    }
