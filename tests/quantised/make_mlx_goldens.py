"""Pack tiny layers by MLX, and keep what it reads of them: `python tests/quantised/make_mlx_goldens.py`.

In an environment of its own, with mlx 0.32.4 (`pip install "mlx[cpu]"`), which needs no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("mlx_goldens.safetensors")


def main() -> None:
    """Write the file of goldens."""
    mx: Any = importlib.import_module("mlx.core")
    mx.random.seed(0)
    found: dict[str, Any] = {}
    weight = mx.random.normal((24, 128)).astype(mx.bfloat16)
    stack = mx.random.normal((3, 8, 64)).astype(mx.bfloat16)
    cases = [
        (f"mlx {bits}", weight, {"bits": bits, "group_size": 64}) for bits in (2, 3, 4, 5, 6, 8)
    ]
    cases += [("mlx half", weight.astype(mx.float16), {"bits": 4, "group_size": 32})]
    cases += [("mlx stack", stack, {"bits": 8, "group_size": 32})]
    cases += [(f"mlx {mode}", weight, {"mode": mode}) for mode in ("mxfp4", "mxfp8", "nvfp4")]
    for case, own, settings in cases:
        packed = mx.quantize(own, **settings)
        for name, tensor in zip(("weight", "scales", "biases"), packed, strict=False):
            found[f"{case}/fc.{name}"] = tensor
        found[f"{case}/expected"] = mx.dequantize(*packed, **settings)
        print(case, [(tensor.shape, tensor.dtype) for tensor in packed])
    mx.save_safetensors(str(GOLDEN), found)


if __name__ == "__main__":
    main()
