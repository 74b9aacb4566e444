"""FusionBench's methods beside covmerge's, on tiny experts: the largest difference of each.

    python -m benchmarks.fusionbench --python VENV/bin/python

VENV has fusion-bench and no covmerge. Each method runs in float64 on four experts of one base, whose
updates have full rank, rank 3 (as adapters), or are one zero update and three of full rank. `apart` is
‖theirs − covmerge's‖ / ‖theirs − base‖ over all tensors. Written into results/fusionbench.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import covmerge

RESULTS = Path(__file__).parent / "results" / "fusionbench.json"
State = dict[str, Tensor]

# Ours by the name of theirs: method, parameters, and by what theirs and ours differ.
METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "simple_average": ("average", {}, ""),
    "task_arithmetic": ("task_arithmetic", {"scale": 0.3}, ""),
    "ties": (
        "ties",
        {"density": 0.2, "merge": "sum"},
        "equal but where votes cancel exactly: sign of the sum of all signs there, nobody here",
    ),
    "iso_c": (
        "iso_c",
        {},
        "σ̄ over all min(d_out, d_in) singular values there, over the numerical rank here",
    ),
    "iso_cts": (
        "iso_cts",
        {"common_fraction": 0.5},
        "r = min(d_out, d_in) there, the numerical rank here; zero updates count as experts there",
    ),
    "tsv_m": (
        "tsv_m",
        {},
        "⌊r/T⌋ triplets of each update, with null ones there; zero updates count as experts there",
    ),
    "wudi": (
        "wudi",
        {"solver": "adam"},
        "0/0 of a zero update there, so that its tensors are NaN; vectors: Σ Δ_t / T there, the base here",
    ),
    "wudi, closed": (
        "wudi",
        {},
        "300 steps of 1e-5 from ΣΔ_t there, the minimum of the same loss here",
    ),
    "model_stock": (
        "model_stock",
        {},
        "r of the mean of the angles there, of the mean of their cosines here",
    ),
    "emr": ("emr", {}, "equal"),
}


def experts(kind: str) -> tuple[State, list[State]]:
    """A base of two matrices and a vector, and four experts of it."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"layers.0.fc.weight": (24, 16), "layers.1.fc.weight": (16, 24), "norm.weight": (24,)}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def update(shape: tuple[int, ...]) -> Tensor:
        if kind == "rank 3" and len(shape) == 2:
            return 0.01 * normal(shape[0], 3) @ normal(3, shape[1])
        return 0.02 * normal(*shape)

    base = {name: normal(*shape) for name, shape in shapes.items()}
    made = [{name: own + update(own.shape) for name, own in base.items()} for _ in range(4)]
    if kind == "one zero":
        made[0] = dict(base)
    return base, made


_THEIRS = r"""
import sys
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from fusion_bench.method.ties_merging import ties_merging_utils as ties_utils
from fusion_bench.method.isotropic_merging.iso_utils import iso_c, iso_cts
from fusion_bench.method.task_singular_vector.utils import TSVM_utils
from fusion_bench.method.wudi.wudi import wudi_merging
from fusion_bench.method.model_stock.model_stock import compute_angle, compute_ratio
from fusion_bench.method.emr_merging.utils import emr_merge
from fusion_bench.utils.state_dict_arithmetic import state_dict_avg, state_dict_sub, state_dict_sum

folder = Path(sys.argv[1])
base = load_file(folder / "base.safetensors")
models = [load_file(folder / f"{n}.safetensors") for n in range(4)]
updates = [state_dict_sub(model, base) for model in models]

def stock():
    angles = [compute_angle(a, b, base) for n, a in enumerate(models) for b in models[n + 1:]]
    mean = {name: sum(angle[name] for angle in angles) / len(angles) for name in base}
    mixed, whole = compute_ratio(mean, k=4), state_dict_avg(models)
    return {name: (whole[name] - own) * float(mixed[name]) for name, own in base.items()}

def ties():
    flat = torch.vstack([ties_utils.state_dict_to_vector(update) for update in updates])
    merged = ties_utils.ties_merging(flat, reset_thresh=0.2, merge_func="sum")
    return ties_utils.vector_to_state_dict(merged, base)

found = {
    "simple_average": lambda: state_dict_sub(state_dict_avg(models), base),
    "task_arithmetic": lambda: {name: 0.3 * own for name, own in state_dict_sum(updates).items()},
    "ties": ties,
    "iso_c": lambda: iso_c(updates, accelerator="cpu"),
    "iso_cts": lambda: iso_cts(updates, common_space_fraction=0.5, accelerator="cpu"),
    "tsv_m": lambda: TSVM_utils.compute_and_sum_svd_mem_reduction(updates, accelerator="cpu"),
    "wudi": lambda: wudi_merging(updates, accelerator="cpu"),
    "model_stock": stock,
    "emr": lambda: emr_merge(updates)[0],
}
for name, merge in found.items():
    made = {key: own.detach().double().contiguous().clone() for key, own in merge().items()}
    save_file(made, folder / f"their {name}.safetensors")
"""


def apart(theirs: State, ours: State, base: State, names: list[str]) -> float | str:
    """‖theirs − ours‖ / ‖theirs‖ of updates."""
    off = sum(float((theirs[n] - (ours[n] - base[n])).square().sum()) for n in names)
    share = (off / sum(float(theirs[n].square().sum()) for n in names)) ** 0.5
    return share if share == share else "NaN"


def compared(kind: str, python: str) -> dict[str, dict[str, float | str]]:
    """Of each method: how far matrices and vectors are apart."""
    base, models = experts(kind)
    rows: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_file(base, folder / "base.safetensors")
        for number, model in enumerate(models):
            save_file(model, folder / f"{number}.safetensors")
        (folder / "theirs.py").write_text(_THEIRS)
        argv = [python, "theirs.py", str(folder)]
        subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        named = {f"expert{number}": model for number, model in enumerate(models)}
        for name, (method, parameters, _) in METHODS.items():
            theirs = load_file(folder / f"their {name.partition(',')[0]}.safetensors")
            ours = covmerge.merge(
                base, named, method, **parameters, dtype="float64", allow=["unchanged-expert"]
            ).tensors
            rows[name] = {
                "matrices": apart(theirs, ours, base, [n for n in base if base[n].ndim == 2]),
                "vectors": apart(theirs, ours, base, [n for n in base if base[n].ndim == 1]),
            }
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True)
    given = parser.parse_args()
    asked = "from importlib.metadata import version as v; print(v('fusion-bench'), v('torch'))"
    versions = subprocess.run(
        [given.python, "-c", asked], check=True, capture_output=True, text=True
    )
    found = {kind: compared(kind, given.python) for kind in ("full rank", "rank 3", "one zero")}
    result = {
        "fusion-bench, torch": versions.stdout.split(),
        "apart": found,
        "why": {name: why for name, (_, _, why) in METHODS.items()},
    }
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for name in METHODS:
        print(name, *(f"{found[kind].get(name)}" for kind in found))
