"""The quantised formats that can be read, each declared by its file. GGUF is read by file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covmerge.files.quantised import (
    autoround,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    quanto,
    torchao,
)
from covmerge.files.quantised.packed import Format

_IN_ORDER = (
    *(fp8, modelopt, compressed_tensors, mxfp4, hqq, quanto, torchao, mlx, bitsandbytes, gptq, awq),
    autoround,
)
# The formats, by their names in `quantization_config`.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {name: module.FORMAT for module in _IN_ORDER for name in module.FORMAT.names}
)
# Endings of names that only parts of packed tensors have.
PARTS = tuple(dict.fromkeys(end for form in FORMATS.values() for end in form.parts))
