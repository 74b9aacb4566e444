#!/usr/bin/env bash
# gguf 0.19.0: the two numbers in a byte of a 4-bit block are sixteen places apart.
#
# Expected: a byte holds neighbours, as in bitsandbytes and compressed-tensors.
# Seen: byte i of a block of 32 has number i in its low half and number i + 16 in its high half,
#   in Q4_0 and in MXFP4 alike.
# So: codes cannot be copied between GGUF and these layouts without being put in another order;
#   the wrong order loads and has the right histogram.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet gguf==0.19.0 numpy==2.4.6
venv/bin/python - <<'PY'
import numpy as np
import gguf
seen = {}
for name, head in (("Q4_0", 2), ("MXFP4", 1)):  # bytes of the scale before the codes
    kind = gguf.GGMLQuantizationType[name]
    for place in (1, 17):
        block = np.zeros((1, 32), np.float32)
        empty = gguf.quantize(block + 0, kind)[0, head:]
        block[0, place] = 6.0
        changed = gguf.quantize(block, kind)[0, head:]
        low, high = (changed & 15) != (empty & 15), (changed >> 4) != (empty >> 4)
        seen[name, place] = np.flatnonzero(low).tolist(), np.flatnonzero(high).tolist()
print("bytes whose low and high half hold the number, by its place:", seen)
assert seen == {(name, place): ([1], []) if place == 1 else ([], [1]) for name in ("Q4_0", "MXFP4") for place in (1, 17)}, seen
PY
