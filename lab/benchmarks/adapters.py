"""Eight rank-16 adapters on all linear layers of a Llama-7B-shaped base, adapter out.

    python -m benchmarks.adapters [--layers 32] [--methods ace actmat] [--out FILE.json]
    python -m benchmarks.adapters --before TREE/src [--rounds 3]

Random factors of real shapes; of the base only headers and config exist (a sparse file), and nothing
of it is read. Every merge runs in a process of its own, the way a user starts it, after one that is not
counted: the first of an architecture asks transformers for its layers, and the others know them. Beside
it, measured on one square layer and scaled to the square layers alone, so that they are bounds from below:
the dense path of the same method (the products multiplied out, in float32), and PEFT's own exact route,
`add_weighted_adapter(combination_type="svd")`. With `--before`, the same merges by another tree of covmerge
instead, one after the other in each round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import peft
import torch
from safetensors.torch import save_file
from torch import nn

WORK = Path(__file__).parent / "work" / "adapters"
RESULTS = Path(__file__).parent / "results"
HIDDEN, INNER, RANK, COUNT = 4096, 11008, 16, 8
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--methods", nargs="+", default=["ace", "actmat", "auto", "task_arithmetic"]
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "adapters.json")
    parser.add_argument("--before", type=Path, help="the sources of another tree")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    base, adapters = make(arguments.layers)
    merge(base, adapters, arguments.methods[0])  # the one that loads transformers
    if arguments.before:
        compare_trees(arguments.before, base, adapters, arguments.methods, arguments.rounds)
        shutil.rmtree(WORK)
        return
    results: dict[str, object] = {
        "shape": {"layers": arguments.layers, "adapters": COUNT, "rank": RANK},
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    merges = {}
    for method in arguments.methods:
        merges[method] = merge(base, adapters, method)
        print(method, merges[method], flush=True)
    results["merges"] = merges
    dense = {method: dense_seconds(method, arguments.layers) for method in ("ace", "actmat")}
    results["dense seconds, square layers alone, scaled from one"] = dense
    peft = peft_seconds(arguments.layers)
    results["peft svd seconds, square layers alone, scaled from one"] = peft
    ratios = {
        method: round(seconds / merges[method]["seconds"], 1)
        for method, seconds in dense.items()
        if method in merges
    }
    results["dense / factored, at least"] = ratios
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    shutil.rmtree(WORK)


def make(layers: int) -> tuple[Path, list[Path]]:
    """Write the base's headers and the adapters."""
    shutil.rmtree(WORK, ignore_errors=True)
    base = WORK / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    header, end = {}, 0
    for layer in range(layers):
        for name, (d_out, d_in) in SHAPES.items():
            size = 2 * d_out * d_in
            header[f"model.layers.{layer}.{name}.weight"] = {
                "dtype": "BF16",
                "shape": [d_out, d_in],
                "data_offsets": [end, end + size],
            }
            end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (base / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    adapters = []
    for number in range(COUNT):
        folder = WORK / f"adapter{number}"
        folder.mkdir()
        tensors = {}
        for layer in range(layers):
            for name, shape in SHAPES.items():
                left, right = factors(number, layer, shape)
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = right.bfloat16()
                tensors[f"{key}.lora_B.weight"] = left.bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": sorted({name.rpartition(".")[2] for name in SHAPES}),
            "base_model_name_or_path": "llama-7b-shaped",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        adapters.append(folder)
    return base, adapters


def factors(number: int, layer: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * layer + number)
    d_out, d_in = shape
    right = torch.randn(RANK, d_in, generator=generator) / d_in**0.5
    left = torch.randn(d_out, RANK, generator=generator) * 0.3 / d_out**0.5
    return left * (1 + number) / COUNT, right


def compare_trees(
    before: Path, base: Path, adapters: list[Path], methods: list[str], rounds: int
) -> None:
    """Print, by method, the best seconds of both trees, and whether they wrote the same bytes."""
    for method in methods:
        taken: dict[Path | None, list[float]] = {before: [], None: []}
        written: set[str] = set()
        for _ in range(rounds):
            for tree, seconds in taken.items():
                seconds.append(merge(base, adapters, method, tree)["seconds"])
                with (WORK / "out" / "adapter_model.safetensors").open("rb") as weights:
                    written.add(hashlib.file_digest(weights, "sha256").hexdigest())
        then, now = (min(seconds) for seconds in taken.values())
        same = "same bytes" if len(written) == 1 else "OTHER BYTES"
        print(
            f"{method:16} {then:6.2f} s before, {now:6.2f} s now: {now / then:.2f}, {same}",
            flush=True,
        )


def merge(
    base: Path, adapters: list[Path], method: str, tree: Path | None = None
) -> dict[str, float]:
    out = WORK / "out"
    shutil.rmtree(out, ignore_errors=True)
    sources = [f"--expert=e{number}={path}" for number, path in enumerate(adapters)]
    command = [sys.executable, "-m", "covmerge", "merge", "--base", str(base), *sources]
    command += ["--method", method, "--as", "adapter", "--json", str(out)]
    started = time.perf_counter()
    env = {**os.environ, **({} if tree is None else {"PYTHONPATH": str(tree)})}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    run = json.loads(done.stdout)["run"]
    return {
        "seconds": round(seconds, 2),
        "merging_seconds": round(run["seconds"], 2),
        "peak_bytes": run["peak_memory"],
        "output_bytes": (out / "adapter_model.safetensors").stat().st_size,
    }


def updates(shape: tuple[int, int]) -> list[torch.Tensor]:
    pairs = (factors(number, 0, shape) for number in range(COUNT))
    return [left @ right for left, right in pairs]


# What the dense routes are measured on: one q projection, which stands for q, k, v and o. The wider
# layers cost them more, so that a bound from below remains.
SQUARE, SQUARES = (HIDDEN, HIDDEN), 4


def dense_seconds(method: str, layers: int) -> float:
    from covmerge import merge_layer

    products = updates(SQUARE)
    started = time.perf_counter()
    merge_layer(products, method)
    return round(SQUARES * layers * (time.perf_counter() - started), 1)


def peft_seconds(layers: int) -> float:
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj"])
    layer = nn.ModuleDict({"q_proj": nn.Linear(SQUARE[1], SQUARE[0], bias=False)})
    names = [f"e{number}" for number in range(COUNT)]
    model = peft.PeftModel(layer, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    tuned: Any = model.get_submodule("base_model.model.q_proj")
    with torch.no_grad():
        for number, name in enumerate(names):
            left, right = factors(number, 0, SQUARE)
            tuned.lora_B[name].weight.copy_(left)
            tuned.lora_A[name].weight.copy_(right)
    started = time.perf_counter()
    cast("Any", model.base_model).add_weighted_adapter(
        names, [1.0] * COUNT, "merged", combination_type="svd", svd_rank=COUNT * RANK
    )
    return round(SQUARES * layers * (time.perf_counter() - started), 1)


if __name__ == "__main__":
    main()
