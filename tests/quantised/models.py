"""Tiny models, stored quantised as their clients store them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def llama(seed: int, **changes: Any) -> Any:
    """A Llama of one layer in bfloat16, with sizes that blocks of 32 and 64 divide, and some do not."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            **SIZES,
            "intermediate_size": 96,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            **changes,
        },
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return moved(model, seed)


def qwen3(seed: int, **changes: Any) -> Any:
    """A Qwen3 of one layer, whose heads are smaller than those of a config that says nothing of them."""
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 48}
    config = transformers.Qwen3Config(
        **sizes, **changes, max_position_embeddings=32, tie_word_embeddings=False
    )
    return moved(transformers.Qwen3ForCausalLM(config).to(torch.bfloat16), seed)


def gpt_oss(seed: int) -> Any:
    """A GPT-OSS of one layer with three experts."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES,
        intermediate_size=64,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=32,
        max_position_embeddings=32,
        layer_types=["full_attention"],
        pad_token_id=0,
    )
    return moved(transformers.GptOssForCausalLM(config).to(torch.bfloat16), seed)


def moved(model: Any, seed: int) -> Any:
    """A fine-tune of a model: every weight a little off; seed 0 is the base itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.01 * (seed > 0)) * noise.to(parameter.dtype))
    return model


# What clients themselves packed (make_goldens.py).
GOLDENS = load_file(Path(__file__).with_name("goldens.safetensors"))
Pack = Callable[[str, Tensor], Mapping[str, Tensor]]


def save_packed(model: Any, folder: Path, pack: Pack, settings: Mapping[str, Any]) -> Path:
    """Save a model with its layers packed, and a config that says so."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        packed = pack(name, tensor) if "_proj" in name and "bias" not in name else None
        stored |= {name: tensor} if packed is None else packed
    save_file(stored, path, metadata={"format": "pt"})
    config = folder / "config.json"
    fields = {**json.loads(config.read_text()), "quantization_config": dict(settings)}
    config.write_text(json.dumps(fields))
    return folder


def fp8_blocks(name: str, weight: Tensor, block: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """A weight with a scale for each block, the last ones cut off."""
    high, wide = block
    rows, columns = weight.shape
    grid = (-(-rows // high), -(-columns // wide))
    scales = torch.empty(grid)
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            own = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
            scales[i, j] = weight[own].float().abs().max() / 448
            packed[own] = (weight[own].float() / scales[i, j]).to(packed.dtype)
    return {name: packed, f"{name}_scale_inv": scales}


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}


def fp8_tensor(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight with one scale."""
    return fp8_blocks(name, weight, (1 << 20, 1 << 20)) | {
        f"{name}_scale_inv": weight.float().abs().max() / 448
    }


def fp8_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight with a scale for each row, as compressed-tensors stores it."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    module = name.removesuffix(".weight")
    return {
        name: (weight.float() / scale).to(torch.float8_e4m3fn),
        f"{name}_scale": scale.to(torch.bfloat16),
        f"{module}.input_scale": torch.ones(1),
    }


def bitsandbytes_8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight in int8 with a scale for each row."""
    scale = weight.float().abs().amax(1)
    packed = (weight.float() * 127 / scale.view(-1, 1)).round().to(torch.int8)
    return {name: packed, name.replace(".weight", ".SCB"): scale}


def bitsandbytes_4(
    name: str, weight: Tensor, kind: str = "nf4", block: int = 64
) -> dict[str, Tensor]:
    """A weight in the client's sixteen numbers, with a scale for each block over all rows."""
    values = GOLDENS[f"bitsandbytes {kind} 24/fc.weight.quant_map"]
    own = weight.float().view(-1, block)
    scales = own.abs().amax(1)
    numbers = ((own / scales.view(-1, 1)).unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8)
    dtype = str(weight.dtype).removeprefix("torch.")
    state = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": [*weight.shape]}
    return {
        name: (numbers.flatten()[::2] << 4 | numbers.flatten()[1::2]).view(-1, 1),
        f"{name}.absmax": scales,
        f"{name}.quant_map": values.clone(),
        f"{name}.quant_state.bitsandbytes__{kind}": torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        ),
    }


def int8_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight in int8 with a scale for each row, as compressed-tensors stores it."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(weight.dtype)
    numbers = (weight.float() / scale.float()).round().clamp(-128, 127)
    return {name: numbers.to(torch.int8), f"{name}_scale": scale}


def int4_groups(name: str, weight: Tensor, group: int = 32) -> dict[str, Tensor]:
    """A weight of 4 bits around 8 in words, with a scale for each group of a row's weights."""
    own = weight.float().unflatten(1, (-1, group))
    scale = (own.abs().amax(2) / 7).to(weight.dtype)
    numbers = (own / scale.float().unsqueeze(2)).round().add(8).clamp(0, 15).flatten(1)
    return {
        f"{name}_packed": in_words(numbers, 4),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }


def gptq(name: str, weight: Tensor, group: int = 32, bits: int = 4) -> dict[str, Tensor]:
    """A weight of 4 bits around 8, of 8 around 128, of 3 around 4; a scale for each group of inputs."""
    own = weight.float().mT
    half = 2 ** (bits - 1)
    scales = own.unflatten(0, (-1, group)).abs().amax(1) / (half - 1)
    numbers = (own / scales.repeat_interleave(group, 0)).round().add(half).clamp(0, 2 * half - 1)
    zeros = torch.full((len(scales), weight.shape[0]), half - 1)
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": in_words(numbers.mT, bits).mT.contiguous(),
        f"{module}.qzeros": in_words(zeros, bits),
        f"{module}.scales": scales.half(),
        f"{module}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // group,
    }


def in_words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of a row as one string of bits, the lowest first, in words of 32."""
    single = np.unpackbits(numbers.numpy().astype(np.uint8)[..., None], axis=-1, bitorder="little")
    row = single[..., :bits].reshape(len(numbers), -1)
    return torch.from_numpy(np.packbits(row, axis=-1, bitorder="little").view("<i4"))


def awq(name: str, weight: Tensor, group: int = 32) -> dict[str, Tensor]:
    """A weight of 4 bits around 8, eight outputs a word."""
    own = weight.float().mT
    scales = own.unflatten(0, (-1, group)).abs().amax(1) / 7
    numbers = (own / scales.repeat_interleave(group, 0)).round().add(8).clamp(0, 15).int()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)
    packed = (numbers.unflatten(1, (-1, 8)) << (4 * order)).sum(-1, dtype=torch.int32)
    zeros = torch.full((len(scales), weight.shape[0] // 8), 0x88888888 - 2**32).to(torch.int32)
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": packed,
        f"{module}.qzeros": zeros,
        f"{module}.scales": scales.half(),
    }


def mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Experts in 4 bits, an exponent for 32 of a row's weights; the largest of them is rounded down."""
    if weight.ndim != 3:
        return {name: weight}
    own = weight.float().mT.unflatten(-1, (-1, 32))
    exponents = own.abs().amax(-1, keepdim=True).log2().floor().sub(2).clamp(-127, 127)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = own / exponents.exp2()
    numbers = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    numbers = numbers.to(torch.uint8)
    return {
        f"{name}_blocks": numbers[..., ::2] | numbers[..., 1::2] << 4,
        f"{name}_scales": (exponents.squeeze(-1) + 127).to(torch.uint8),
    }


def mxfp8(name: str, weight: Tensor, kind: torch.dtype = torch.uint8) -> dict[str, Tensor]:
    """A weight in FP8, an exponent for 32 of a row."""
    own = weight.float().unflatten(-1, (-1, 32))
    exponents = own.abs().amax(-1, keepdim=True).log2().floor().sub(8)
    return {
        name: (own / exponents.exp2()).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": (exponents.squeeze(-1) + 127).to(torch.uint8).view(kind),
    }


def deepseek_v4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight of an MLP in FP4, as DeepSeek-V4 stores experts, others in FP8; scales are exponents."""
    scale, kind = name.replace(".weight", ".scale"), torch.float8_e8m0fnu
    if ".mlp." in name:
        blocks, exponents = mxfp4(name, weight.mT[None]).values()
        return {name: blocks[0].flatten(1).view(torch.int8), scale: exponents[0].view(kind)}
    high, wide = (size // 32 for size in weight.shape)
    blocks = weight.float().view(high, 32, wide, 32)
    exponents = blocks.abs().amax((1, 3)).log2().floor().sub(8)
    packed = blocks / exponents.exp2()[:, None, :, None]
    return {
        name: packed.clamp(-448, 448).view(weight.shape).to(torch.float8_e4m3fn),
        scale: (exponents + 127).to(torch.uint8).view(kind),
    }


def metal(name: str, weight: Tensor, group: int = 32) -> dict[str, Tensor]:
    """A weight of 4 bits with a scale and an offset for each group, as transformers stores it for Metal."""
    own = weight.float().unflatten(1, (-1, group))
    low, top = own.amin(2), own.amax(2)
    scale = ((top - low) / 15).bfloat16()
    numbers = ((own - low.bfloat16().float()[..., None]) / scale.float()[..., None]).round()
    return {
        name: in_words(numbers.clamp(0, 15).flatten(1), 4).view(torch.uint32),
        name.replace(".weight", ".scales"): scale,
        name.replace(".weight", ".qbiases"): low.bfloat16(),
    }


def integers(form: str, bits: int, **more: Any) -> dict[str, Any]:
    """What compressed-tensors' config says of symmetric integers."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


BITSANDBYTES_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
# How a model of each format is packed, and what its config says of it.
FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "fp8 by block": (fp8_blocks, FP8_BLOCKS),
    "fp8 by tensor": (fp8_tensor, {"quant_method": "fp8"}),
    "compressed-tensors": (
        fp8_rows,
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "bitsandbytes": (bitsandbytes_8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes, NF4": (bitsandbytes_4, {**BITSANDBYTES_4, "bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes, FP4": (
        partial(bitsandbytes_4, kind="fp4"),
        {**BITSANDBYTES_4, "bnb_4bit_quant_type": "fp4"},
    ),
    "compressed-tensors, INT8": (int8_rows, integers("int-quantized", 8, strategy="channel")),
    "compressed-tensors, INT4": (
        int4_groups,
        integers("pack-quantized", 4, strategy="group", group_size=32),
    ),
    "gptq": (gptq, GPTQ),
    "gptq, 3 bits": (partial(gptq, bits=3), {**GPTQ, "bits": 3}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
}


# Those that transformers dequantises where there is no GPU.
BY_TRANSFORMERS: dict[str, tuple[Pack, dict[str, Any]]] = {
    **{form: FORMATS[form] for form in ("fp8 by block", "fp8 by tensor", "mxfp4")},
    "mxfp8": (mxfp8, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
    "deepseek-v4": (
        deepseek_v4,
        {**FP8_BLOCKS, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
    "metal": (metal, {"quant_method": "metal", "bits": 4, "group_size": 32}),
}


def build(form: str, seed: int) -> Any:
    """A model that can be stored in a format."""
    return gpt_oss(seed) if form == "mxfp4" else llama(seed)
