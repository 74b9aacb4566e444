"""Agreement with the outputs of the authors' own code, at the tolerances shipped with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import covmerge

GOLDEN = Path(__file__).parent.parent / "golden"
TOLERANCE = json.loads((GOLDEN / "tolerance.json").read_text())
FLOAT64 = torch.finfo(torch.float64).eps

# file -> method, parameters, computed in float64?, from LoRA factors?
CASES = {
    "average": ("average", {}, False, False),
    **{
        f"task_arithmetic_s{scale}": ("task_arithmetic", {"scale": scale}, False, False)
        for scale in (0.3, 0.4, 1.0)
    },
    **{
        f"ace_eps{eps}{suffix}": ("ace", {"eps": float(eps)}, bool(suffix), False)
        for eps in ("1e-05", "0.0002", "0.01", "0.04")
        for suffix in ("", "_fp64")
    },
    **{
        f"lora_ace_eps{eps}{suffix}": ("ace", {"eps": float(eps)}, bool(suffix), True)
        for eps in ("1e-05", "0.01")
        for suffix in ("", "_fp64")
    },
    "actmat": ("actmat", {}, False, False),
    "actmat_fp64_rtol32": ("actmat", {}, True, False),
    "actmat_fp64": ("actmat", {"rtol": "d_in · eps(float64)"}, True, False),
    "lora_actmat": ("actmat", {}, False, True),
    "lora_actmat_fp64": ("actmat", {"rtol": 1e-9}, True, True),
}


def tensors_of(file):
    with safe_open(GOLDEN / f"{file}.safetensors", "pt") as opened:
        return [k for k in opened.keys() if "/" in k]  # noqa: SIM118 - not a dict


@pytest.fixture(scope="module")
def inputs():
    with safe_open(GOLDEN / "inputs.safetensors", "pt") as opened:
        yield opened


def updates_of(inputs, variant, name, dtype, lora):
    if lora:
        return [
            inputs.get_tensor(f"{variant}/lora_B/{t}/{name}").to(dtype)
            @ inputs.get_tensor(f"{variant}/lora_A/{t}/{name}").to(dtype)
            for t in range(4)
        ]
    return [inputs.get_tensor(f"{variant}/delta/{t}/{name}").to(dtype) for t in range(4)]


def agreement(inputs, file, key):
    """Relative Frobenius error of covmerge against one golden tensor."""
    method, params, double, lora = CASES[file]
    with safe_open(GOLDEN / f"{file}.safetensors", "pt") as opened:
        expected = opened.get_tensor(key).double()
        space = opened.metadata()["space"]
    variant, name = key.split("/", 1)
    dtype = torch.float64 if double else torch.float32
    updates = updates_of(inputs, variant, name, dtype, lora)
    if expected.dim() < 2:
        # What the papers do with tensors that are not matrices.
        method, params = (method, params) if method == "task_arithmetic" else ("average", {})
    if params.get("rtol") == "d_in · eps(float64)":
        params = {"rtol": updates[0].shape[1] * FLOAT64}
    merged = covmerge.merge_layer(updates, method, **params).double()
    if space.startswith("weight"):
        merged += inputs.get_tensor(f"{variant}/base/{name}").double()
    return float((merged - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("file", "key"), [(file, key) for file in CASES for key in tensors_of(file)]
)
def test_golden(inputs, file, key):
    tolerance = TOLERANCE[f"{file}:{key}"]
    if tolerance is not None:
        assert agreement(inputs, file, key) <= tolerance
        return
    # Ill-posed: k of the refinement lies beyond the signal's rank, where the published code lifts
    # arbitrary directions. Without covmerge's cap on k the spectrum is the published one, though
    # the directions are not; with it, nothing leaves the rows that the updates span.
    method, params, double, lora = CASES[file]
    variant, name = key.split("/", 1)
    updates = updates_of(inputs, variant, name, torch.float64 if double else torch.float32, lora)
    uncapped = covmerge.merge_layer(updates, method, **params, rank_rtol=0.0).double()
    with safe_open(GOLDEN / f"{file}.safetensors", "pt") as opened:
        published = opened.get_tensor(key).double()
    spectrum = torch.linalg.svdvals(published)
    assert (torch.linalg.svdvals(uncapped) - spectrum).norm() <= 5e-3 * spectrum.norm()
    if lora:
        capped = covmerge.merge_layer(updates, method, **params).double()
        rows = torch.linalg.svd(torch.cat(updates).double(), full_matrices=False)[2][:16]
        assert (capped - capped @ rows.T @ rows).norm() <= 1e-4 * capped.norm()


def table():
    """Print the agreement per file: `python -m tests.methods.test_golden`."""
    with safe_open(GOLDEN / "inputs.safetensors", "pt") as inputs:
        print(f"{'file':28} {'tensors':>7} {'worst error':>12} {'tolerance':>10}  worst tensor")
        for file in CASES:
            rows = [
                (agreement(inputs, file, k), TOLERANCE[f"{file}:{k}"], k) for k in tensors_of(file)
            ]
            posed = [row for row in rows if row[1] is not None]
            error, tolerance, key = max(posed, key=lambda row: row[0] / row[1])
            print(f"{file:28} {len(posed):>7} {error:12.1e} {tolerance:10.1e}  {key}")
            for error, _, key in (row for row in rows if row[1] is None):
                print(f"{'':28} {'ill-posed':>20} {error:12.1e}  {key}")


if __name__ == "__main__":
    table()
