"""Merges of models that are stored quantised: in all variants of a format, and damaged.

    python -m tests.campaigns.packed --count 200

The library that owns a format says what the codes stand for (bitsandbytes, compressed-tensors,
transformers). GPTQ, AWQ and FP8 are decoded here in float64. A damaged file is read in the same way: a
flipped bit in a code is another weight, and no fault. Settings that contradict what is stored have no
reading here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from tests.campaigns import formats, outcomes
from tests.campaigns.merged import Source, plain, trial
from tests.quantised.models import in_words

Stored = dict[str, Tensor]
Settings = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: of the layer's weight.
        shapes: that it may have.
        pack: draws a variant, and packs a weight.
        read: what the owner of the format makes of it, in the dtype that a config names.
        parts: what the names of what is stored of the layer begin with.
        refused: whether covmerge documents that it does not read the variant.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    pack: Callable[[Tensor, Random], tuple[Settings, Stored]]
    read: Callable[[Settings, Stored, torch.dtype], Tensor]
    refused: Callable[[Settings, Stored], bool] = lambda settings, stored: False

    @property
    def parts(self) -> str:
        return self.name.removesuffix("weight")


# Inside a block: a layer that lies outside may be a head, whose shape each expert chooses.
_MODULE = "model.layers.0.mlp.up_proj"
_LAYER, _NORM = f"{_MODULE}.weight", "model.layers.0.input_layernorm.weight"
_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
MATRICES = ((32, 64), (64, 96), (96, 32))


def _group_of(random: Random, d_in: int) -> int:
    return random.choice([g for g in (16, 32, d_in) if d_in % g == 0])


def _pack_gptq(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    bits, d_in = random.choice((2, 3, 4, 8)), weight.shape[1]
    group = _group_of(random, d_in)
    order = torch.arange(d_in, dtype=torch.int32) // group
    if random.random() < 0.4:
        order = order[torch.randperm(d_in, generator=_generator(random))]
    version = random.choice(("gptq", "gptq_v2"))
    top = 2**bits - 1
    # One more than a stored zero point of `gptq` must not be beyond the bits.
    zeros = torch.randint(1, top, (d_in // group, len(weight)), generator=_generator(random))
    codes, scales = _codes(weight.mT, order.long(), zeros, top)
    stored = {
        "qweight": in_words(codes.mT, bits).mT.contiguous(),
        "qzeros": in_words(zeros - int(version == "gptq"), bits),
        "scales": scales.to(random.choice((torch.float16, torch.bfloat16, torch.float32))),
        "g_idx": order,
    }
    if random.random() < 0.2 and bool((order.diff() >= 0).all()):
        del stored["g_idx"]
    settings: Settings = {"quant_method": "gptq", "bits": bits}
    settings["group_size"] = -1 if group == d_in and random.random() < 0.5 else group
    if version == "gptq_v2" or random.random() < 0.5:
        settings[random.choice(("checkpoint_format", "format"))] = version
    settings |= {"desc_act": bool((order.diff() < 0).any()), "sym": False}
    return settings, stored


def _codes(weight: Tensor, order: Tensor, zeros: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Codes of `(d_in, d_out)` around the zero points of the groups, and the scales."""
    largest = torch.stack([weight[order == g].abs().amax(0) for g in range(len(zeros))])
    scales = largest / torch.minimum(zeros, top - zeros).clamp_min(1)
    return (weight / scales[order]).round().add(zeros[order]).clamp(0, top).long(), scales


def _bits_of(words: Tensor, bits: int) -> Tensor:
    """Numbers in rows of words, the lowest bits first, one bit at a time."""
    single = (words.long().unsqueeze(-1) >> torch.arange(32)) & 1
    row = single.flatten(1).unflatten(1, (-1, bits))
    return (row << torch.arange(bits)).sum(-1)


def _read_gptq(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    bits, words, scales = settings["bits"], stored["qweight"], stored["scales"]
    assert settings["quant_method"] == "gptq" and bits in (2, 3, 4, 8)
    assert all(stored[name].dtype == torch.int32 for name in ("qweight", "qzeros"))
    version = settings.get("checkpoint_format", settings.get("format", "gptq"))
    assert version in ("gptq", "gptq_v2")
    numbers = _bits_of(words.mT, bits).mT
    d_in = len(numbers)
    group = d_in if settings["group_size"] == -1 else settings["group_size"]
    order = stored.get("g_idx", torch.arange(d_in) // group)
    zeros = _bits_of(stored["qzeros"], bits)
    if version == "gptq":  # GPTQModel adds to whole words, and of 3 bits to each number
        zeros = (zeros + 1) % 2**bits if bits == 3 else _carried(stored["qzeros"], bits)
    assert zeros.shape == scales.shape == (-(-d_in // group), numbers.shape[1])
    assert order.shape == (d_in,) and int(order.min()) >= 0
    return ((numbers - zeros[order.long()]) * scales.double()[order.long()]).mT.float().to(dtype)


def _carried(words: Tensor, bits: int) -> Tensor:
    one = sum(1 << at for at in range(0, 32, bits))
    total = ((words.long() & 0xFFFFFFFF) + one) & 0xFFFFFFFF
    return _bits_of(total, bits)


def _pack_awq(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    d_in = weight.shape[1]
    group = _group_of(random, d_in)
    order = torch.arange(d_in) // group
    zeros = torch.randint(0, 16, (d_in // group, len(weight)), generator=_generator(random))
    codes, scales = _codes(weight.mT, order, zeros, 15)
    stored = {"qweight": _awq_words(codes), "qzeros": _awq_words(zeros)}
    stored["scales"] = scales.to(random.choice((torch.float16, torch.bfloat16)))
    settings: Settings = {"quant_method": "awq", "bits": 4, "zero_point": True}
    settings["group_size"] = -1 if group == d_in and random.random() < 0.5 else group
    if random.random() < 0.7:
        settings["version"] = random.choice(("gemm", "GEMM"))
    return settings, stored


_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def _awq_words(numbers: Tensor) -> Tensor:
    found = (numbers.unflatten(1, (-1, 8)) << (4 * _AWQ_ORDER)).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def _read_awq(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    assert settings["quant_method"] == "awq" and settings["bits"] == 4
    assert settings.get("version", "gemm").lower() == "gemm"
    assert all(stored[name].dtype == torch.int32 for name in ("qweight", "qzeros"))
    numbers, zeros = (
        ((stored[name].long().unsqueeze(-1) >> (4 * _AWQ_ORDER)) & 15).flatten(1)
        for name in ("qweight", "qzeros")
    )
    group = settings.get("group_size", 128)
    group = len(numbers) if group == -1 else group
    order = torch.arange(len(numbers)) // group
    scales = stored["scales"].double()
    assert zeros.shape == scales.shape == (-(-len(numbers) // group), numbers.shape[1])
    return ((numbers - zeros[order]) * scales[order]).mT.float().to(dtype)


def _pack_mxfp4(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    from tests.quantised.models import mxfp4

    settings: Settings = {"quant_method": "mxfp4"}
    if random.random() < 0.5:
        settings["modules_to_not_convert"] = ["model.layers.*.self_attn", "lm_head"]
    return settings, {
        k.removeprefix("gate_up_proj"): v for k, v in mxfp4("gate_up_proj", weight).items()
    }


def _read_mxfp4(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    assert settings["quant_method"] == "mxfp4"
    blocks, scales = stored["_blocks"], stored["_scales"]
    assert (
        blocks.dtype == scales.dtype == torch.uint8 and blocks.ndim == 4 and blocks.shape[-1] == 16
    )
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).to(dtype)


def _pack_fp8(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    dtype = random.choice((torch.float8_e4m3fn, torch.float8_e5m2))
    settings: Settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    high, wide = weight.shape
    if random.random() < 0.7:
        high, wide = settings["weight_block_size"] = random.choice(([32, 16], [48, 32], [128, 128]))
    rows, columns = (-(-size // own) for size, own in zip(weight.shape, (high, wide), strict=True))
    padded = torch.zeros(rows * high, columns * wide)
    padded[: len(weight), : weight.shape[1]] = weight.abs()
    largest = padded.unflatten(0, (rows, high)).unflatten(2, (columns, wide)).amax((1, 3))
    scales = largest / torch.finfo(dtype).max
    stored_scales = scales.to(random.choice((torch.float32, torch.bfloat16)))
    spread = _in_blocks(stored_scales.float(), (high, wide), weight.shape)
    stored = {"weight": (weight / spread).to(dtype), "weight_scale_inv": stored_scales}
    if "weight_block_size" not in settings:
        stored["weight_scale_inv"] = stored_scales.reshape(random.choice(((), (1,), (1, 1))))
    if dtype is torch.float8_e4m3fn and random.random() < 0.5:
        settings["fmt"] = "e4m3"
    if random.random() < 0.3:
        stored["input_scale"] = torch.ones(1)
    return settings, stored


def _in_blocks(scales: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A number for each weight."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def _read_fp8(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    weight, scales = stored["weight"], stored["weight_scale_inv"]
    assert settings["quant_method"] == "fp8" and "float8" in str(weight.dtype) and weight.ndim == 2
    # DeepSeek calls all of float8 so, whichever it is.
    assert settings.get("fmt") in (None, "e4m3", "float8_e4m3fn")
    assert scales.is_floating_point() and scales.dtype not in (torch.float8_e4m3fn, torch.float64)
    if scales.numel() > 1:
        block = settings["weight_block_size"]
        grid = tuple(-(-size // own) for size, own in zip(weight.shape, block, strict=True))
        rows = scales.shape in ((len(weight),), (len(weight), 1))
        assert rows or scales.shape == grid
        held = scales.float().reshape(len(weight), 1) if rows else scales.float()
        spread = held if rows else _in_blocks(held, block, weight.shape)
    else:
        spread = scales.float().reshape(1, 1)
    return (weight.double() * spread.double()).float().to(dtype)


def _pack_8bit(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    from bitsandbytes.functional import int8_vectorwise_quant

    packed, scales, _ = int8_vectorwise_quant(weight.half())
    stored = {"weight": packed, "SCB": scales}
    if random.random() < 0.6:
        stored["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, stored


def _read_8bit(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    assert settings["quant_method"] == "bitsandbytes" and stored["weight"].dtype == torch.int8
    assert stored["SCB"].dtype == torch.float32
    assert stored["SCB"].shape == stored["weight"].shape[:1]
    assert not int(stored.get("weight_format", torch.tensor(0)).sum())
    return int8_vectorwise_dequant(stored["weight"], stored["SCB"]).to(dtype)


def _pack_4bit(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    from bitsandbytes.functional import quantize_4bit

    kind, nested = random.choice(("nf4", "fp4")), random.random() < 0.5
    storage = random.choice((torch.uint8, torch.uint8, torch.bfloat16, torch.float32))
    own = weight.to(random.choice((*DTYPES.values(),)))
    packed, state = quantize_4bit(
        own,
        blocksize=random.choice((64, 128, 256)),
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
    )
    stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return {**settings, "bnb_4bit_use_double_quant": nested}, {"weight": packed, **stored}


def _read_4bit(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    assert settings["quant_method"] == "bitsandbytes"
    told = {key.removeprefix("weight."): own for key, own in stored.items() if key != "weight"}
    state = QuantState.from_dict(told, torch.device("cpu"))
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    codes = stored["weight"].reshape(-1).view(torch.uint8)
    assert absmax.dtype == torch.float32 and len(codes) * 2 == state.shape.numel()
    assert len(absmax) == -(-state.shape.numel() // state.blocksize)
    return _dequantize_4bit_compute(
        codes, absmax, state.code, state.blocksize, state.shape, state.dtype
    )


_BLOCKS = ([32, 16], [64, 16], [48, 16], [32, 32])
# What of a scheme the values depend on.
_OF_VALUES = ("num_bits", "type", "strategy", "symmetric", "group_size", "block_structure")


def _scheme(settings: Settings) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    assert settings["quant_method"] == "compressed-tensors"
    groups = list(settings["config_groups"].values())
    (group,) = groups if len(groups) == 1 else [g for g in groups if _is_of_layer(g["targets"])]
    weights = {key: own for key, own in group["weights"].items() if key in _OF_VALUES}
    return QuantizationScheme(targets=group["targets"], weights=weights)


def _is_of_layer(targets: Sequence[str]) -> bool:
    """Whether a group of layers has the layer, by its class or by its name."""
    return any(
        re.match(target.removeprefix("re:"), _MODULE)
        if target.startswith("re:")
        else target in ("Linear", _MODULE)
        for target in targets
    )


def _compressed(form: str, **weights: Any) -> Settings:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    settings = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**settings, "quantization_status": "compressed", "config_groups": {"group_0": group}}


def _scales(weight: Tensor, args: Any, top: float) -> Tensor:
    """By the strategy: for the tensor, each row, each block, or each group of a row."""
    high, wide = weight.shape
    if args.strategy == "tensor":
        return (weight.abs().max() / top).reshape(1)
    if args.strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / top
    if args.strategy == "group":
        return weight.abs().unflatten(1, (-1, args.group_size)).amax(2) / top
    rows, columns = args.block_structure
    padded = torch.zeros(-(-high // rows) * rows, -(-wide // columns) * columns)
    padded[:high, :wide] = weight.abs()
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3)) / top


def _pack_scaled(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    from compressed_tensors.quantization.lifecycle.forward import quantize

    floating = random.random() < 0.5
    strategy = random.choice(("tensor", "channel", "block") if floating else ("tensor", "channel"))
    symmetric = floating or random.random() < 0.5
    more: Settings = {}
    if strategy == "block":
        more["block_structure"] = random.choice(_BLOCKS)
    form = "float-quantized" if floating else "int-quantized"
    settings = _compressed(
        random.choice((form, form, "naive-quantized")),
        num_bits=8, type="float" if floating else "int", strategy=strategy, symmetric=symmetric, **more,
    )  # fmt: skip
    if strategy == "block" and random.random() < 0.4:
        _add_group(settings, {**settings["config_groups"]["group_0"]["weights"]}, random)
    args = _scheme(settings).weights
    dtype = random.choice((torch.float32, torch.bfloat16))
    scale = _scales(weight, args, 448.0 if floating else 100.0).to(dtype)
    zeros = None
    if not symmetric:
        zeros = torch.randint(-20, 20, scale.shape, generator=_generator(random)).to(torch.int8)
    kind = torch.float8_e4m3fn if floating else torch.int8
    stored = {
        "weight": quantize(weight.to(dtype), scale, zeros, args, dtype=kind),
        "weight_scale": scale,
    }
    if zeros is not None:
        stored["weight_zero_point"] = zeros
    if random.random() < 0.3:
        stored["input_scale"] = torch.ones(1)
    return settings, stored


def _add_group(settings: Settings, weights: Settings, random: Random) -> None:
    """Say of other layers that they have other blocks."""
    groups = settings["config_groups"]
    groups["group_0"]["targets"] = [random.choice((_MODULE, "re:.*up_proj$"))]
    weights["block_structure"] = random.choice(_BLOCKS)
    other = {"targets": ["re:.*down_proj$"], "weights": weights}
    settings["config_groups"] = dict(random.sample([*groups.items(), ("group_1", other)], 2))


def _read_scaled(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = _scheme(settings).weights
    assert settings["format"] in ("float-quantized", "int-quantized", "naive-quantized")
    zeros = stored.get("weight_zero_point")
    assert args.symmetric == (zeros is None)
    kinds = {"float": (torch.float8_e4m3fn,), "int": (torch.int8,)}[str(args.type)]
    assert stored["weight"].dtype in kinds
    scale = stored["weight_scale"]
    assert scale.is_floating_point()
    return dequantize(stored["weight"], scale.float(), zeros, args).to(dtype)


def _pack_words(weight: Tensor, random: Random) -> tuple[Settings, Stored]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    bits, symmetric = random.choice((4, 8)), random.random() < 0.75
    strategy = random.choice(("group", "channel"))
    more: Settings = (
        {"group_size": _group_of(random, weight.shape[1])} if strategy == "group" else {}
    )
    settings = _compressed(
        "pack-quantized", num_bits=bits, type="int", strategy=strategy, symmetric=symmetric, **more
    )
    scheme = _scheme(settings)
    dtype = random.choice((torch.float32, torch.bfloat16))
    scale = _scales(weight, scheme.weights, 2 ** (bits - 1) - 2).to(dtype)
    held = {"weight": weight.to(dtype), "weight_scale": scale}
    if not symmetric:
        zeros = torch.randint(-1, 2, scale.shape, generator=_generator(random)).to(torch.int8)
        held["weight_zero_point"] = zeros
    stored = PackedQuantizationCompressor.compress(held, scheme)
    return settings, {name: own.contiguous() for name, own in stored.items()}


def _read_words(settings: Settings, stored: Stored, dtype: torch.dtype) -> Tensor:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    assert settings["format"] == "pack-quantized" and stored["weight_packed"].dtype == torch.int32
    scheme = _scheme(settings)
    held = {**stored, "weight_scale": stored["weight_scale"].float()}
    return PackedQuantizationCompressor.decompress(held, scheme)["weight"].to(dtype)


FORMATS = {
    "GPTQ": Format(_LAYER, MATRICES, _pack_gptq, _read_gptq),
    "AWQ": Format(_LAYER, MATRICES, _pack_awq, _read_awq),
    "MXFP4": Format(_EXPERTS, ((2, 32, 8), (3, 64, 16)), _pack_mxfp4, _read_mxfp4),
    "bitsandbytes, 8 bit": Format(_LAYER, MATRICES, _pack_8bit, _read_8bit),
    "bitsandbytes, 4 bit": Format(_LAYER, MATRICES, _pack_4bit, _read_4bit),
    "FP8": Format(_LAYER, MATRICES, _pack_fp8, _read_fp8),
    "compressed-tensors": Format(
        _LAYER,
        MATRICES,
        _pack_scaled,
        _read_scaled,
        # Groups whose blocks could both be those of a layer.
        lambda settings, _: len(settings["config_groups"]) > 1,
    ),
    "compressed-tensors, packed": Format(
        _LAYER,
        MATRICES,
        _pack_words,
        _read_words,
        lambda _, stored: "weight_zero_point" in stored,
    ),
}  # fmt: skip


def _generator(random: Random) -> torch.Generator:
    return torch.Generator().manual_seed(random.getrandbits(60))


# Settings that decide what codes stand for, and what else they may be.
_OTHERS: Settings = {
    "bits": (2, 3, 4, 8),
    "group_size": (-1, 16, 32, 64, 128),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2", "int-quantized", "float-quantized", "pack-quantized"),
    "desc_act": (True, False),
    "version": ("gemm", "gemv", "GEMM"),
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block"),
    "symmetric": (True, False),
    "block_structure": _BLOCKS,
    "weight_block_size": ([32, 16], [16, 32], [48, 32], [64, 64]),
    "fmt": ("e4m3", "e5m2"),
    "quant_method": ("gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "compressed-tensors"),
}


def contradict(settings: Settings, random: Random) -> Settings:
    """The settings with one of them another."""
    found: list[tuple[dict[str, Any], str]] = []
    own = json.loads(json.dumps(settings))
    waiting: list[Any] = [own]
    while waiting:
        place = waiting.pop()
        found += [(place, key) for key in place if key in _OTHERS]
        waiting += [value for value in place.values() if isinstance(value, dict)]
    place, key = random.choice(found)
    place[key] = random.choice(_OTHERS[key])
    return own


def known(form: Format, config: bytes, weights: bytes) -> Stored | str:
    """What a stored model stands for, or why its format has no such file."""
    try:
        told, held = json.loads(config), load(weights)
        dtype = DTYPES[told.get("dtype", "bfloat16")]
        own = {k.removeprefix(form.parts): v for k, v in held.items() if k.startswith(form.parts)}
        values = {k: v for k, v in held.items() if not k.startswith(form.parts)}
        return {**values, form.name: form.read(told["quantization_config"], own, dtype)}
    except Exception as error:  # whatever a library raises of damaged files
        return f"{type(error).__name__}: {error}"


def merge(form: Format, folder: Path, random: Random) -> outcomes.Verdict:
    """Merge a packed expert, mostly damaged or contradicted, with a plain one over a plain base."""
    generator = _generator(random)
    shapes = {form.name: random.choice(form.shapes), _NORM: (8,)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tuned = [
        {n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        for _ in "ab"
    ]
    settings, parts = form.pack(tuned[0][form.name], random)
    refused = form.refused(settings, parts)
    damaged = random.random() < 0.6
    contradicted = damaged and random.random() < 0.4
    if contradicted:
        settings = contradict(settings, random)
    config = json.dumps(
        {"dtype": random.choice([*DTYPES]), "quantization_config": settings}
    ).encode()
    stored = {f"{form.parts}{name}": own.contiguous() for name, own in parts.items()}
    weights = save({**stored, _NORM: tuned[0][_NORM]})
    for _ in range(random.choice((1, 1, 2)) if damaged and not contradicted else 0):
        if random.random() < 0.4:
            config = formats.change("config.json", config, random)
        else:
            weights = formats.change("model.safetensors", weights, random)
    packed = folder / "packed"
    packed.mkdir()
    (packed / "config.json").write_bytes(config)
    (packed / "model.safetensors").write_bytes(weights)
    own = Source(packed, known(form, config, weights))
    assert damaged or refused or not isinstance(own.values, str), own.values
    start, other = (
        plain(folder / "base.safetensors", base),
        plain(folder / "b.safetensors", tuned[1]),
    )
    right = not damaged and not refused
    return trial(folder, random, start, {"a": own, "b": other}, right=right)


KINDS: dict[str, outcomes.Kind] = {
    name: lambda folder, random, form=form: merge(form, folder, random)
    for name, form in FORMATS.items()
}

if __name__ == "__main__":
    sys.exit(outcomes.main(__doc__, KINDS, None))
