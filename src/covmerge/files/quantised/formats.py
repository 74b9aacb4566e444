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
# of which MXFP4 is read (`auto_round:llm_compressor`). The layers that `extra_config` names have bits and
# groups of their own, or are plain; these follow from the sizes of what is stored.

_AWQ, _COMPRESSED = "auto_round:auto_awq", "auto_round:llm_compressor"
_MXFP4 = {"type": "float", "num_bits": 4, "group_size": 32}
_VERSIONS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
}


def find_autoround(stored: Stored) -> Found:
    """Return the layers with `qweight`; see `Found`."""
    packing = stored.setting("packing_format", *_VERSIONS, _AWQ, _COMPRESSED)
    if packing == _COMPRESSED:
        stored.setting("data_type", "mx_fp")
        stored.setting("bits", _MXFP4["num_bits"])
        stored.setting("group_size", _MXFP4["group_size"])
        schemes = {"config_groups": {"all": {"weights": _MXFP4}}, "format": "mxfp4-pack-quantized"}
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


AUTOROUND = Format(("auto-round",), find_autoround, parts=(*GPTQ.parts, "weight_packed"))

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
