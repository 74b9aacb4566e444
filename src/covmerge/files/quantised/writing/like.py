"""How a tensor is packed as one is that is stored: each kind of packed tensor with what packs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Packed, Quantisation
from covmerge.files.quantised.bitsandbytes import EightBit, FourBit
from covmerge.files.quantised.fp8 import Scaled
from covmerge.files.quantised.integers import Grouped
from covmerge.files.quantised.low_bits import BYTE
from covmerge.files.quantised.mxfp4 import Experts
from covmerge.files.quantised.packed_integers import Words
from covmerge.files.quantised.writing.bitsandbytes import of_eight_bit, of_four_bit
from covmerge.files.quantised.writing.integers import of_grouped, of_words
from covmerge.files.quantised.writing.mxfp4 import of_experts
from covmerge.files.quantised.writing.packing import Packing
from covmerge.files.quantised.writing.scaled import of_scaled


def as_stored(model: Quantisation, header: TensorHeader) -> Packing:
    """Return how a tensor is packed in a checkpoint.

    Args:
        model: the checkpoint's, whose weights are here.
        header: of the tensor, in the dtype that it is to be read as.
    """
    packed: Any = model.packed[header.name]
    if packed.header != header:
        packed = replace(packed, header=header)
    stored = model.stored
    maps = {name: stored.read(name) for name in packed.stored if name.endswith("quant_map")}
    return packing_like(packed, stored.headers, model.settings, maps)


def is_written(packed: Packed) -> bool:
    """Whether tensors can be packed as this one is."""
    match packed:
        case Scaled():
            return packed.bits == BYTE and packed.whole is None
        case Words():
            return packed.zeros is None
        case EightBit() | FourBit() | Grouped() | Experts():
            return True
        case _:
            return False


def packing_like(
    packed: Packed,
    headers: Mapping[str, TensorHeader],
    settings: Mapping[str, Any],
    maps: Mapping[str, Tensor],
) -> Packing:
    """Return how a tensor is packed that is read so.

    Args:
        packed: what reads it.
        headers: of what is stored of it.
        settings: what config.json says of the format.
        maps: stored tensors that say what numbers stand for.
    """
    match packed:
        case Scaled():
            return of_scaled(packed, headers, powers=settings.get("scale_fmt") == "ue8m0")
        case Words():
            return of_words(packed, headers)
        case EightBit():
            return of_eight_bit(packed, headers)
        case FourBit():
            return of_four_bit(packed, headers, maps)
        case Grouped():
            return of_grouped(packed, headers, symmetric=_is_symmetric(settings))
        case Experts():
            return of_experts(packed, headers)
        case _:
            raise NotImplementedError(type(packed).__name__)


def _is_symmetric(settings: Mapping[str, Any]) -> bool:
    """Whether zero points are the middle; what a config leaves open is taken as its clients take it."""
    if settings.get("quant_method") == "awq":
        return not settings.get("zero_point", True)
    return bool(settings.get("sym", True))
