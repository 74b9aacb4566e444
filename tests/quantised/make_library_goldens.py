"""Pack tiny layers by libraries that are not installed beside covmerge, and keep what they read of them.

In an environment with torch 2.13.0, nvidia-modelopt 0.47.0, torchao 0.18.0, hqq 0.2.8.post1,
optimum-quanto 0.2.7 and compressed-tensors 0.17.1, the last with activation ordering:

    python -m tests.quantised.make_library_goldens
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quantised.make_goldens import EXPECTED, Layer, weight

GOLDEN = Path(__file__).with_name("library_goldens.safetensors")


def of_modelopt() -> Iterator[tuple[str, Layer]]:
    """NVFP4 and MXFP8, by Model Optimizer."""
    tensors = "modelopt.torch.quantization.qtensor"
    nvfp4: Any = importlib.import_module(f"{tensors}.nvfp4_tensor").NVFP4QTensor
    mxfp8: Any = importlib.import_module(f"{tensors}.mxfp8_tensor").MXFP8QTensor
    own = weight().to(torch.bfloat16)
    packed, scale, whole = nvfp4.quantize(own, 16)
    read = packed.dequantize(torch.bfloat16, scale=scale, double_scale=whole, block_sizes={-1: 16})
    yield (
        "modelopt NVFP4",
        {
            "fc.weight": packed._quantized_data,
            "fc.weight_scale": scale,
            "fc.weight_scale_2": whole,
            "fc.input_scale": torch.ones(()),
            EXPECTED: read,
        },
    )
    packed, scale = mxfp8.quantize(own)
    stored = {"fc.weight": packed._quantized_data, "fc.weight_scale": scale}
    yield "modelopt MXFP8", {**stored, EXPECTED: packed.dequantize(torch.bfloat16, scale=scale)}


def of_hqq() -> Iterator[tuple[str, Layer]]:
    """Groups along both axes."""
    core: Any = importlib.import_module("hqq.core.quantize")
    for bits, axis in ((8, 1), (4, 1), (4, 0), (3, 1), (3, 0), (2, 0), (1, 1)):
        linear = torch.nn.Linear(96, 16, bias=False)
        linear.weight.data = weight(16, 96)
        config = core.BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
        layer = core.HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu")
        stored = {f"fc.{name}": tensor.clone() for name, tensor in layer.state_dict().items()}
        yield f"hqq {bits} {axis}", {**stored, EXPECTED: layer.dequantize()}


def of_quanto() -> Iterator[tuple[str, Layer]]:
    """Integers and floating-point numbers of 8 bits."""
    quanto: Any = importlib.import_module("optimum.quanto")
    for kind in ("qint8", "qfloat8"):
        model = _model(torch.bfloat16)
        quanto.quantize(model, weights=getattr(quanto, kind))
        quanto.freeze(model)
        yield f"quanto {kind}", {**model.state_dict(), EXPECTED: model.fc.weight.dequantize()}


def of_torchao() -> Iterator[tuple[str, Layer]]:
    """Integers and floating-point numbers of 8 bits, by row and by group."""
    ao: Any = importlib.import_module("torchao.quantization")
    support: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    kinds = {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "float8": ao.Float8WeightOnlyConfig(),
        "intx": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    }
    for kind, config in kinds.items():
        model = _model(torch.bfloat16)
        ao.quantize_(model, config)
        stored, _ = support.flatten_tensor_state_dict(model.state_dict())
        yield f"torchao {kind}", {**stored, EXPECTED: model.fc.weight.dequantize()}


def of_activation_ordering() -> Iterator[tuple[str, Layer]]:
    """Integers in words and by themselves, whose groups are mixed, in order, or not set."""
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    own = weight().to(torch.bfloat16)
    mixed = torch.arange(96, dtype=torch.int32) % 3  # as of no order that a run would have
    for kind, bits, symmetric, groups in (
        ("packed", 4, True, mixed),
        ("packed zeros", 4, False, mixed),
        ("packed unset", 4, True, torch.full_like(mixed, -1)),
        ("naive", 8, False, mixed),
    ):
        words = kind.startswith("packed")
        args = quantization.QuantizationArgs(
            num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric,
            actorder="group",
        )  # fmt: skip
        scheme = quantization.QuantizationScheme(
            targets=["Linear"],
            weights=args,
            input_activations=None if words else quantization.QuantizationArgs(num_bits=8),
        )
        packer = (
            compressors.PackedQuantizationCompressor
            if words
            else compressors.IntQuantizationCompressor
        )
        scale = (own.view(24, 32, 3).abs().amax(1) / (2 ** (bits - 1) - 2)).to(torch.bfloat16)
        held = {"weight": own, "weight_scale": scale, "weight_g_idx": groups.clone()}
        if not symmetric:
            held["weight_zero_point"] = torch.arange(72, dtype=torch.int8).view(24, 3) % 3 - 1
        stored = packer.compress(held, scheme)
        read = packer.decompress(dict(stored), scheme)["weight"]
        layer = {f"fc.{name}": tensor for name, tensor in stored.items()}
        yield f"compressed-tensors mixed {kind}", {**layer, EXPECTED: read}


def _model(dtype: torch.dtype) -> Any:
    model: Any = torch.nn.Module()
    model.fc = torch.nn.Linear(96, 24, bias=False)
    model.fc.weight.data = weight().to(dtype)
    return model


def main() -> None:
    """Write the file of goldens."""
    found: dict[str, Tensor] = {}
    for cases in (of_modelopt(), of_hqq(), of_quanto(), of_torchao(), of_activation_ordering()):
        for case, layer in cases:
            found |= {f"{case}/{name}": tensor.contiguous() for name, tensor in layer.items()}
            print(case, {name: (tuple(t.shape), t.dtype) for name, t in layer.items()})
    save_file(found, GOLDEN)


if __name__ == "__main__":
    main()
