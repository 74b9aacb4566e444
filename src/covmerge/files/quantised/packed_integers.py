"""Integers of 1 to 8 bits in int32 words, as compressed-tensors packs them (`pack-quantized`: W4A16).

`X.weight_packed` `(d_out, d_in · bits / 32)` has the inputs of a row one after another, the lowest
bits first; each number is stored plus 2^(bits − 1). `X.weight_scale` is `(d_out, groups)`, and
`X.weight_shape` has the two sizes of the weight. Zero points are packed in the same way along the outputs,
in `X.weight_zero_point` `(d_out · bits / 32, groups)`: w = (q − z) · s. `X.weight_g_idx` `(d_in)`
is the group of each input, if activation ordering mixes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.quantised.gptq import said_of_groups
from covmerge.files.quantised.integers import WORD, Mixed
from covmerge.files.quantised.packed import SMALLEST, Stored
from covmerge.files.quantised.scaled import WIDE, Scaled

_BITS = range(1, 9)
_INT32 = (torch.int32,)
_MIXED = "_g_idx"
_UNSET = -1  # in the groups of a layer that was not calibrated


def find(stored: Stored, schemes: Sequence[Mapping[str, Any]]) -> tuple[Scaled, ...]:
    """Return the layers with integers in `weight_packed`."""
    headers = stored.checkpoint.headers
    names = [n for n, h in headers.items() if n.endswith(".weight_packed") and h.dtype in _INT32]
    if not names:
        return ()
    sizes = list(dict.fromkeys(_size(stored, s) for s in schemes if s.get("type") != "float"))
    if not sizes:
        stored.refuse(f"'{names[0]}' is torch.int32, and no group of layers has integers")
    tensors = tuple(_weight(stored, n.removesuffix("_packed"), sizes) for n in names)
    symmetric = all(scheme.get("symmetric", True) for scheme in schemes)
    for tensor in tensors:
        if tensor.zeros is not None and symmetric:
            stored.refuse(
                f"'{tensor.zeros}' is there, where its config says that weights are symmetric"
            )
        if tensor.zeros is None:
            check_zeros(stored, schemes, f"{tensor.header.name}_zero_point")
    return tensors


def said(tensors: Sequence[Scaled]) -> Iterator[str]:
    """Yield descriptions of the kinds of integers."""
    groups = ((one, one.block[1]) for one in tensors)
    kinds = {(one.bits, -1 if size == one.header.shape[1] else size) for one, size in groups}
    for bits, group in sorted(kinds):
        yield f"INT{bits}, {said_of_groups(group)}"


def _size(stored: Stored, scheme: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return bits, and the number of inputs with one scale; None: all inputs."""
    bits, group = scheme.get("num_bits", 8), scheme.get("group_size")
    if bits not in _BITS:
        stored.refuse(f"its weights are int of {shorten(bits)} bits, not 1 to 8")
    if scheme.get("strategy") == "block":
        stored.refuse(
            "strategy of its weights is 'block', where tensor, channel or group can be read"
        )
    if group in (None, -1):
        return bits, None
    if not (type(group) is int and SMALLEST <= group < 2**31):
        stored.refuse(f"its group_size is {shorten(group)}, where {SMALLEST} or more can be read")
    return bits, group


def check_zeros(stored: Stored, schemes: Sequence[Mapping[str, Any]], name: str) -> None:
    """Check that a weight without zero points belongs to a symmetric scheme."""
    if schemes and all(scheme.get("symmetric") is False for scheme in schemes):
        stored.refuse(f"its weights are asymmetric, and '{name}' is missing")


def _weight(stored: Stored, name: str, sizes: Sequence[tuple[int, int | None]]) -> Scaled:
    words, scale, shape, zeros = (
        f"{name}_{leaf}" for leaf in ("packed", "scale", "shape", "zero_point")
    )
    packed = stored.matrix(words, _INT32)
    grid = stored.part(scale, WIDE).shape
    stored.part(shape, (torch.int64, torch.int32), (2,))
    # For a model that is not local, the sizes follow from those of the scales.
    local = stored.checkpoint.folder is not None
    stated = [int(size) for size in stored.checkpoint.read(shape)] if local else None
    fits: set[tuple[int, int, int]] = set()
    for bits, group in sizes:
        columns = _columns(packed, grid, bits, group) if stated is None else stated[1]
        groups = 1 if group is None else -(-columns // group)
        whole = -(-columns * bits // WORD) == packed[1] and grid == (packed[0], groups)
        if whole and stated in (None, [packed[0], columns]):
            fits.add((bits, min(group or columns, columns), columns))
    if len(fits) != 1:
        kinds = " or ".join(f"{bits} bits, {said_of_groups(group or -1)}" for bits, group in sizes)
        beside = "" if stated is None else f", and '{shape}' says {stated}"
        stored.refuse(
            f"'{words}' is {list(packed)} beside scales of {list(grid)}{beside}: "
            f"{'no layer' if not fits else 'more than one layer'} of {kinds} is stored so"
        )
    ((bits, group, columns),) = fits
    parts = (words, scale, shape)
    has_zeros = zeros in stored.checkpoint.headers
    if has_zeros:
        stored.part(zeros, _INT32, (-(-packed[0] * bits // WORD), grid[1]))
        parts = (*parts, zeros)
    mixed = mixed_of(stored, name, columns)
    parts = (*parts, mixed.name) if mixed is not None else parts
    header = TensorHeader(name, (packed[0], columns), stored.dtype)
    found = zeros if has_zeros else None
    return Scaled(header, parts, (1, group), found, bits=bits, words=True, mixed=mixed)


def mixed_of(stored: Stored, name: str, columns: int) -> Mixed | None:
    """Return the stored groups of a weight's inputs, or None if they are in order."""
    if f"{name}{_MIXED}" not in stored.checkpoint.headers:
        return None
    part = stored.part(f"{name}{_MIXED}", (*_INT32, torch.int64), (columns,))
    return Mixed(part.name, stored.checkpoint.source, _UNSET)


def _columns(packed: tuple[int, ...], grid: tuple[int, ...], bits: int, group: int | None) -> int:
    """Return the largest number of inputs that words and scales allow."""
    most = packed[1] * WORD // bits
    return most if group is None or len(grid) != 2 else min(most, grid[1] * group)
