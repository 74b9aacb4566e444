"""Types whose update has a structure: circulant or repeated blocks, few frequencies or few wavelets."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.files.adapters.types.layer import AdapterType, Layer, Shape

# C3A (arXiv:2407.19342): an update of circulant blocks.


def _c3a_shapes(layer: Layer) -> Mapping[str, Shape]:
    size = max(1, layer.size("kernel", 2))
    if layer.d_out % size or layer.d_in % size:
        layer.refuse(
            f"is {list(layer.shape)} in the base, which blocks of {size} do not divide: pass the base that "
            "the adapter was trained on, or fetch the adapter again"
        )
    return {"kernel": (layer.d_out // size, layer.d_in // size, size)}


def _c3a_update(layer: Layer) -> Tensor:
    """Return the wanted rows of blocks with w[(j − i) mod b] at (i, j), divided by d_in."""
    kernel = layer["kernel"]
    size = kernel.shape[2]
    rows = torch.arange(layer.d_out)[layer.rows]
    turned = (torch.arange(size)[None] - (rows % size)[:, None]) % size
    blocks = kernel[rows // size]
    return blocks.gather(2, turned[:, None].expand(blocks.shape)).flatten(1) / layer.d_in


C3A = AdapterType(
    name="C3A",
    equation="W + circulant blocks / d_in",
    ends={".c3a_kernel": "kernel"},
    shapes=_c3a_shapes,
    update=_c3a_update,
    fields=("block_size", "block_size_pattern"),
)


# FourierFT (arXiv:2405.03003): an update with few frequencies, at places drawn from a seed.

_fft: Any = torch.fft  # torch has no types for it


def _fourierft_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("spectrum", 0)
    if count > layer.d_out * layer.d_in:
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} frequencies")
    pattern: Any = layer.option("n_frequency_pattern") or {}
    known = [layer.integer("n_frequency", 1000), *dict(pattern).values()]
    # A file with fewer numbers than were trained would give another update.
    return {"spectrum": (count if count in known else known[0],)}


def _drawn_places(layer: Layer, count: int) -> Tensor:
    """Return `count` places among a layer's entries, drawn from the seed."""
    generator = torch.Generator().manual_seed(layer.integer("random_loc_seed", 777))
    # A copy, so that the memory of the order of all entries is freed.
    return torch.randperm(layer.d_out * layer.d_in, generator=generator)[:count].clone()


def _fourierft_update(layer: Layer) -> Tensor:
    """Return α Re(F⁻¹ S), as a whole matrix."""
    spectrum = layer["spectrum"]
    dense = spectrum.new_zeros(layer.d_out, layer.d_in)
    dense.view(-1)[_drawn_places(layer, len(spectrum))] = spectrum
    update = cast("Tensor", _fft.ifft2(dense)).real.contiguous()
    return update.mul_(layer.number("scaling", 150.0))


FOURIERFT = AdapterType(
    name="FOURIERFT",
    equation="W + α·Re(F⁻¹S), the places of S drawn from the seed",
    ends={".fourierft_spectrum": "spectrum"},
    shapes=_fourierft_shapes,
    update=_fourierft_update,
    by_rows=False,
    fields=("scaling", "random_loc_seed", "n_frequency", "n_frequency_pattern"),
)


# WaveFT (arXiv:2505.12532): an update with few wavelet coefficients, at places drawn from a seed.

_HALF = 0.5**0.5
_HAAR = [_HALF, _HALF], [_HALF, -_HALF]  # the low and the high filter of "db1"


def _waveft_shapes(layer: Layer) -> Mapping[str, Shape]:
    count = layer.size("spectrum", 0)
    if not 0 < count <= layer.d_out * layer.d_in:
        layer.refuse(f"is {list(layer.shape)} in the base, and has {count} coefficients")
    pattern: Any = layer.option("n_frequency_pattern") or {}
    known = [layer.integer("n_frequency", 2592), *dict(pattern).values()]
    free = layer.flag("proportional_parameters")  # the counts depend on the sizes of all layers
    return {"spectrum": (count if free or count in known else known[0],)}


def _waveft_update(layer: Layer) -> Tensor:
    """Return the inverse wavelet transform of s · S, as a whole matrix; without `use_idwt`, s · S."""
    spectrum = layer["spectrum"] * layer.number("scaling", 25.0)
    places = _drawn_places(layer, len(spectrum))
    rows, columns = places // layer.d_in, places % layer.d_in
    found = spectrum.new_zeros(layer.d_out, layer.d_in)
    if not layer.flag("use_idwt", default=True):
        return found.index_put_((rows, columns), spectrum)
    return _add_wavelets(found, spectrum, rows, columns, _filters(layer))


def _add_wavelets(
    found: Tensor, values: Tensor, rows: Tensor, columns: Tensor, filters: Tensor
) -> Tensor:
    """Add for each coefficient an outer product of two filters, low or high by its quarter of S."""
    length = filters.shape[1]
    row, lower = _place(rows, len(found), length)
    column, right = _place(columns, found.shape[1], length)
    # In PEFT, the right upper quarter has the coefficients that are high along the row index.
    first, second = filters[right.long()], filters[lower.long()]
    for i in range(length):
        for j in range(length):
            added = values * (first[:, i] * second[:, j]).to(values.dtype)
            inside = _inside(row + i, len(found)) & _inside(column + j, found.shape[1])
            at = (row[inside] + i, column[inside] + j)
            found.index_put_(at, added[inside], accumulate=True)
    return found


def _place(index: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first index that a coefficient's filter reaches along an axis, and whether it is high."""
    padded = size + length - 2
    padded += padded % 2
    position = index + (padded - size) // 2
    high = position >= padded // 2
    return 2 * (position - high * (padded // 2)) - (length - 2), high


def _inside(place: Tensor, size: int) -> Tensor:
    return (place >= 0) & (place < size)


def _filters(layer: Layer) -> Tensor:
    """Return the low and the high filter of the reconstruction, `(2, length)`, in float64."""
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
    shapes=_waveft_shapes,
    update=_waveft_update,
    by_rows=False,
    fields=(
        *("scaling", "random_loc_seed", "n_frequency", "n_frequency_pattern", "use_idwt"),
        *("wavelet_family", "proportional_parameters"),
    ),
)


# MiSS, formerly Bone (arXiv:2409.15371): one small matrix is repeated along the layer's inputs.


def _miss_shapes(layer: Layer) -> Mapping[str, Shape]:
    rank = layer.integer("r", 64, least=1)
    if layer.option("init_weights") == "bat":
        if layer.d_in % rank or layer.d_out % rank:
            layer.refuse(
                f"is {list(layer.shape)} in the base, which blocks of {rank} do not divide"
            )
        return {"block": (layer.d_out // rank, rank, rank)}
    if rank > layer.d_in:
        layer.refuse(f"has {layer.d_in} inputs, and its matrix {rank} rows")
    mini = layer.option("init_weights") == "mini"
    columns = layer.integer("mini_r", 1, least=1) if mini else layer.d_out
    if layer.d_out % columns:
        layer.refuse(f"has {layer.d_out} outputs, which {columns} columns do not divide")
    return {"block": (rank, columns)}


def _weight(layer: Layer) -> Tensor:
    """Return the wanted rows of W + Mᵀ repeated; "bat" makes each block W_jk + W_jk M_j + M_j instead."""
    if layer.option("init_weights") == "bat":
        return _bat(layer)
    block = layer["block"].T
    repeated = block[torch.arange(layer.d_out)[layer.rows] % len(block)]
    return layer.weight + repeated[:, torch.arange(layer.d_in) % repeated.shape[1]]


def _bat(layer: Layer) -> Tensor:
    blocks, weight = layer["block"], layer.weight
    size = blocks.shape[1]
    found = weight.clone()
    # The wanted rows may begin or end inside a block.
    rows = range(*layer.rows.indices(layer.d_out))
    for block in range(rows.start // size, -(-rows.stop // size)):
        first, last = max(rows.start, block * size), min(rows.stop, (block + 1) * size)
        wanted = slice(first - rows.start, last - rows.start)
        apart = weight[wanted].view(last - first, -1, size)
        inside = blocks[block][first - block * size : last - block * size]
        found[wanted] += (apart @ blocks[block] + inside[:, None]).flatten(1)
    return found


MISS = AdapterType(
    name="MISS",
    equation='W + Mᵀ repeated along the inputs; of "bat" W + W·M + M by blocks',
    ends={".miss_block": "block", ".bone_block": "block"},
    shapes=_miss_shapes,
    weight=_weight,
    fields=("r", "mini_r", "miss_dropout"),
)

TYPES = (C3A, FOURIERFT, MISS, WAVEFT)
