"""Layer by layer: ACE, ACTMat, TSV-M, Iso-C, Iso-CTS and WUDI beside the authors' own code, and `auto`.

    python -m benchmarks.kernels [--peers DIR] [--device cuda] [--rounds 2] [--out FILE.json]

The four matrices of a ViT-B/16 block with 8 experts, and of a GPT-2 block with 7 (as Conv1D stores
them, which is how the published code merges them), in float32; `--blocks vit-l14` are those of ACE's
Table 6, of which a model has 24 (GPT-2 has 12). Three kinds of updates, because they
decide which routes are taken:

homogeneous    rank 16 and noise in equal parts, every norm 0.35
heterogeneous  the same with norms from 0.02 to 1.2: ACE's gate fires, and its refinement runs
decaying       singular values as 1/i, as those of trained layers: ACTMat's cut-off drops directions

The authors' functions are taken by name from their files, so that nothing else of their
repositories need be installed; `DIR` holds checkouts named as on GitHub: unravel-xu/ACE-Merging,
marawangamal/actmat, AntoAndGar/task_singular_vectors, danielm1405/iso-merging,
nathanielyvo/WUDI-Merging. WUDI's 300 equal iterations are timed by a few of them; its call of
`.cuda()` does nothing on a CPU. On a GPU the updates are there before, by the clock, and `peak_bytes` is
what is allocated beside them.

Every layer is merged by both in turn, round by round, in one process; wall-clock and CPU time of
all threads. The efficiency is the work of the layer, over the time times the machine's own rate of
matrix products in float32; of averages, the bytes of updates and result, over the time times its
rate of sums over memory. Both rates are measured in every round. `difference` is
‖covmerge − theirs‖ / ‖theirs‖.

The work (`least FLOPs`) of ACE, ACTMat, WUDI and `auto` is the least known: sums and one solve in float32,
symmetric products at half cost, and for `auto` the spectrum of the sum. That nothing is cut off, refined
or done again in float64 is taken for granted: where the data want it, the efficiency pays. TSV-M, Iso-C and
Iso-CTS have the FLOPs that they declare of their route (`covmerge explain`), whatever the data: how near
LAPACK and products in float64 come to float32's products, and not whether less would do. There long thin
products count half as much again. A float64 operation counts as two, and an eigenproblem with its vectors
as LAPACK's, 9 n³.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import clock, machine, spread, usable
from covmerge import merge_layer
from covmerge.maths.linalg.auto import eigh_cost
from covmerge.methods import registry

RESULTS = Path(__file__).parent / "results"
BLOCKS: Mapping[str, tuple[int, Mapping[str, tuple[int, int]]]] = {
    "vit-b16": (
        8,
        {
            "attn.in_proj": (2304, 768),
            "attn.out_proj": (768, 768),
            "mlp.c_fc": (3072, 768),
            "mlp.c_proj": (768, 3072),
        },
    ),
    "vit-l14": (
        8,
        {
            "attn.in_proj": (3072, 1024),
            "attn.out_proj": (1024, 1024),
            "mlp.c_fc": (4096, 1024),
            "mlp.c_proj": (1024, 4096),
        },
    ),
    "gpt2": (
        7,
        {
            "attn.c_attn": (768, 2304),
            "attn.c_proj": (768, 768),
            "mlp.c_fc": (768, 3072),
            "mlp.c_proj": (3072, 768),
        },
    ),
}
KINDS = ("homogeneous", "heterogeneous", "decaying")
METHODS = ("average", "ace", "actmat", "iso_c", "tsv_m", "iso_cts", "wudi", "auto")
EPS = 1e-5
WUDI_ITERATIONS, WUDI_TIMED = 300, 3
Merge = Callable[[Sequence[Tensor]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", nargs="+", default=["vit-b16", "gpt2"], choices=BLOCKS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = usable(arguments.device)
    out = arguments.out or RESULTS / (
        "kernels.json" if device == "cpu" else f"kernels-{device}.json"
    )
    theirs = {}
    if arguments.peers is not None:
        theirs = published(arguments.peers, arguments.methods, device)
    begin(device)
    rows = []
    for block in arguments.blocks:
        count, shapes = BLOCKS[block]
        for kind in arguments.kinds:
            for layer, shape in shapes.items():
                updates = [update.to(device) for update in experts(kind, shape, count)]
                for method in arguments.methods:
                    row = {"block": block, "kind": kind, "layer": layer, "shape": shape}
                    row |= {"experts": count, "method": method}
                    row |= compared(method, updates, theirs.get(method), arguments.rounds)
                    rows.append(row)
                    print(line(row), flush=True)
    result = {
        "command": command(sys.argv[1:]),
        "machine": machine(device),
        "blocks": totals(rows),
        "layers": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for total in result["blocks"]:
        print(total)


def command(given: Sequence[str]) -> str:
    """What was asked for, without where the peers lie and the result goes."""
    words = iter(given)
    shown = ["python -m benchmarks.kernels"]
    for word in words:
        if word == "--out":
            next(words)
        else:
            shown += [word, "DIR"] if word == "--peers" and next(words) else [word]
    return " ".join(shown)


def experts(kind: str, shape: tuple[int, int], count: int) -> list[Tensor]:
    """Updates of one layer, the same for the same arguments."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    found = []
    for number in range(count):
        if kind == "decaying":
            sigma = 1.0 / torch.arange(1.0, min(shape) + 1)
            left, _ = torch.linalg.qr(noise(shape[0], len(sigma)))
            right, _ = torch.linalg.qr(noise(shape[1], len(sigma)))
            update = (left * sigma) @ right.mT
        else:
            low = noise(shape[0], 16) @ noise(16, shape[1])
            rest = noise(*shape)
            update = low / low.norm() + rest / rest.norm()
        size = 0.35
        if kind == "heterogeneous":
            size = 0.02 * 60 ** (number / (count - 1))
        found.append(update * (size / update.norm()))
    return found


def begin(device: str) -> None:
    """Let a GPU's libraries be loaded before anything is timed."""
    if device == "cpu":
        torch.Tensor.cuda = lambda tensor: tensor  # pyright: ignore - there is none; WUDI asks for it
        return
    for dtype in (torch.float32, torch.float64):
        small = torch.eye(64, dtype=dtype, device=device)
        for function in ("svd", "eigh", "cholesky", "inv", "pinv"):
            getattr(torch.linalg, function)(small)
        small @ small


def published(folder: Path, methods: Sequence[str], device: str) -> dict[str, Merge]:
    """The authors' functions, each as one from a layer's updates to the merged update."""

    def as_dicts(updates: Sequence[Tensor]) -> tuple[list[Any], Any]:
        vectors = [
            SimpleNamespace(vector={"w": u}, task_vector_param_dict={"w": u}) for u in updates
        ]
        config = SimpleNamespace(
            device=device,
            DATASETS=list(range(len(updates))),
            method=SimpleNamespace(common_space_fraction=0.8),
        )
        return vectors, config

    def by_config(function: Callable[..., Any]) -> Merge:
        return lambda updates: function(*as_dicts(updates))["w"]

    def ace() -> Merge:
        own = source(folder / "ACE-Merging/src/merge/strategy.py", "MergeStrategy")["MergeStrategy"]
        return lambda updates: own(["w"], as_dicts(updates)[0], device).ace_merging(eps=EPS)["w"]

    def actmat() -> Merge:
        own = source(folder / "actmat/src/merging.py", "merge_actmat")
        own["pinv"] = torch.linalg.pinv
        return lambda updates: own["merge_actmat"](torch.stack(list(updates)))

    def iso(name: str) -> Merge:
        return by_config(source(folder / "iso-merging/src/utils/iso.py", name)[name])

    def tsv_m() -> Merge:
        name = "compute_and_sum_svd_mem_reduction"
        return by_config(
            source(folder / "task_singular_vectors/src/utils/TSVM_utils.py", name)[name]
        )

    def wudi() -> Merge:
        name = "get_redundant_task_vector"
        own = source(folder / "WUDI-Merging/vit/wudi_main.py", name)
        own["tqdm"] = lambda steps: steps
        return lambda updates: own[name]("w", torch.stack(list(updates)), WUDI_TIMED)

    found: dict[str, Callable[[], Merge]] = {
        "ace": ace,
        "actmat": actmat,
        "iso_c": lambda: iso("iso_c"),
        "iso_cts": lambda: iso("iso_cts"),
        "tsv_m": tsv_m,
        "wudi": wudi,
    }
    return {name: found[name]() for name in methods if name in found}


def source(path: Path, *names: str) -> dict[str, Any]:
    """Run the definitions of these names in a file, and nothing else of it."""
    tree = ast.parse(path.read_text("utf-8"))
    wanted = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in tree.body if isinstance(node, wanted) and node.name in names]
    if {node.name for node in body} != set(names):
        raise SystemExit(
            f"{path} has no {', '.join(names)}: check out the repository it belongs to"
        )
    # Their progress reports are of no interest here.
    found: dict[str, Any] = {"torch": torch, "print": lambda *_: None}
    exec(compile(ast.Module(body, []), str(path), "exec"), found)
    return found


def compared(
    method: str, updates: Sequence[Tensor], theirs: Merge | None, rounds: int
) -> dict[str, Any]:
    """Merge one layer by covmerge and by the authors' code, in turn."""
    parameters = {"eps": EPS} if method == "ace" else {}
    ours: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    rates: list[float] = []
    streams: list[float] = []
    device = str(updates[0].device)
    merged = published_result = None
    if device != "cpu":
        merge_layer(updates, method, **parameters)  # kernels are loaded when they are first called
    for _ in range(rounds):
        rates.append(product_rate(device))
        streams.append(stream_rate(device))
        merged, timing = timed(lambda: merge_layer(updates, method, **parameters), device)
        ours.append(timing)
        if theirs is not None:
            published_result, timing = timed(lambda: theirs(updates), device)
            if method == "wudi":
                timing |= {
                    key: timing[key] * WUDI_ITERATIONS / WUDI_TIMED
                    for key in ("seconds", "cpu_seconds")
                }
            others.append(timing)
    row: dict[str, Any] = {"covmerge": spread(ours)}
    row["machine's FLOPs a second"] = median(rates)
    row["machine's bytes a second"] = median(streams)
    d_out, d_in = updates[0].shape
    count, seconds = len(updates), median(run["seconds"] for run in ours)
    # Every update is read once, the result written once.
    row["least bytes"] = 4 * (count + 1) * d_out * d_in
    row["least FLOPs"] = work_of(method, (d_out, d_in), count)
    if method == "average":
        row["efficiency"] = row["least bytes"] / median(streams) / seconds
    else:
        row["efficiency"] = row["least FLOPs"] / median(rates) / seconds
    if theirs is not None:
        row["published"] = spread(others)
        own = "cpu_seconds" if device == "cpu" else "seconds"
        row[f"{own}, published / covmerge"] = (
            row["published"][own]["median"] / row["covmerge"][own]["median"]
        )
        if method != "wudi":
            row["difference"] = float((merged - published_result).norm() / published_result.norm())
    return row


def timed(work: Callable[[], Tensor], device: str) -> tuple[Tensor, dict[str, float]]:
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    cpu, wall = time.process_time(), clock(device)
    result = work()
    wall = clock(device) - wall
    found = {"seconds": wall, "cpu_seconds": time.process_time() - cpu}
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) - held
    return result, found


def product_rate(device: str) -> float:
    """FLOPs a second of a large float32 product: the machine's own limit, now."""
    side = 2048 if device == "cpu" else 8192
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return max(
        2.0 * side**3 / timed(lambda: torch.mm(left, right, out=out), device)[1]["seconds"]
        for _ in range(3)
    )


def stream_rate(device: str) -> float:
    """Bytes a second, read and written, of a sum that no cache holds."""
    values = torch.ones(2**25 if device == "cpu" else 2**28, device=device)
    out = torch.empty_like(values)
    runs = [timed(lambda: torch.add(values, values, out=out), device)[1] for _ in range(3)]
    return max(2.0 * values.nbytes / run["seconds"] for run in runs)


def work_of(method: str, shape: tuple[int, int], count: int) -> float:
    """FLOPs of a layer in float32 by a method: the least known, or those of its route (see above)."""
    if method == "average":
        return 2.0 * count * shape[0] * shape[1]
    if method in ("ace", "actmat", "wudi"):
        return least_work(shape, count)
    if method == "auto":
        return least_work(shape, count) + least_flat(shape)
    return registry.get(method).cost(*shape, count, torch.float32.itemsize).flops


def least_work(shape: tuple[int, int], count: int) -> float:
    """FLOPs of ΣRC, ΣC and one solve by the best order of products, symmetric ones at half cost."""
    d_out, d_in = shape
    inner = 3.0 * d_out * d_in**2
    outer = d_out * d_in**2 + 3.0 * d_out**2 * d_in
    solve = d_in**3 / 3 + 2.0 * d_out * d_in**2
    primal = count * min(inner, outer) + solve
    m = count * d_out
    dual = 1.0 * m**2 * d_in + m**3 / 3 + 2.0 * d_out * m**2 + 2.0 * d_out * m * d_in
    return min(primal, dual) if m < d_in else primal


def least_flat(shape: tuple[int, int]) -> float:
    """FLOPs of `auto`'s flat spectrum: that of the sum by its smaller Gram matrix, and a product."""
    short, long = sorted(shape)
    gram, product = 1.0 * long * short**2, 2.0 * long * short**2
    return gram + eigh_cost(short).flops + product


def totals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sums over the layers of each block, by kind and method."""
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["block"], row["kind"], row["method"]), []).append(row)
    return [total(*key, layers) for key, layers in found.items()]


def total(
    block: str, kind: str, method: str, layers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    def summed(tool: str, key: str) -> float:
        return sum(layer[tool][key]["median"] for layer in layers)

    row: dict[str, Any] = {"block": block, "kind": kind, "method": method}
    tools = ["covmerge", "published"] if "published" in layers[0] else ["covmerge"]
    for tool in tools:
        row[tool] = {key: round(summed(tool, key), 3) for key in ("seconds", "cpu_seconds")}
        if "peak_bytes" in layers[0][tool]:
            row[tool]["peak_bytes"] = max(layer[tool]["peak_bytes"]["median"] for layer in layers)
    if "published" in row:
        for key in ("seconds", "cpu_seconds"):
            row[f"{key}, published / covmerge"] = round(
                row["published"][key] / row["covmerge"][key], 2
            )
    return row


def line(row: Mapping[str, Any]) -> str:
    def figures() -> Iterator[str]:
        for tool in ("covmerge", "published"):
            if tool in row:
                wall, cpu = row[tool]["seconds"]["median"], row[tool]["cpu_seconds"]["median"]
                yield f"{tool} {wall:.3f} s, cpu {cpu:.3f} s"
        ratios = [key for key in row if key.endswith("published / covmerge")]
        for key in ("efficiency", *ratios, "difference"):
            if key in row and not math.isnan(row[key]):
                yield f"{key} {row[key]:.3g}"

    names = (row["block"], row["kind"], row["layer"], row["method"])
    return " ".join(names) + ": " + "; ".join(figures())


if __name__ == "__main__":
    sys.exit(main())
