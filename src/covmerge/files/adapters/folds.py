"""The layers that an adapter of another type than LoRA changes, bound to the base that has them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import LowRank, TensorHeader
from covmerge.files.adapters.config import AdapterConfig
from covmerge.files.adapters.types.layer import AdapterType, Layer, check_shapes
from covmerge.files.checkpoints.base import Checkpoint

_BIAS = ".bias"


@dataclass(frozen=True)
class Folded:
    """One layer that an adapter changes, with the headers of the adapter's tensors for it.

    Attributes:
        name: the base's tensor that the adapter changes, weight or bias, under the adapter's name
            for it.
        module: the name of the layer in the configuration.
        kind: the adapter type.
        parts: headers of the adapter's tensors.
        shape: the weight's shape as a matrix if the parts determine it; None: only the base does.
        table: whether the layer is an embedding whose factors are stored as `(d, rows)`.
        written: the tensor's name in the adapter's file, if the base has another name for it.
        config: the configuration of the adapter, or of the part of a pipeline; None: there is none.
    """

    name: str
    module: str
    kind: AdapterType
    parts: Mapping[str, TensorHeader]
    shape: tuple[int, int] | None = None
    table: bool = False
    written: str | None = None
    config: AdapterConfig | None = None

    @property
    def up(self) -> str:
        """Name of one of the adapter's tensors for this layer, for messages."""
        return next(iter(self.parts.values())).name

    @property
    def dtype(self) -> torch.dtype:
        """The widest floating dtype of the stored parts."""
        found = [part.dtype for part in self.parts.values() if part.dtype.is_floating_point]
        wide = (dtype for dtype in (torch.float64, torch.float32) if dtype in found)
        return next(chain(wide, found, (torch.float32,)))

    @property
    def elements(self) -> int:
        """Number of elements of all parts."""
        return sum(part.numel for part in self.parts.values())


@dataclass(frozen=True)
class _Stored:
    """The tensor that is updated: the base's, or the whole tensor that the adapter replaces it with."""

    header: TensorHeader
    checkpoint: Checkpoint

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.header.shape

    def read(self, dtype: torch.dtype, rows: range | None = None) -> Tensor:
        """Read the tensor, or some of its rows."""
        return self.checkpoint.read(self.header.name, rows).to(dtype)


@dataclass(frozen=True)
class _Place:
    """The place of a layer in the base.

    Attributes:
        layer: the layer of the adapter.
        name: name of the weight in the base.
        weight: the weight.
        bias: the bias, or None.
        turned: whether the weight is stored as `(d_in, d_out)`, or an embedding as `(rows, d)`.
    """

    layer: Folded
    name: str
    weight: _Stored
    bias: _Stored | None
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, `(d_out, d_in, *window)`."""
        return self.weight.shape[::-1] if self.turned else self.weight.shape


class Folds:
    """The weights and biases that an adapter's layers become.

    Args:
        stored: the adapter's file.
        folded: the layers, by name.
        replaced: names of whole tensors in the file, by the names of the base's tensors they replace.
        base: the base that the adapter is merged over; None: not known yet.
        names: the base's tensor names, by the adapter's names for them.
        conv1d: names of the base's layers that are stored as `(d_in, d_out)`; None: they are
            unknown, so that the adapter's `fan_in_fan_out` decides.

    Attributes:
        headers: headers of the weights and biases that are computed from the base's, by the
            adapter's names.
        ranks: rank, shape and dtype of the updates that have factors.
        missing: the layers that the base does not have.
    """

    def __init__(
        self,
        stored: Checkpoint,
        folded: Mapping[str, Folded],
        replaced: Mapping[str, str],
        base: Checkpoint | None = None,
        names: Mapping[str, str] | None = None,
        conv1d: Container[str] | None = None,
    ) -> None:
        self._stored, self._base = stored, base
        self._replaced = replaced
        self._places: dict[str, _Place] = {}
        self._biases: dict[str, _Place] = {}
        self._rests: dict[str, _Place] = {}
        self.headers: dict[str, TensorHeader] = {}
        self.ranks: dict[str, tuple[int, tuple[int, int], torch.dtype]] = {}
        self.missing: dict[str, Folded] = {}
        self._read_whole = lru_cache(maxsize=2)(self._whole)
        for name, layer in folded.items():
            found = None if base is None or names is None else names.get(name)
            if found is None or base is None:
                self.missing[name] = layer
            else:
                self._places[name] = self._placed(layer, base, found, conv1d)
        self._widest = self._find_widest()
        for name, place in self._places.items():
            self._take(name, place)
        for place in self._places.values():
            if place.layer.kind.rest is not None:
                self._leave_rest(place, names or {})

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for the user that names the base, if some updates depend on its weights."""
        places = [place for place in self._places.values() if place.layer.kind.needs_base]
        if not places or self._base is None:
            return ()
        kinds = ", ".join(sorted({place.layer.kind.name for place in places}))
        return (
            f"{self._stored.source} ({kinds}): what {len(places)} of its layers become depends on the "
            f"base's weights, and was computed from {self._base.source}",
        )

    def materialize(self) -> None:
        """Fetch the base's weights if any tensor is computed from them."""
        if self._base is not None and self.headers:
            self._base.materialize()

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Return (rows of) a weight or a bias as the adapter makes it, in the dtype of its header."""
        dtype = self.headers[name].dtype
        if name in self._biases:
            place = self._biases[name]
            bias = place.layer.kind.bias
            assert bias is not None
            value = bias(self._layer(place)).to(dtype)
            return value if rows is None else value[rows.start : rows.stop].clone()
        place = self._place(name)
        if rows is None:
            return self._whole(name)
        if place.turned or not place.layer.kind.by_rows:
            return self._read_whole(name)[rows.start : rows.stop].clone()
        value = _new_rows(self._layer(place, slice(rows.start, rows.stop)), place.layer.kind)
        return value.to(dtype).view(len(rows), *place.weight.shape[1:])

    def factors(self, name: str) -> LowRank:
        """Return the factors of an update, oriented like the base's tensor."""
        place = self._places[name]
        factors = place.layer.kind.factors
        assert factors is not None
        found = factors(self._layer(place))
        if not place.turned:
            return LowRank(found.left.contiguous(), found.right.contiguous())
        return LowRank(found.right.T.contiguous(), found.left.T.contiguous())

    def held(self, name: str, elements: int) -> int:
        """Return how many numbers are held in memory while `elements` of a tensor are computed.

        These are the parts of the layer and four times the computed numbers. Those are the whole
        tensor if its rows cannot be computed apart.
        """
        if name in self._biases:
            return 4 * elements
        place = self._place(name)
        apart = place.layer.kind.by_rows and not place.turned
        return place.layer.elements + 4 * (elements if apart else place.weight.header.numel)

    def _take(self, name: str, place: _Place) -> None:
        kind, layer = place.layer.kind, self._layer(place)
        check_shapes(kind, layer)
        dtype = computed_in(place.layer.dtype, place.weight.header.dtype)
        if kind.factors is not None and kind.rank is not None:
            shape = (place.weight.shape[0], prod(place.weight.shape[1:]))
            self.ranks[name] = (kind.rank(layer), shape, place.layer.dtype)
        elif kind.update is not None or kind.weight is not None:
            self.headers[name] = TensorHeader(name, place.weight.shape, dtype)
        if kind.bias is None or not kind.has_bias(layer):
            return
        if place.bias is None and kind.adds_bias:
            layer.refuse(
                "has no bias in the base, and one in the adapter: pass the adapter's own base"
            )
        if place.bias is not None:
            bias = name.removesuffix(".weight") + _BIAS
            self._biases[bias] = place
            self.headers[bias] = TensorHeader(bias, place.bias.shape, dtype)

    def _leave_rest(self, place: _Place, names: Mapping[str, str]) -> None:
        """Take the tensors tied to a layer too: PEFT changes the one tensor that they share."""
        ties: Mapping[str, str] = (self._base.untied if self._base else None) or {}
        first = ties.get(place.name, place.name)
        for name in (first, *(name for name, target in ties.items() if target == first)):
            ours = [adapter_name for adapter_name, in_base in names.items() if in_base == name]
            if name == place.name or not self._replaced.keys().isdisjoint(ours):
                continue
            if ours:
                self._layer(place).refuse(
                    f"is tied to '{name}', which the adapter changes too, and {place.layer.kind.name} "
                    "takes its part of both: save the adapter again with whole embeddings "
                    "(save_embedding_layers=True)"
                )
            self._rests[name] = place
            dtype = computed_in(place.layer.dtype, place.weight.header.dtype)
            self.headers[name] = TensorHeader(name, place.weight.shape, dtype)

    def _place(self, name: str) -> _Place:
        return self._rests.get(name) or self._places[name]

    def _placed(
        self, layer: Folded, base: Checkpoint, name: str, conv1d: Container[str] | None
    ) -> _Place:
        weight = self._stored_as(layer.name, base, name)
        assert weight is not None
        config = layer.config
        by_config = len(weight.shape) == 2 and config is not None and config.transposed
        turned = layer.table or (by_config if conv1d is None else name in conv1d)
        _check(layer, weight.header, turned=turned)
        named, bias = (n.removesuffix(".weight") + _BIAS for n in (layer.name, name))
        return _Place(layer, name, weight, self._stored_as(named, base, bias), turned)

    def _stored_as(self, name: str, base: Checkpoint, in_base: str) -> _Stored | None:
        """Return the tensor that is updated: the adapter's whole tensor, or else the base's."""
        if (whole := self._replaced.get(name)) is not None:
            return _Stored(self._stored.headers[whole], self._stored)
        return _Stored(base.headers[in_base], base) if in_base in base.headers else None

    def _find_widest(self) -> tuple[int, int]:
        shapes = [place.shape for place in self._places.values() if len(place.shape) > 1]
        if not shapes:
            return 0, 0
        return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)

    def _whole(self, name: str) -> Tensor:
        place = self._place(name)
        layer, rest = self._layer(place), place.layer.kind.rest
        made = rest(layer) if rest and name in self._rests else _new_rows(layer, place.layer.kind)
        value = made.to(self.headers[name].dtype).view(place.shape)
        return value.T.contiguous() if place.turned else value

    def _layer(self, place: _Place, rows: slice = slice(None)) -> Layer:
        dtype = computed_in(place.layer.dtype, place.weight.header.dtype)

        def of_base(rows: slice) -> Tensor:
            whole = place.turned or rows == slice(None)
            value = place.weight.read(dtype, None if whole else range(rows.start, rows.stop))
            return value.T.contiguous()[rows] if place.turned else value.view(len(value), -1)

        def base_bias() -> Tensor:
            assert place.bias is not None
            return place.bias.read(dtype)

        def part(header: TensorHeader) -> Tensor:
            value = self._stored.read(header.name)
            return value.to(dtype) if header.dtype.is_floating_point else value

        return Layer(
            where=self._stored.source,
            name=place.layer.module,
            shape=place.shape,
            parts=place.layer.parts,
            config=place.layer.config,
            read=part,
            base=of_base,
            base_bias=base_bias,
            stored=place.weight.header.dtype,
            widest=self._widest,
            count=len(self._places),
            rows=rows,
            is_rest=place.weight.checkpoint is self._stored,
        )


def _new_rows(layer: Layer, kind: AdapterType) -> Tensor:
    if kind.weight is not None:
        return kind.weight(layer)
    assert kind.update is not None
    return layer.weight.add_(kind.update(layer))


def computed_in(*stored: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 if any of the stored dtypes is that, else float32."""
    return torch.float64 if torch.float64 in stored else torch.float32


def _check(layer: Folded, header: TensorHeader, *, turned: bool) -> None:
    if not header.dtype.is_floating_point:
        raise CheckpointError(
            f"'{layer.up}' changes '{header.name}', which is {header.dtype} in the base: give the base in "
            "a floating-point dtype"
        )
    flat = len(header.shape) < 2 and not (layer.kind.vectors and header.shape)
    if flat or (turned and len(header.shape) != 2) or not header.numel:
        raise CheckpointError(
            f"'{layer.up}' changes '{header.name}', which is of shape {list(header.shape)} in the base, "
            "and no layer's weight: pass the base that the adapter was trained on"
        )
