"""A view of a dense checkpoint under the names of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.base.errors import InputError, TensorError
from covmerge.base.text import some
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, copy_rows, find_header, refuse_adapter
from covmerge.files.checkpoints.config_counts import layer_count
from covmerge.files.checkpoints.view import View
from covmerge.plan.moe.architectures import ARCHITECTURES, EMBEDDING, MLP, SHARED, Architecture
from covmerge.plan.moe.gates import Gates, gates_of
from covmerge.plan.recipe.sections import Mixture

_Read = Callable[[TensorHeader, range | None], Tensor]


class MixtureView(View):
    """A view of a dense checkpoint as a mixture in which its MLP stands for every expert.

    `factors` has the factor of each expert's `down_proj`, by the expert's number. If it is `noted`, its
    notes include those of the routers.
    """

    def __init__(
        self,
        stored: Checkpoint,
        architecture: Architecture,
        gates: Gates,
        moe: Mixture,
        factors: Mapping[int, float],
        *,
        noted: bool = False,
    ) -> None:
        super().__init__(stored, None, *(gates.notes if noted else ()))
        self._gates, self._factors = gates, factors
        self._gated = moe.shared is not None and moe.shared.gated
        if stored.config is not None:
            self.config = architecture.config(stored.config, gates.shape[0], moe.experts_per_token)
        self._tensors = {name: (header, read) for name, header, read in self._mixed(architecture)}
        self.headers = MappingProxyType(
            {name: replace(header, name=name) for name, (header, _) in self._tensors.items()}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        find_header(self.headers, name, rows, self.source)
        header, read = self._tensors[name]
        return read(header, rows)

    def _as_stored(self, header: TensorHeader, rows: range | None) -> Tensor:
        return self._stored.read(header.name, rows)

    def _scaled(self, factor: float, header: TensorHeader, rows: range | None) -> Tensor:
        stored = self._as_stored(header, rows)
        wide = stored if stored.dtype.itemsize > 1 else stored.float()  # torch multiplies no others
        scaled = (wide * factor).to(stored.dtype)
        if not scaled.float().isfinite().all() and wide.isfinite().all():
            raise TensorError(
                f"'{header.name}' times its scale of {factor:g} exceeds {stored.dtype}: write a smaller "
                "one under moe.residual_scale"
            )
        return scaled

    def _zero(self, header: TensorHeader, rows: range | None) -> Tensor:
        return copy_rows(torch.zeros(header.shape, dtype=header.dtype), rows)

    def _router(self, layer: int, header: TensorHeader, rows: range | None) -> Tensor:
        routers = self._gates.of(layer)[: self._gates.shape[0]]
        return copy_rows(routers.to(header.dtype), rows)

    def _shared_gate(self, layer: int, header: TensorHeader, rows: range | None) -> Tensor:
        return copy_rows(self._gates.of(layer)[self._gates.shape[0] :].to(header.dtype), rows)

    def _mixed(self, architecture: Architecture) -> Iterator[tuple[str, TensorHeader, _Read]]:
        """Yield each tensor's name, the header of its stored or created tensor, and its reader."""
        count, _ = self._gates.shape
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
                yield from self._routing(architecture, layer, header)
            for index in (*range(count), *(() if architecture.shared is None else (SHARED,))):
                factor = self._factors[index] if part == "down_proj" else 1.0
                read = self._as_stored if factor == 1.0 else partial(self._scaled, factor)
                yield architecture.expert(layer, index, part), header, read

    def _routing(
        self, architecture: Architecture, layer: str, header: TensorHeader
    ) -> Iterator[tuple[str, TensorHeader, _Read]]:
        """Yield the same for a layer's router, the router's bias and the shared expert's gate."""
        count, hidden = self._gates.shape
        number = int(layer.rpartition(".")[2])
        router = replace(header, shape=(count, hidden))
        yield architecture.gate(layer), router, partial(self._router, number)
        block = f"{layer}.{architecture.block}"
        if architecture.bias is not None:
            yield f"{block}.{architecture.bias}", replace(header, shape=(count,)), self._zero
        if architecture.shared_gate is not None:
            read = partial(self._shared_gate, number) if self._gated else self._zero
            yield f"{block}.{architecture.shared_gate}", replace(header, shape=(1, hidden)), read


def _factors(moe: Mixture, architecture: Architecture, experts: Sequence[str]) -> dict[int, float]:
    """Return the factor of `down_proj` for each expert, by the expert's number.

    By default, experts that equal the base give the base's outputs: the weights of routed experts
    add up to 1, and a shared expert has half of the whole. A gate of zero already gives it the
    weight ½, and other gates do so on average.
    """
    routed = 1.0 if architecture.shared is None else 0.5
    scales = [moe.residual_scale.get(name, routed) for name in moe.routed(experts)]
    found = dict(enumerate(scales))
    if architecture.shared is not None:
        gated = moe.shared is not None and moe.shared.gated
        default = 1.0 if gated else 0.5
        scale = moe.residual_scale.get(moe.shared.expert, default) if moe.shared else default
        found[SHARED] = scale if gated or architecture.shared_gate is None else 2 * scale
    return found


def mixed(
    moe: Mixture | None, sources: Mapping[str | None, Checkpoint], experts: Sequence[str]
) -> Mapping[str | None, Checkpoint]:
    """Return base (None) and experts as views for a plan of this mixture; unchanged without a mixture.

    The sources are the base and those of the experts that the plan reads.

    Raises:
        InputError: a source is an adapter or of another architecture, or gates cannot be computed.
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
    factors = _factors(moe, architecture, experts)
    return {
        name: MixtureView(source, architecture, gates, moe, factors, noted=name is None)
        for name, source in sources.items()
    }
