#!/usr/bin/env bash
# torch 2.13.0: weights of torch.load(FILE, mmap=True) become those that torch.save writes to the same path later.
#
# Expected: what was loaded before training stays what it was, as without mmap.
# Seen: torch.save opens the path and writes into the same file, which the loaded tensors show. The base that was loaded first and the
#   model that was saved over it are equal: an update trained minus base is zero everywhere, and an average is the last model.
#   A safetensors file that save_file writes anew does not do this (safetensors 0.8.0).
# So: load without mmap, clone what is kept, or save to another name and rename.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
venv/bin/python - <<'PY'
import torch
from safetensors.torch import load_file, save_file

torch.manual_seed(0)
base = {"fc.weight": torch.randn(256, 256)}
trained = {"fc.weight": base["fc.weight"] + 0.01 * torch.randn(256, 256)}
loaders = {
    "torch": (torch.save, lambda path: torch.load(path)),
    "torch mmap": (torch.save, lambda path: torch.load(path, mmap=True)),
    "safetensors": (save_file, load_file),
}
lengths = {}
for name, (save, load) in loaders.items():
    save(base, "model")
    kept = load("model")
    save(trained, "model")  # the end of an epoch
    lengths[name] = round(float((load("model")["fc.weight"] - kept["fc.weight"]).norm()), 3)
right = round(float((trained["fc.weight"] - base["fc.weight"]).norm()), 3)
print("norm of the update:", right, "as computed from what was loaded before and after:", lengths)
assert lengths == {"torch": right, "torch mmap": 0.0, "safetensors": right}, lengths
PY
