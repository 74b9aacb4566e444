"""WaveFT (arXiv:2505.12532): an update with few wavelet coefficients, at places drawn from a seed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

_HALF = 0.5**0.5
_HAAR = [_HALF, _HALF], [_HALF, -_HALF]  # what both filters of "db1" are


def _shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("spectrum", 0)
    if not 0 < count <= layer.d_out * layer.d_in:
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} coefficients")
    pattern: Any = layer.option("n_frequency_pattern") or {}
    known = [layer.integer("n_frequency", 2592), *dict(pattern).values()]
    free = layer.flag("proportional_parameters")  # the counts follow the sizes of all layers
    return {"spectrum": (count if free or count in known else known[0],)}


def _update(layer: Layer) -> Tensor:
    """S · IDWT(S), whole; with `use_idwt` false s · S."""
    spectrum = layer["spectrum"] * layer.number("scaling", 25.0)
    generator = torch.Generator().manual_seed(layer.integer("random_loc_seed", 777))
    order = torch.randperm(layer.d_out * layer.d_in, generator=generator)
    places = order[: len(spectrum)].clone()
    del order
    rows, columns = places // layer.d_in, places % layer.d_in
    found = spectrum.new_zeros(layer.d_out, layer.d_in)
    if not layer.flag("use_idwt", default=True):
        return found.index_put_((rows, columns), spectrum)
    return _add_wavelets(found, spectrum, rows, columns, _filters(layer))


def _add_wavelets(
    found: Tensor, values: Tensor, rows: Tensor, columns: Tensor, filters: Tensor
) -> Tensor:
    """Add the outer product of two filters for every coefficient: low or high, by its quarter of S."""
    length = filters.shape[1]
    row, lower = _place(rows, len(found), length)
    column, right = _place(columns, found.shape[1], length)
    # PEFT takes the right upper quarter for that which is high along the rows' index.
    first, second = filters[right.long()], filters[lower.long()]
    for i in range(length):
        for j in range(length):
            added = values * (first[:, i] * second[:, j]).to(values.dtype)
            inside = _inside(row + i, len(found)) & _inside(column + j, found.shape[1])
            at = (row[inside] + i, column[inside] + j)
            found.index_put_(at, added[inside], accumulate=True)
    return found


def _place(index: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The first number that a coefficient's filter reaches along an axis, and whether it is a high one."""
    padded = size + length - 2
    padded += padded % 2
    position = index + (padded - size) // 2
    high = position >= padded // 2
    return 2 * (position - high * (padded // 2)) - (length - 2), high


def _inside(place: Tensor, size: int) -> Tensor:
    return (place >= 0) & (place < size)


def _filters(layer: Layer) -> Tensor:
    """The low and the high filter of the reconstruction, `(2, length)`, in float64."""
    name: object = layer.option("wavelet_family", "db1")
    if name == "db1":
        return torch.tensor(_HAAR, dtype=torch.float64)
    try:
        package: Any = importlib.import_module("pywt")
    except ImportError:
        layer.refuse(
            f"is made of the wavelets {name!r}, whose filters the package PyWavelets has: pip install "
            "PyWavelets"
        )
    if name not in cast("list[str]", package.wavelist(kind="discrete")):
        layer.refuse(f"is made of the wavelets {name!r}, which PyWavelets does not know")
    wavelet = package.Wavelet(name)
    return torch.tensor([wavelet.rec_lo, wavelet.rec_hi], dtype=torch.float64)


WAVEFT = AdapterType(
    name="WAVEFT",
    equation="W + s·(inverse wavelet transform of S), the places of S drawn from the seed",
    ends={".waveft_spectrum": "spectrum"},
    shapes=_shapes,
    update=_update,
    by_rows=False,
    fields=frozenset(
        {
            *("scaling", "random_loc_seed", "n_frequency", "n_frequency_pattern"),
            *("use_idwt", "wavelet_family", "proportional_parameters"),
        }
    ),
    unused=frozenset({"init_weights"}),
)
