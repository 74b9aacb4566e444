#!/usr/bin/env bash
# gguf 0.19.0: only the first part of a split model says what it is.
#
# Expected: each part names the architecture, as each shard of a safetensors model has its own
#   header.
# Seen: parts after the first hold split.no, split.count and split.tensors.count alone, and split.no
#   begins at 0 where file names begin at 00001.
# So: read the first part before any other; a part by itself cannot be recognised.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet gguf==0.19.0 numpy==2.4.6
venv/bin/python - <<'PY'
import pathlib
import gguf, numpy as np
writer = gguf.GGUFWriter("model.gguf", "llama", split_max_tensors=1)
for name in ("a.weight", "b.weight"):
    writer.add_tensor(name, np.ones((2, 2), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
keys = {p.name: [k for k in gguf.GGUFReader(str(p)).fields if not k.startswith("GGUF.")] for p in sorted(pathlib.Path().glob("*.gguf"))}
for name, held in keys.items():
    print(name, held)
first, second = keys.values()
assert "general.architecture" in first and all(k.startswith("split.") for k in second)
PY
