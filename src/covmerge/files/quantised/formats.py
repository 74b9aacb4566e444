"""The quantised formats that can be read, each declared by its file. GGUF is read by file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covmerge.files.quantised.autoround import AUTOROUND
from covmerge.files.quantised.bitsandbytes import BITSANDBYTES
from covmerge.files.quantised.compressed_tensors import COMPRESSED
from covmerge.files.quantised.eight_bits import FP8, MODELOPT, QUANTO, TORCHAO
from covmerge.files.quantised.gptq import AWQ, GPTQ
from covmerge.files.quantised.hqq import HQQ
from covmerge.files.quantised.mlx import MLX
from covmerge.files.quantised.mxfp4 import GPT_OSS
from covmerge.files.quantised.packed import Format

_IN_ORDER = (
    *(FP8, MODELOPT, COMPRESSED, GPT_OSS, HQQ, QUANTO, TORCHAO, MLX, BITSANDBYTES, GPTQ, AWQ),
    AUTOROUND,
)
# The formats, by their names in `quantization_config`.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {name: form for form in _IN_ORDER for name in form.names}
)
# Endings of names that only parts of packed tensors have.
PARTS = tuple(dict.fromkeys(end for form in FORMATS.values() for end in form.parts))
