"""FourierFT (arXiv:2405.03003): an update with few frequencies, at places drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_fft: Any = torch.fft  # torch carries no types for it


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("spectrum", 0)
    if count > layer.d_out * layer.d_in:
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} frequencies")
    pattern: Any = layer.option("n_frequency_pattern") or {}
    known = [layer.integer("n_frequency", 1000), *dict(pattern).values()]
    # Fewer numbers than were trained would be another update.
    return {"spectrum": (count if count in known else known[0],)}


def _update(layer: Layer) -> Tensor:
    """α Re(F⁻¹ S), whole."""
    spectrum = layer["spectrum"]
    generator = torch.Generator().manual_seed(layer.integer("random_loc_seed", 777))
    order = torch.randperm(layer.d_out * layer.d_in, generator=generator)
    places = order[: len(spectrum)].clone()
    del order
    dense = spectrum.new_zeros(layer.d_out, layer.d_in)
    dense.view(-1)[places] = spectrum
    update = cast("Tensor", _fft.ifft2(dense)).real.contiguous()
    return update.mul_(layer.number("scaling", 150.0))


FOURIERFT = AdapterType(
    name="FOURIERFT",
    equation="W + α·Re(F⁻¹S), the places of S drawn from the seed",
    ends={".fourierft_spectrum": "spectrum"},
    shapes=_shapes,
    update=_update,
    by_rows=False,
    fields=frozenset({"scaling", "random_loc_seed", "n_frequency", "n_frequency_pattern"}),
    unused=frozenset({"init_weights"}),
)
