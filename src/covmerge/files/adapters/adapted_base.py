"""The base of adapters that become one adapter: its headers, and weights only when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.settings import rules_for
from covmerge.base.text import of_all_layers
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Content
from covmerge.files.checkpoints.folder import QUANTISATION
from covmerge.files.checkpoints.view import View

# A module that has tensors with other endings is stored in packed form.
_PLAIN = ("weight", "bias")


class AdaptedBase(View):
    """A base whose weights are not needed, so that they are neither downloaded nor hashed.

    The base may be stored quantised (bitsandbytes, GPTQ, AWQ, ...). Then `headers` has the tensors
    that the adapters update, with their unquantised shapes, and the other tensors that are not
    quantised.
    """

    def __init__(self, stored: Checkpoint, adapters: Iterable[Checkpoint]) -> None:
        super().__init__(stored)
        self.decides = False  # changes if an adapter trained some tensors whole
        config = stored.config
        self._packed: frozenset[str] = frozenset()
        headers = dict(stored.headers)
        if config is not None and config.get(QUANTISATION):
            self._packed = frozenset(_packed_modules(headers.values()))
            headers = {n: h for n, h in headers.items() if _is_plain(h) and not self._packs(n)}
            for adapter in adapters:
                for name, factors in adapter.low_rank.items():
                    headers.setdefault(name, TensorHeader(name, factors.shape, factors.dtype))
                headers |= {n: h for n, h in adapter.headers.items() if self._packs(n)}
            config = {key: value for key, value in config.items() if key != QUANTISATION}
            self.notes = (
                *self.notes,
                f"{self.source} is stored quantised: an adapter of it is made without its weights",
            )
        self.headers = MappingProxyType(headers)
        self.config = config

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`.

        Raises:
            InputError: the tensor is stored quantised.
        """
        if self._packs(name):
            raise InputError(
                f"'{name}' is needed, and {self.source} stores it quantised: leave it out with "
                f"{rules_for(of_all_layers(name))}, choose a method that works on the "
                "updates alone, or pass the base as it was before it was quantised"
            )
        self._stored.materialize()
        return super().read(name, rows)

    def materialize(self) -> None:
        """Do nothing; `read` fetches the weights when they are needed."""

    def contents(self) -> Sequence[Content]:
        """Return the base's contents, or one hash of its headers if the result does not need weights."""
        if self.decides or self.identity()["kind"] == "hub":
            return self._stored.contents()
        digest = hashlib.sha256()
        for name, header in self._stored.headers.items():
            digest.update(f"{name!r} {header.dtype} {header.shape}\n".encode())
        return [Content("headers", 0, lambda _: f"sha256:{digest.hexdigest()}")]

    def _packs(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return module in self._packed and leaf != "bias"


def _is_plain(header: TensorHeader) -> bool:
    return header.name.rpartition(".")[2] in _PLAIN and header.dtype.is_floating_point


def _packed_modules(headers: Iterable[TensorHeader]) -> Iterable[str]:
    for header in headers:
        if not _is_plain(header):
            module, _, leaf = header.name.rpartition(".")
            # bitsandbytes: ...q_proj.weight.quant_map beside ...q_proj.weight
            yield module.partition(".weight")[0] if ".weight" in module else module
            if leaf in _PLAIN:
                yield module
