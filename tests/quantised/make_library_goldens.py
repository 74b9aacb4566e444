"""Pack tiny layers by libraries that are not installed beside covmerge, and keep what they read of them.

In an environment with torch 2.13.0 and nvidia-modelopt 0.47.0:

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


def main() -> None:
    """Write the file of goldens."""
    found: dict[str, Tensor] = {}
    for cases in (of_modelopt(),):
        for case, layer in cases:
            found |= {f"{case}/{name}": tensor.contiguous() for name, tensor in layer.items()}
            print(case, {name: (tuple(t.shape), t.dtype) for name, t in layer.items()})
    save_file(found, GOLDEN)


if __name__ == "__main__":
    main()
