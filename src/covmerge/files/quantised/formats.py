"""The formats that are read, by what `quantization_config` calls them. GGUF is a file, and none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covmerge.files.quantised import (
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
from covmerge.files.quantised.packed import Found, Stored

FORMATS: Mapping[str, Callable[[Stored], Found]] = MappingProxyType(
    {
        "fp8": fp8.find,
        "mxfp8": fp8.find,
        "modelopt": modelopt.find,
        "compressed-tensors": compressed_tensors.find,
        "mxfp4": mxfp4.find,
        "hqq": hqq.find,
        "quanto": quanto.find,
        "torchao": torchao.find,
        mlx.METHOD: mlx.find,
        mlx.METAL: mlx.find,
        "bitsandbytes": bitsandbytes.find,
        "gptq": gptq.find,
        "awq": awq.find,
    }
)
