"""Quantised formats by name: the stored parts of a plain tensor, and the entries of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.json_file import as_list, as_object
from covmerge.files.quantised.bitsandbytes import NF4, EightBit, FourBit
from covmerge.files.quantised.formats import FORMATS
from covmerge.files.quantised.gptq import AWQ_SHIFTS, Grouped
from covmerge.files.quantised.integers import WORD, Mixed
from covmerge.files.quantised.mxfp4 import GROUP, Experts
from covmerge.files.quantised.packed import Packed
from covmerge.files.quantised.scaled import ROW, TENSOR, Block, Scaled
from covmerge.files.quantised.writing.gguf import WRITTEN
from covmerge.files.quantised.writing.like import packing_like
from covmerge.files.quantised.writing.packing import Packing

SAME = "same"
_BLOCK = (128, 128)
_GROUP = 128
_OF_NF4 = 64
_Laid = tuple[list[TensorHeader], Callable[[TensorHeader, tuple[str, ...]], Packed]]


@dataclass(frozen=True)
class Layout:
    """A format that a recipe can ask for by name.

    Attributes:
        said: the format, as text.
        lay: a function that returns the headers of a plain tensor's parts, and what makes the packed tensor
            of its header and their names; None if the sizes do not allow it.
        needs: the required sizes, as text.
        settings: the entries of config.json, without the modules that stay plain.
        axes: number of axes of the tensors that it packs.
    """

    said: str
    lay: Callable[[TensorHeader], _Laid | None]
    needs: str
    settings: Mapping[str, Any]
    axes: int = 2

    def packing(self, header: TensorHeader) -> Packing | None:
        """Return the packing of a tensor; None if its sizes do not allow it."""
        laid = self.lay(header) if len(header.shape) == self.axes and header.numel else None
        if laid is None:
            return None
        stored, made = laid
        packed = made(header, tuple(part.name for part in stored))
        maps = {f"{header.name}.quant_map": torch.tensor(NF4)}
        return packing_like(packed, {part.name: part for part in stored}, self.settings, maps)


def _scaled(
    dtype: torch.dtype, block: Block, suffix: str = "_scale"
) -> Callable[[TensorHeader], _Laid]:
    def lay(header: TensorHeader) -> _Laid:
        rows, columns = header.shape
        high, wide = block[0] or rows, block[1] or columns
        grid = (1,) if block == TENSOR else (-(-rows // high), -(-columns // wide))
        # Clients of scales by row store them in the model's dtype.
        scales = torch.float32 if block == _BLOCK else header.dtype
        stored = [
            TensorHeader(header.name, header.shape, dtype),
            TensorHeader(f"{header.name}{suffix}", grid, scales),
        ]
        return stored, partial(Scaled, block=(high, wide))

    return lay


def _int4(header: TensorHeader) -> _Laid | None:
    rows, columns = header.shape
    if columns % _GROUP:
        return None
    stored = [
        TensorHeader(f"{header.name}_packed", (rows, columns * 4 // WORD), torch.int32),
        TensorHeader(f"{header.name}_scale", (rows, columns // _GROUP), header.dtype),
        TensorHeader(f"{header.name}_shape", (2,), torch.int64),
    ]
    return stored, partial(Scaled, block=(1, _GROUP), bits=4, words=True)


def _eight_bit(header: TensorHeader) -> _Laid:
    module = header.name.removesuffix(".weight")
    stored = [
        TensorHeader(header.name, header.shape, torch.int8),
        TensorHeader(f"{module}.SCB", header.shape[:1], torch.float32),
        TensorHeader(f"{module}.weight_format", (), torch.uint8),
    ]
    return stored, EightBit


def _nf4(header: TensorHeader) -> _Laid:
    name = header.name
    stored = [
        TensorHeader(name, (-(-header.numel // 2), 1), torch.uint8),
        TensorHeader(f"{name}.absmax", (-(-header.numel // _OF_NF4),), torch.float32),
        TensorHeader(f"{name}.quant_map", (len(NF4),), torch.float32),
        TensorHeader(f"{name}.quant_state.bitsandbytes__nf4", (0,), torch.uint8),
    ]
    return stored, partial(FourBit, block=_OF_NF4, unit=1, nested=None)


def _grouped(header: TensorHeader, *, awq: bool) -> _Laid | None:
    rows, columns = header.shape
    if columns % _GROUP or rows % 8:
        return None
    module, held = header.name.removesuffix(".weight"), WORD // 4
    words = (columns, rows // held) if awq else (columns // held, rows)
    stored = [
        TensorHeader(f"{module}.qweight", words, torch.int32),
        TensorHeader(f"{module}.qzeros", (columns // _GROUP, rows // held), torch.int32),
        TensorHeader(f"{module}.scales", (columns // _GROUP, rows), torch.float16),
    ]
    if awq:
        return stored, partial(Grouped, bits=4, group=_GROUP, shifts=AWQ_SHIFTS)
    groups = TensorHeader(f"{module}.g_idx", (columns,), torch.int32)
    mixed = Mixed(groups.name, "")
    return [*stored, groups], partial(Grouped, bits=4, group=_GROUP, less=1, mixed=mixed)


def _mxfp4(header: TensorHeader) -> _Laid | None:
    experts, d_in, d_out = header.shape
    if d_in % GROUP:
        return None
    grid = (experts, d_out, d_in // GROUP)
    stored = [
        TensorHeader(f"{header.name}_blocks", (*grid, GROUP // 2), torch.uint8),
        TensorHeader(f"{header.name}_scales", grid, torch.uint8),
    ]
    return stored, Experts


def _compressed(
    form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def _of_eight(form: str, kind: str, strategy: str) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": kind, "symmetric": True}
    activations = {**eight, "strategy": "token", "dynamic": True}
    return _compressed(form, {**eight, "strategy": strategy}, activations)


_INT4 = {
    **{"num_bits": 4, "type": "int", "symmetric": True},
    **{"strategy": "group", "group_size": _GROUP},
}
_ANY = "a matrix"
_GROUPS = f"a matrix of rows that {_GROUP} divides, and a number of rows that 8 divides"
_FP8 = torch.float8_e4m3fn
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "fp8-block": Layout(
            "FP8 with a scale for 128 x 128 weights, as DeepSeek's (transformers, vLLM)",
            _scaled(_FP8, _BLOCK, "_scale_inv"),
            _ANY,
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": list(_BLOCK),
            },
        ),
        "fp8-channel": Layout(
            "FP8 with a scale for each row, of compressed-tensors",
            _scaled(_FP8, ROW),
            _ANY,
            _of_eight("float-quantized", "float", "channel"),
        ),
        "fp8-tensor": Layout(
            "FP8 with a scale for each tensor, of compressed-tensors",
            _scaled(_FP8, TENSOR),
            _ANY,
            _of_eight("float-quantized", "float", "tensor"),
        ),
        "int8-channel": Layout(
            "INT8 with a scale for each row, of compressed-tensors",
            _scaled(torch.int8, ROW),
            _ANY,
            _of_eight("int-quantized", "int", "channel"),
        ),
        "int4-group": Layout(
            "INT4 with a scale for 128 weights of a row, of compressed-tensors",
            _int4,
            f"a matrix of rows that {_GROUP} divides",
            _compressed("pack-quantized", _INT4, None),
        ),
        "int8": Layout(
            "bitsandbytes' LLM.int8",
            _eight_bit,
            _ANY,
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        ),
        "nf4": Layout(
            "bitsandbytes' NF4 in blocks of 64",
            _nf4,
            _ANY,
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": False,
                "bnb_4bit_quant_storage": "uint8",
            },
        ),
        "gptq": Layout(
            "GPTQ's layout in 4 bits, groups of 128, symmetric",
            partial(_grouped, awq=False),
            _GROUPS,
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": _GROUP,
                "sym": True,
                "desc_act": False,
                "checkpoint_format": "gptq",
                "pack_dtype": "int32",
            },
        ),
        "awq": Layout(
            "AWQ's layout in 4 bits, groups of 128 with zero points",
            partial(_grouped, awq=True),
            _GROUPS,
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": _GROUP,
                "zero_point": True,
                "version": "gemm",
            },
        ),
        "mxfp4": Layout(
            "MXFP4, of the experts of GPT-OSS",
            _mxfp4,
            f"a stack of matrices whose second size {GROUP} divides",
            {"quant_method": "mxfp4"},
            axes=3,
        ),
    }
)


# Values of `quantise` in a recipe.
QUANTISED = ("none", SAME, *LAYOUTS, "gguf", *(f"gguf-{kind.lower()}" for kind in WRITTEN))

# The entries of config.json for a quantised output, with its plain modules.

_OTHER_NAME = "ignored_layers"  # if it is there, modules_to_not_convert is not read


def with_plain(settings: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a format, with more modules that are plain.

    Example:
        >>> with_plain({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, ["a", "lm_head"])
        {'quant_method': 'fp8', 'modules_to_not_convert': ['lm_head', 'a']}
    """
    if not modules:
        return {**settings}
    method = str(settings.get("quant_method"))
    if method in ("gptq", "awq"):
        # GPTQModel's form, which vLLM reads for GPTQ too: `-:` and a regular expression of names. For AWQ,
        # GPTQModel reads this form only; AutoAWQ, transformers and vLLM read the list below.
        plain: dict[str, Any] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in modules}
        settings = {**settings, "dynamic": {**plain, **as_object(settings.get("dynamic"))}}
    if method == "gptq":
        return dict(settings)
    if method == "auto-round":  # AutoRound says of each layer what differs, and 16 bits are plain
        known = as_object(settings.get("extra_config"))
        return {**settings, "extra_config": {**known, **{name: {"bits": 16} for name in modules}}}
    key = _OTHER_NAME if _OTHER_NAME in settings else FORMATS[method].plain_modules
    named = map(str, as_list(settings.get(key)))
    return {**settings, key: list(dict.fromkeys((*named, *modules)))}
