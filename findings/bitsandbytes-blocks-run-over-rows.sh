#!/usr/bin/env bash
# bitsandbytes 0.50.2: the NF4 blocks of a weight run over its rows, and nested scales over the whole weight.
#
# Expected: that a row's numbers depend on the row, so that quantised rows can be sorted, cut and joined.
# Seen: with 96 inputs a block of 64 holds the end of one row and the start of the next: a row beside one
#   that is ten times as large has another error than alone. With compress_statistics the scales are
#   rounded together, so that q of a fused q and k is not q quantised by itself, whatever the width.
# So: dequantise first; cut, sort and join the weights, and quantise the result once.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2
venv/bin/python - <<'PY'
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit


def rounded(weight, nested):
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    return dequantize_4bit(codes, state)


def apart(found, right):
    return float((found - right).norm() / right.norm())


torch.manual_seed(0)
narrow = torch.randn(128, 96)
narrow[::2] *= 10
small = torch.arange(1, 128, 2)
beside, alone = (apart(found, narrow[small]) for found in (rounded(narrow, False)[small], rounded(narrow[small], False)))
print(f"rows of 96 numbers: off by {beside:.2f} beside larger rows, by {alone:.2f} among their like")
assert beside > 2 * alone
q, k = torch.randn(256, 256), 5 * torch.randn(64, 256)
fused = {nested: apart(rounded(torch.cat([q, k]), nested)[:256], rounded(q, nested)) for nested in (False, True)}
print("q of a fused q and k, from q alone, without and with nested scales:", fused)
assert fused[False] == 0 and fused[True] > 1e-3, fused
PY
