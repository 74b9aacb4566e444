"""The quantised formats that can be read, each declared by its file. GGUF is read by file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from covmerge.files.quantised.bitsandbytes import BITSANDBYTES
from covmerge.files.quantised.compressed_tensors import COMPRESSED
from covmerge.files.quantised.eight_bits import FP8, MODELOPT, QUANTO, TORCHAO
from covmerge.files.quantised.gptq import AWQ, GPTQ
from covmerge.files.quantised.hqq import HQQ
from covmerge.files.quantised.mlx import MLX
from covmerge.files.quantised.mxfp4 import GPT_OSS
from covmerge.files.quantised.packed import Format, Found, Stored

# AutoRound (arXiv:2309.05516), which stores layers in the layouts of other libraries.
#
# `packing_format` names the layout: GPTQ's with zero points less one (`auto_round:auto_gptq`) or as they
# are (`auto_round`, `auto_round:gptqmodel`), AWQ's (`auto_round:auto_awq`), or that of compressed-tensors,
# of which MXFP4, NVFP4 (`auto_round:llm_compressor`) and float8 by row (`auto_round:fp8_static`) are read.
# The layers that `extra_config` names have bits and groups of their own, or are plain; these follow from
# the sizes of what is stored.

_AWQ = "auto_round:auto_awq"
# By `packing_format` and `data_type`: bits, group size, and the format of compressed-tensors.
_FLOATS = {
    ("auto_round:llm_compressor", "mx_fp"): (4, 32, "mxfp4-pack-quantized"),
    ("auto_round:llm_compressor", "nv_fp"): (4, 16, "nvfp4-pack-quantized"),
    ("auto_round:fp8_static", "fp"): (8, -1, "float-quantized"),
}
_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}


def find_autoround(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    floats = {packing: kind for packing, kind in _FLOATS}
    packing = stored.setting("packing_format", *_VERSIONS, _AWQ, *floats)
    if packing in floats:
        kind = stored.setting("data_type", *(kind for own, kind in _FLOATS if own == packing))
        bits, group, form = _FLOATS[packing, kind]
        stored.setting("bits", bits)
        stored.setting("group_size", group)
        weights = {"type": "float", "num_bits": bits, "group_size": group if group > 0 else None}
        schemes = {"config_groups": {"all": {"weights": weights}}, "format": form}
        return COMPRESSED.find(replace(stored, settings={**stored.settings, **schemes}))
    stored.setting("data_type", "int", None)
    stored.setting("act_bits", 16, 32, None)
    settings = {key: stored.settings.get(key) for key in ("quant_method", "bits", "group_size")}
    if packing == _AWQ:
        found = AWQ.find(replace(stored, settings=settings))
    else:
        own = stored.settings.get("extra_config")
        settings["format"] = _VERSIONS[packing]
        settings["dynamic"] = own and {"extra_config": {"bits": None}}
        found = GPTQ.find(replace(stored, settings=settings))
    return replace(found, said=f"AutoRound, {found.said}")


AUTOROUND = Format(("auto-round",), find_autoround, parts=(*GPTQ.parts, *COMPRESSED.parts))

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
