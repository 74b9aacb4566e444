"""Whole checkpoints from disk to disk: covmerge beside mergekit, FusionBench and a bare pass.

    python -m benchmarks.checkpoints --peers-python PEERS/bin/python [--cases gpt2 llama] [--rounds 3]

The peers live in an environment of their own, whose python is named on the command line; without it
they are left out, and the results say so. mergekit 0.1.5 and FusionBench 0.2.33 go together:

    python3 -m venv PEERS && PEERS/bin/pip install torch==2.13.0 mergekit fusion-bench

A random base and experts (GPT-2: 7, in float32; TinyLlama-1.1B: 3, in bfloat16) are written once,
under benchmarks/work. Every merge is a process of its own, the way a user starts it; wall-clock time,
CPU time and peak memory come from the operating system, which counts the pages of mapped files too. In
a round every tool runs every method. Before each process all inputs are read once, so that nobody waits
for the disk, and earlier writes are flushed. No process may have more writable memory (private mappings
of files count) than nine tenths of what was free at the start: a peer that needs more fails, and is not
tried again. Nothing else should run meanwhile: threads that wait for a core spin.

- `floor` reads base and experts once in blocks, sums in float32, writes one file: no names, no checks.
- `mergekit` computes in the checkpoints' dtype, where it is fastest, without tokenizer or model card.
- `fusion_bench`: its algorithm classes on its pool of models, which transformers loads one by one.
- `startup` is what comes before a merge: a dry run of covmerge, mergekit's `--help`, FusionBench's
  imports; `first` is covmerge's of an architecture that it has not met before, so that it asks
  transformers; `version` is `covmerge --version`, which needs no torch.

Averages and Task Arithmetic are compared with covmerge's, tensor by tensor; computed in bfloat16 they
are more than one rounding off. TIES is not: mergekit trims each tensor, covmerge and FusionBench the
whole model, and FusionBench counts tied weights twice. Nor is DARE-TIES, whose masks are random: with
mergekit, which does not trim what is left, beside covmerge's at density 1, and with FusionBench, which
trims it, beside covmerge's at the same density.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
from safetensors import safe_open

from benchmarks.measure import machine, spawn, spread
from benchmarks.models import GPT2, LLAMA, apart, checkpoints

WORK = Path(__file__).parent / "work" / "checkpoints"
RESULTS = Path(__file__).parent / "results"

CASES = {"gpt2": (GPT2, 7), "llama": (LLAMA, 3)}
PEERS = ("mergekit", "fusion_bench")
COMPARED = ("average", "task_arithmetic")

_TIES = "scaling_factor=1, threshold=20, remove_keys=[], merge_func='mean'"
# The same mathematics for each tool; `normalize` is mergekit's mean instead of a sum.
SETTINGS = {
    "average": {
        "covmerge": [],
        "mergekit": {"merge_method": "linear", "parameters": {"weight": 1, "normalize": True}},
        "fusion_bench": "SimpleAverageAlgorithm()",
    },
    "task_arithmetic": {
        "covmerge": ["--set=scale=0.3"],
        "mergekit": {
            "merge_method": "task_arithmetic",
            "parameters": {"weight": 1, "lambda": 0.3, "normalize": False},
        },
        "fusion_bench": "TaskArithmeticAlgorithm(scaling_factor=0.3)",
    },
    "ties": {
        "covmerge": ["--set=density=0.2", "--set=scale=1"],
        "mergekit": {
            "merge_method": "ties",
            "parameters": {"weight": 1, "density": 0.2, "lambda": 1, "normalize": True},
        },
        "fusion_bench": f"TiesMergingAlgorithm({_TIES})",
    },
    "dare_ties": {
        "covmerge": ["--set=drop=0.5", "--set=density=1", "--set=scale=1"],
        "mergekit": {
            "merge_method": "dare_ties",
            "parameters": {"weight": 1, "density": 0.5, "lambda": 1, "normalize": True},
        },
    },
    "dare_ties, trimmed": {
        "covmerge": ["--set=drop=0.5", "--set=density=0.2", "--set=scale=1"],
        "fusion_bench": "DareTiesMerging(sparsity_ratio=0.5, only_on_linear_weights=False, "
        f"rescale=True, {_TIES})",
    },
}

FLOOR = """
import os
import sys
import torch

dtype, *paths, out = sys.argv[1:]
os.mkdir(out)
dtype = getattr(torch, dtype)
files = [open(path, "rb", buffering=0) for path in paths]
for file in files:  # one layout, so one header
    size = file.read(8)
    header = file.read(int.from_bytes(size, "little"))
# Used again for every block: fresh memory for every tensor costs as much as the sum.
block = torch.empty(16 << 20, dtype=torch.uint8)
values, raw = block.view(dtype), memoryview(block.numpy())
total = torch.empty(len(values))
with open(f"{out}/model.safetensors", "wb", buffering=0) as merged:
    merged.write(size + header)
    while count := files[0].readinto(raw):
        n = count // dtype.itemsize
        total[:n].copy_(values[:n])
        for file in files[1:]:
            file.readinto(raw)
            total[:n] += values[:n]
        values[:n].copy_(total[:n])
        merged.write(raw[:count])
"""

FUSION_BENCH_IMPORTS = """
import sys
from fusion_bench.method import DareTiesMerging, SimpleAverageAlgorithm
from fusion_bench.method import TaskArithmeticAlgorithm, TiesMergingAlgorithm
from fusion_bench.modelpool import CausalLMPool
"""
FUSION_BENCH = """
base, *experts, out = sys.argv[1:]
models = {f"expert{t}": path for t, path in enumerate(experts)} | {"_pretrained_": base}
algorithm.run(CausalLMPool(models, tokenizer=None)).save_pretrained(out)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", type=Path, help="the python that has the peers")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="smaller models, to try the benchmark itself")
    parser.add_argument("--max-memory", type=float, default=0, metavar="GB", help="of each process")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()

    sources = {case: checkpoints(*CASES[case], layers=args.layers) for case in args.cases}
    # Without a limit a peer that needs more than there is would take other processes with it.
    limit = int(1e9 * args.max_memory or 0.9 * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    command = " ".join(["python -m benchmarks.checkpoints", *sys.argv[1:]])
    results = {
        "command": command.replace(str(args.peers_python), "PEERS/bin/python"),
        "machine": machine() | {"load_before": os.getloadavg()[0]},
        "covmerge": version("covmerge"),
        "peers": versions(args.peers_python) if args.peers_python else "left out",
        "page_cache": "all inputs are read before each process",
        "memory_limit_bytes": limit,
        "settings": {method: SETTINGS[method] for method in args.methods},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for case, paths in sources.items():
        found = measure(commands(paths, args.methods, args.peers_python), paths, args.rounds)
        content = json.dumps(results | {"case": case} | found, indent=1)
        (args.out / f"checkpoints-{case}.json").write_text(content + "\n")
        print(json.dumps({case: found["ratios"]}, indent=1), flush=True)


def versions(python: Path) -> dict[str, str]:
    """Versions of the peers and of what they run on."""
    packages = ("mergekit", "fusion-bench", "torch", "transformers", "safetensors")
    code = f"from importlib.metadata import version; print(*map(version, {packages}))"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(packages, found.stdout.split(), strict=True))


def commands(
    paths: list[Path], methods: list[str], peers: Path | None
) -> dict[tuple[str, str], list[str]]:
    """What a round runs, by tool and purpose; the folder to write comes last."""
    base, *experts = map(str, paths)
    dtype = json.loads((paths[0] / "config.json").read_text())["dtype"]
    covmerge = [sys.executable, "-m", "covmerge"]
    sources = [f"--base={base}", *(f"--expert={Path(path).name}={path}" for path in experts)]
    files = [str(path / "model.safetensors") for path in paths]
    dry = [*covmerge, "merge", *sources, "--dry-run"]
    found = {
        ("floor", "bytes"): [sys.executable, "-c", FLOOR, dtype, *files],
        ("covmerge", "version"): [*covmerge, "--version"],
        # Where nothing can be remembered, every merge is the first.
        ("covmerge", "first"): ["env", f"COVMERGE_CACHE={os.devnull}/none", *dry],
        ("covmerge", "startup"): dry,
    }
    if peers:
        mergekit = [str(peers.parent / "mergekit-yaml")]
        found["mergekit", "startup"] = [*mergekit, "--help"]
        mergekit += ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
        found["fusion_bench", "startup"] = [str(peers), "-c", FUSION_BENCH_IMPORTS]
    for method in methods:
        settings = SETTINGS[method]
        sets = [f"--method={method.split(',')[0]}", *settings["covmerge"]]
        found["covmerge", method] = [*covmerge, "merge", *sources, *sets]
        if peers and "mergekit" in settings:
            recipe = {"models": [{"model": path} for path in experts], "dtype": dtype}
            if method != "average":
                recipe["base_model"] = base
            path = paths[0].parent / f"{method}.yml"
            path.write_text(json.dumps(recipe | settings["mergekit"], indent=1))
            found["mergekit", method] = [*mergekit, str(path)]
        if peers and "fusion_bench" in settings:
            code = f"{FUSION_BENCH_IMPORTS}algorithm = {settings['fusion_bench']}{FUSION_BENCH}"
            found["fusion_bench", method] = [str(peers), "-c", code, base, *experts]
    return found


def measure(
    processes: dict[tuple[str, str], list[str]], paths: list[Path], rounds: int
) -> dict[str, object]:
    """Run everything, round by round."""
    inputs = [path / "model.safetensors" for path in paths]
    runs: dict[str, list[dict[str, float]]] = {}
    failures: dict[str, str] = {}
    distances: dict[str, float] = {}
    WORK.mkdir(parents=True, exist_ok=True)
    reference, out, log = WORK / "reference", WORK / "out", WORK / "log"
    # Nobody waits for a hub, and an error message is one line.
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "1000",
        "COVMERGE_CACHE": str(WORK / "cache"),
    }
    spawn([*processes["covmerge", "startup"], str(out)], log=log, env=env)
    for number in range(rounds):
        for (tool, what), argv in processes.items():
            label = f"{what}: {tool}"
            if label in failures:
                continue
            shutil.rmtree(out, ignore_errors=True)
            warm(inputs)
            os.sync()
            try:
                run = spawn([*argv, str(out)], log=log, env=env)
            except SystemExit:
                if tool not in PEERS:
                    raise
                failures[label] = last_line(log)
                print(f"{label} failed: {failures[label]}", flush=True)
                continue
            print(f"round {number + 1}, {label}: {run}", flush=True)
            runs.setdefault(label, []).append(run)
            if number == 0 and what in COMPARED:
                if tool == "covmerge":
                    shutil.rmtree(reference, ignore_errors=True)
                    out.rename(reference)
                else:
                    distances[label] = apart(distance, out, reference)
    for path in (out, reference):
        shutil.rmtree(path, ignore_errors=True)
    spreads = {label: spread(each) for label, each in runs.items()}
    return {
        "experts": len(paths) - 1,
        "input_bytes": sum(path.stat().st_size for path in inputs),
        "runs": spreads,
        "failures": failures,
        "largest_distance_to_covmerge": distances,
        "ratios": ratios(spreads),
    }


def warm(files: list[Path]) -> None:
    """Read files into the page cache, in little memory."""
    buffer = memoryview(bytearray(8 << 20))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").replace(str(WORK), "").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


def distance(folder: Path, reference: Path) -> float:
    """The largest ‖A − B‖ / ‖B‖ over the tensors A and B of two models."""
    ours, theirs = tensors(folder), tensors(reference)
    found = []
    for name, file in theirs.items():
        expected = file.get_tensor(name).float()
        difference = ours[name].get_tensor(name).float() - expected
        found.append(float(difference.norm() / expected.norm()))
    return max(found)


def tensors(folder: Path) -> dict[str, safe_open]:
    """The open file of each tensor."""
    files = [safe_open(path, "pt") for path in folder.glob("*.safetensors")]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def ratios(spreads: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """What the peers need over what covmerge needs, and its average over the floor."""
    pairs = [
        (label, f"{label.split(': ')[0]}: covmerge") for label in spreads if label.endswith(PEERS)
    ]
    if "average: covmerge" in spreads:
        pairs.append(("average: covmerge", "bytes: floor"))
    return {
        f"{above} / {below.split(': ')[1]}": {
            key: round(spreads[above][key]["median"] / spreads[below][key]["median"], 3)
            for key in ("seconds", "cpu_seconds", "peak_bytes")
        }
        for above, below in pairs
    }


if __name__ == "__main__":
    main()
