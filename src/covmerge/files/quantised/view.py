"""A quantised checkpoint as a plain one: plain names and shapes, dequantised when read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Checkpoint, Quantisation, find_header
from covmerge.files.checkpoints.folder import QUANTISATION
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.unwrapped import unwrapped
from covmerge.files.checkpoints.view import View, in_real_parts
from covmerge.files.quantised import gguf, mlx
from covmerge.files.quantised.formats import FORMATS, PARTS
from covmerge.files.quantised.gguf_file import GgufSettings
from covmerge.files.quantised.packed import Found, Stored, dtype_of, how_else
from covmerge.files.quantised.scaled import FLOAT4
from covmerge.files.tensors.describe import conv1d_names, describe_checkpoint

# Detection of packed weights in a checkpoint whose config does not declare them, so that their codes are
# never read as weights.
#
# A tensor is packed if its dtype alone cannot hold weights and its scale is stored beside it. If either
# is missing the tensor is plain: a model cast to float8, or a parameter called `scales`.

_WORDS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32)
# Endings of scales after the packed tensor's name, and names of scales in its module.
_OF_TENSOR = ("_scale", "_scale_inv", "_scales", "_scale_2", ".absmax", ".scale")
_OF_MODULE = (
    *("scales", "SCB", "weight_scale", "weight_scale_inv", "weight_scales", "scale_weight"),
    *("weight._scale", "_scale", "_weight_scale"),
)
_OF_WEIGHT = "scale"  # a name that other tensors have too
_WEIGHTS = ("weight", "W_q")
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
# Dtypes of packed codes, and words in the names of scales.
_CODES = (*_WORDS, torch.uint16)
_SCALE = re.compile(
    r"scale|scb\b|absmax|amax|quant|step_size|codebook|lut\b|zero|range", re.IGNORECASE
)
# Words in names of tensors that are stored beside a weight and are no scales.
_NO_SCALE = re.compile(r"bias|weight|original\d|mean|var", re.IGNORECASE)
_STATE = ".quant_state.bitsandbytes__"  # codes beside such a state may have any dtype


def packed_pair(headers: Mapping[str, TensorHeader]) -> tuple[str, str] | None:
    """Return the first packed tensor, and the tensor beside it that shows that it is packed.

    Example:
        >>> held = {"a.weight": torch.int8, "a.SCB": torch.float32, "b.scales": torch.float32}
        >>> packed_pair({name: TensorHeader(name, (2, 2), held[name]) for name in held})
        ('a.weight', 'a.SCB')
    """
    for name, header in headers.items():
        tensor, state, _ = name.partition(_STATE)
        if state and tensor in headers:
            return tensor, name
        if is_small(header) or header.dtype in _WORDS:
            scale = next((n for n in _scales_of(name) if n != name and n in headers), None)
            if scale is not None:
                return name, scale
    small = [n for n, header in headers.items() if is_small(header) and len(header.shape) > 1]
    return next(iter(_beside(headers, small).items()), None)


def is_small(header: TensorHeader) -> bool:
    """Return whether a tensor holds floating-point numbers of 8 bits or fewer."""
    return str(header.dtype).startswith(("torch.float8", "torch.float4"))


def scales_of_codes(headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Return the integer tensors with a floating-point scale beside them, each with its scale.

    A scale is recognised by a word in its name, or beside a weight by its shape: one number for the tensor,
    each row or each block. It lies in the module of the codes, or in one whose name begins with the codes'
    name.

    Example:
        >>> held = {"a.fc.weight": torch.int8, "a.fc.weight_quantizer._scale": torch.float32}
        >>> scales_of_codes({name: TensorHeader(name, (2, 2), held[name]) for name in held})
        {'a.fc.weight': 'a.fc.weight_quantizer._scale'}
    """
    return _beside(headers, [name for name, header in headers.items() if header.dtype in _CODES])


def _beside(headers: Mapping[str, TensorHeader], codes: Sequence[str]) -> dict[str, str]:
    """Return those of the given tensors that have a scale beside them, each with its scale."""
    if not codes:
        return {}
    near: dict[str, list[TensorHeader]] = {}
    for header in headers.values():
        for module in _modules(header):
            near.setdefault(module, []).append(header)
    found: dict[str, str] = {}
    for name in codes:
        module = name.rpartition(".")[0]
        scales = (one for one in near.get(module, ()) if _belongs(one, headers[name], module))
        scale = next(scales, None)
        if scale is not None:
            found[name] = scale.name
    return found


def _modules(header: TensorHeader) -> set[str]:
    """Return the modules whose codes a tensor may scale.

    It is `a.fc` for `a.fc.s`, `a.fc.q._scale` and `a.fc_scale`.
    """
    # No scale is float8 but an exponent.
    wide = header.dtype.itemsize > 1 or "e8m0" in str(header.dtype)
    if not (header.dtype.is_floating_point and wide):
        return set()
    module, dot, leaf = header.name.rpartition(".")
    found = {module, module.rpartition(".")[0]}
    if _SCALE.search(leaf):
        found |= {f"{module}{dot}{leaf[: mark.start()]}" for mark in re.finditer("_", leaf)} - {""}
    return found


def _belongs(scale: TensorHeader, codes: TensorHeader, module: str) -> bool:
    """Return whether a tensor near codes is their scale, by its name, or by its shape beside a weight."""
    leaf = codes.name.rpartition(".")[2]
    start = f"{module}." if module else ""
    rest = scale.name.removeprefix(start)
    inner = bool(module) and scale.name.startswith(start) and "." not in rest
    if _SCALE.search(scale.name):
        return (
            inner or rest.startswith(leaf) or (bool(module) and scale.name.startswith(f"{module}_"))
        )
    return inner and ("weight" in leaf or leaf.startswith(("q", "w"))) and _fits(codes, scale)


def _fits(codes: TensorHeader, header: TensorHeader) -> bool:
    """Return whether a tensor has one number for all codes, each row or each block, and no other name."""
    if _NO_SCALE.search(header.name.rpartition(".")[2]) or len(codes.shape) < 2:
        return False
    rows = codes.shape[0]
    blocks = len(header.shape) == len(codes.shape) and header.shape != codes.shape
    whole = blocks and all(n and not m % n for m, n in zip(codes.shape, header.shape, strict=True))
    return whole or header.numel == 1 or header.shape in ((rows,), (rows, 1))


def _scales_of(name: str) -> list[str]:
    module, dot, leaf = name.rpartition(".")
    found = [f"{name}{end}" for end in _OF_TENSOR]
    found += [f"{module}{dot}{end}" for end in _OF_MODULE]
    if leaf in _WEIGHTS:
        found.append(f"{module}{dot}{_OF_WEIGHT}")
    if name.endswith(_BLOCKS):
        found.append(f"{name.removesuffix(_BLOCKS)}{_EXPONENTS}")
    return found


class Dequantised(View):
    """A view of a quantised checkpoint in which all tensors are plain.

    Rows are read packed, with their scales, computed in float32, and rounded to the tensor's dtype. Nothing
    else of them is kept in memory. docs/quantised.md describes each format.

    Raises:
        CheckpointError: the format cannot be read, or the sizes of packed tensors, scales and config
            contradict each other.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        config = stored.config or {}
        settings = _settings(config)
        known = FORMATS.get(str(settings.get("quant_method")))
        way = known.dequantise if known is not None else ""
        form = Stored(stored, settings, dtype_of(config), way)
        form.check_dtype()
        found = _find(form)
        plain = {key: value for key, value in config.items() if key != QUANTISATION}
        self.config = plain if found.config is None else found.config
        self._packed = {packed.header.name: packed for packed in found.tensors}
        self.quantisation: Quantisation | None = Quantisation(
            stored, self._packed, form.settings, found.unused
        )
        self.headers = MappingProxyType(_plain_headers(form, found))
        turned = () if found.turned else conv1d_names(describe_checkpoint(self)) or ()
        for name in self._packed.keys() & set(turned):
            form.refuse(f"'{name}' is of a Conv1D layer, whose weight its client stores transposed")
        dtypes = dict.fromkeys(
            str(packed.header.dtype).removeprefix("torch.") for packed in found.tensors
        )
        self.notes = (
            *stored.notes,
            f"{self.source} is stored quantised ({found.said}): {len(found.tensors)} tensors are read "
            f"as {', '.join(dtypes)} (docs/quantised.md)",
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, self.source)
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.read(name, rows)
        rows = range(header.shape[0]) if rows is None else rows
        out = torch.empty((len(rows), *header.shape[1:]), dtype=header.dtype)
        packed.fill(out, rows, self._stored.read)
        return out


def is_quantised(checkpoint: Checkpoint) -> bool:
    """Return whether the tensors are packed; False for a view that dequantises them."""
    return bool((checkpoint.config or {}).get(QUANTISATION))


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint as a plain one: itself, unless it is quantised or has complex tensors."""
    checkpoint = in_real_parts(checkpoint)
    if is_quantised(checkpoint):
        return Dequantised(checkpoint)
    pair = packed_pair(checkpoint.headers)
    if pair is None:
        name = next((n for n, h in checkpoint.headers.items() if h.dtype in FLOAT4[1:]), None)
        if name is not None:
            raise CheckpointError(
                f"{checkpoint.source}: tensor '{name}' is F4, packed numbers of less than a byte, and has "
                "no scale with which anything can be computed: dequantise the checkpoint first"
            )
        return checkpoint
    packed, scale = pair
    lacking = (
        "there is no config.json that"
        if checkpoint.config is None
        else "nothing in its config.json"
    )
    raise CheckpointError(
        f"{checkpoint.source} stores quantised weights (tensor '{packed}' beside '{scale}'), and "
        f"{lacking} says how: if it is one of {', '.join(FORMATS)}, state its {QUANTISATION} at the top "
        f"of a config.json beside it, and pass the folder. Else {how_else('')}"
    )


def open_plain(source: str | Path | Mapping[str, Tensor]) -> Checkpoint:
    """Open a checkpoint, and return it as a plain one."""
    checkpoint = open_checkpoint(source)
    try:
        return unwrapped(dequantised(checkpoint))
    except BaseException:
        checkpoint.close()
        raise


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: object = config[QUANTISATION]
    if not isinstance(found, dict):
        return {}
    settings = cast("Mapping[str, Any]", found)
    if "quant_method" not in settings and {"bits", "group_size"} <= settings.keys():
        return {"quant_method": mlx.METHOD, **settings}  # only mlx-lm leaves out the method
    return settings


def _find(stored: Stored) -> Found:
    if isinstance(stored.settings, GgufSettings):
        found = gguf.find(stored)
    elif (known := FORMATS.get(str(stored.method))) is not None:
        found = known.find(stored)
    else:
        stored.refuse(f"formats that can be read are {', '.join(FORMATS)}")
    if not found.tensors:
        if (pair := packed_pair(stored.checkpoint.headers)) is not None:
            stored.refuse(f"'{pair[0]}' beside '{pair[1]}' is not how this format names its parts")
        way = f"if it is plain, remove that from config.json; else {how_else(stored.dequantise)}"
        stored.refuse("no tensor of it is packed", way)
    return found


def _plain_headers(stored: Stored, found: Found) -> dict[str, TensorHeader]:
    """Return the headers of the plain tensors by name, in file order.

    Raises:
        CheckpointError: a name stands for two tensors, or parts of a packed tensor belong to no layer.
    """
    headers = stored.checkpoint.headers
    owners = {name: packed for packed in found.tensors for name in packed.stored}
    packed_names = {packed.header.name for packed in found.tensors}
    left = [name for name in headers if name not in owners and name not in found.unused]
    for name in packed_names.intersection(left):
        stored.refuse(f"'{name}' is there both packed and plain")
    stray = [
        name
        for name in left
        if name.endswith(PARTS)
        or is_small(headers[name])
        or not packed_names.isdisjoint(_owners(name))
    ]
    if stray:
        stored.refuse(
            f"parts of it are stored as nothing that can be read: {some(stray, quoted=True)}"
        )
    used = (header for name, header in headers.items() if name not in found.unused)
    plain = (owners[one.name].header if one.name in owners else one for one in used)
    return {header.name: header for header in plain}


def _owners(name: str) -> Iterator[str]:
    """Yield the names above a name; only parts of a tensor have names below the tensor's."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
