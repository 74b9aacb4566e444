"""optimum-quanto's 8-bit state: `X.weight._data` is int8 or float8, and w = q · s.

s is the scale of the row, or of the tensor, in `X.weight._scale`. States of 2 and 4 bits cannot be read,
because they do not hold the layers' shapes.
"""

from __future__ import annotations

import torch

from covmerge.files.quantised.fp8 import FLOAT8, ROW, TENSOR, Numbers, how_scaled, scaled
from covmerge.files.quantised.packed import Format, Found, Stored

_DATA, _SCALE, _GROUPED = "._data", "._scale", "._data._data"
_NUMBERS = Numbers(
    (torch.int8, *FLOAT8), [TENSOR, ROW], scales=(torch.bfloat16, torch.float16, torch.float32)
)
_OF_ACTIVATIONS = ("input_scale", "output_scale")


def find(stored: Stored) -> Found:
    """Return the weights with `_data`; see `Found`."""
    headers = stored.checkpoint.headers
    grouped = next((name for name in headers if name.endswith(_GROUPED)), None)
    if grouped is not None:
        stored.refuse(f"'{grouped}' is there: of 2 and 4 bits the shapes of layers are not stored")
    names = [name.removesuffix(_DATA) for name in headers if name.endswith(_DATA)]
    tensors = tuple(
        scaled(stored, f"{name}{_DATA}", f"{name}{_SCALE}", _NUMBERS, plain=name) for name in names
    )
    unused = (name for name in headers if name.rpartition(".")[2] in _OF_ACTIVATIONS)
    return Found(tensors, f"quanto, 8 bit, {how_scaled(tensors)}", frozenset(unused))


FORMAT = Format(
    ("quanto",),
    find,
    parts=("._data", "._scale", "._shift"),
    plain_modules="modules_to_not_convert",
)
