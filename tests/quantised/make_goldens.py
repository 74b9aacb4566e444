"""Pack tiny layers by the clients of quantised formats, and keep what the clients themselves read
of them.

In an environment with torch, bitsandbytes 0.50.2 and compressed-tensors 0.20.0, and with the
sources of autoawq 0.2.9 and gptqmodel 7.7.0 unpacked in a folder:

    python -m tests.quantised.make_goldens FOLDER

GPTQ and AWQ have no CPU packer that is quick to run; their words and scales are random numbers,
every one of which is a valid weight. What bitsandbytes reads of 4 bits is computed by its backend
in torch: its kernel for CPUs goes wrong where blocks do not divide the rows.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "goldens.safetensors"
WEIGHTS = Path(__file__).parent / "weights.safetensors"
EXPECTED = "expected"
Layer = dict[str, Tensor]  # what is stored under "fc." and beside it what the client reads of it


def weight(rows: int = 24, columns: int = 96) -> Tensor:
    """A layer's weight: normal numbers that were drawn once, as `torch.randn` rounds by the processor."""
    return load_file(WEIGHTS)["weights"][: rows * columns].view(rows, columns)


def of_bitsandbytes() -> Iterator[tuple[str, Layer]]:
    """8 bits, and 4 bits of both kinds with their scales nested or not."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    compute = importlib.import_module("bitsandbytes.backends.default.ops")._dequantize_4bit_compute
    packed, scales, _ = functional.int8_vectorwise_quant(weight().half())
    yield (
        "bitsandbytes 8",
        {
            "fc.weight": packed,
            "fc.SCB": scales,
            "fc.weight_format": torch.tensor(0, dtype=torch.uint8),
            EXPECTED: functional.int8_vectorwise_dequant(packed, scales).to(torch.bfloat16),
        },
    )
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for rows in (24, 25):  # of 25 rows the last block is shorter
                packed, state = functional.quantize_4bit(
                    weight(rows, 96).to(torch.bfloat16),
                    blocksize=128,
                    compress_statistics=nested,
                    quant_type=kind,
                )
                absmax = state.absmax
                if nested:
                    absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
                stored = {f"fc.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
                read = compute(packed.view(-1), absmax, state.code, 128, state.shape, state.dtype)
                name = f"bitsandbytes {kind} {'nested ' if nested else ''}{rows}"
                yield name, {"fc.weight": packed, **stored, EXPECTED: read}


def of_compressed_tensors() -> Iterator[tuple[str, Layer]]:
    """FP8 and INT8 by tensor, by row and by block, symmetric and not."""
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    forward: Any = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    own = weight(40, 72)
    shapes = {"tensor": (1,), "channel": (40, 1), "block": (2, 3)}
    for kind, strategy, symmetric in (
        *(("float", strategy, True) for strategy in shapes),
        *(("int", "channel", symmetric) for symmetric in (True, False)),
    ):
        block = [32, 32] if strategy == "block" else None
        args = quantization.QuantizationArgs(
            num_bits=8, type=kind, strategy=strategy, symmetric=symmetric, block_structure=block
        )
        top = 448.0 if kind == "float" else 127.0
        scale = torch.full(shapes[strategy], float(own.abs().max()) / top)
        if strategy == "channel":
            scale = own.abs().amax(1, keepdim=True) / top
        scale = scale.to(torch.bfloat16 if strategy == "channel" else torch.float32)
        zeros = None if symmetric else torch.arange(-20, 20, dtype=torch.int8).view(-1, 1)
        dtype = torch.float8_e4m3fn if kind == "float" else torch.int8
        packed = forward.quantize(own.to(scale.dtype), scale, zeros, args, dtype=dtype)
        read = forward.dequantize(packed, scale, zeros, args).to(torch.bfloat16)
        stored = {"fc.weight": packed, "fc.weight_scale": scale, EXPECTED: read}
        if zeros is not None:
            stored["fc.weight_zero_point"] = zeros
        yield f"compressed-tensors {kind} {strategy} {symmetric}", stored


def of_packed_integers() -> Iterator[tuple[str, Layer]]:
    """INT4 and INT8 in words, by group and by row."""
    compressors: Any = importlib.import_module("compressed_tensors.compressors.pack_quantized.base")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    packer = compressors.PackedQuantizationCompressor
    for bits, group in ((4, 32), (8, None)):
        own = weight(24, 96).to(torch.bfloat16)
        args = quantization.QuantizationArgs(
            num_bits=bits,
            type="int",
            symmetric=True,
            strategy="channel" if group is None else "group",
            group_size=group,
        )
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
        scale = own.view(24, -1, group or 96).abs().amax(2) / (2 ** (bits - 1) - 1)
        stored = packer.compress({"weight": own, "weight_scale": scale}, scheme)
        read = packer.decompress(dict(stored), scheme)["weight"]
        layer = {f"fc.{name}": tensor for name, tensor in stored.items()}
        yield f"compressed-tensors packed {bits}", {**layer, EXPECTED: read}


def of_gptq(folder: Path) -> Iterator[tuple[str, Layer]]:
    """3, 4 and 8 bits, 3 and 4 in both versions, the groups in order or mixed."""
    client = gptqmodel(folder)
    convert = client.convert_gptq_file
    for bits, version, mixed in (
        *((4, "gptq", True), (4, "gptq_v2", False), (8, "gptq", False)),
        *((3, "gptq", True), (3, "gptq_v2", False)),
    ):
        generator = torch.Generator().manual_seed(bits)
        groups = torch.arange(96, dtype=torch.int32) // 32
        if mixed:
            groups = groups[torch.randperm(96, generator=generator)]
        d_out = 32 if bits == 3 else 24
        if (
            bits == 3
        ):  # packed by the client too, zero points that are the largest number among them
            packed = (
                client.pack_cols(
                    torch.randint(0, 8, shape, generator=generator), bits, pack_dtype=torch.int32
                )
                for shape in ((d_out, 96), (3, d_out))
            )
            qweight, qzeros = next(packed).mT.contiguous(), next(packed)
        else:
            qweight = words((96 * bits // 32, d_out), bits, generator)
            qzeros = words((3, d_out * bits // 32), bits, generator)
        stored = {
            "fc.qweight": qweight,
            "fc.qzeros": qzeros,
            "fc.scales": torch.rand((3, d_out), generator=generator).half(),
            "fc.g_idx": groups,
        }
        with TemporaryDirectory() as name:
            path = Path(name) / "model.safetensors"
            save_file(stored, path)
            config = {"bits": bits, "checkpoint_format": version}
            read = convert(path, torch.float16, config, "cpu")["fc.weight"]
        yield f"gptq {bits} {version}", {**stored, EXPECTED: read}


def of_awq(folder: Path) -> Iterator[tuple[str, Layer]]:
    """4 bits, version gemm."""
    source = next(folder.glob("autoawq-*/awq/utils/packing_utils.py"))
    module: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), module)
    generator = torch.Generator().manual_seed(0)
    stored = {
        "fc.qweight": words((96, 3), 4, generator),
        "fc.qzeros": words((3, 3), 4, generator),
        "fc.scales": torch.rand((3, 24), generator=generator).half(),
    }
    read: Callable[..., Tensor] = module["dequantize_gemm"]
    found = read(stored["fc.qweight"], stored["fc.qzeros"], stored["fc.scales"], 4, 32)
    yield "awq", {**stored, EXPECTED: found.mT.contiguous()}


def words(shape: tuple[int, int], bits: int, generator: torch.Generator) -> Tensor:
    """Random words of numbers that are less than the largest: one more of them has no carry."""
    held = 32 // bits
    numbers = torch.randint(0, 2**bits - 1, (*shape, held), generator=generator)
    found = (numbers << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def gptqmodel(folder: Path) -> Any:
    """GPTQModel's dequantiser, without the rest of the package and what that needs."""
    root = next(folder.glob("gptqmodel-*/gptqmodel"))
    for name in ("", ".utils", ".quantization"):
        package = types.ModuleType(f"gptqmodel{name}")
        package.__path__ = [str(root / name.removeprefix("."))]
        sys.modules[package.__name__] = package
    logger: Any = types.ModuleType("gptqmodel.utils.logger")
    logger.setup_logger = lambda *_: None
    devices: Any = types.ModuleType("gptqmodel.utils.torch")
    devices.HAS_NPU = False
    sys.modules |= {logger.__name__: logger, devices.__name__: devices}
    return importlib.import_module("gptqmodel.utils.model_dequant")


def main() -> None:
    """Write the file of goldens."""
    folder = Path(sys.argv[1])
    found: dict[str, Tensor] = {}
    integers = of_packed_integers()
    plain = (of_bitsandbytes(), of_compressed_tensors(), integers)
    for cases in (*plain, of_gptq(folder), of_awq(folder)):
        for case, layer in cases:
            found |= {f"{case}/{name}": tensor.contiguous() for name, tensor in layer.items()}
            print(case, {name: (tuple(t.shape), t.dtype) for name, t in layer.items()})
    save_file(found, GOLDEN)
    print(GOLDEN, GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
