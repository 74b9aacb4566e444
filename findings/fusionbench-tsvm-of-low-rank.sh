#!/usr/bin/env bash
# fusion-bench 0.2.33: TSV-M of updates of low rank changes with the order of a layer's neurons.
#
# Expected: that a merge of permuted layers is the permuted merge, as it is for updates of full rank.
# Seen: with four updates of rank 4 in a 64 x 48 layer the two are more than a tenth apart. Each expert
#   gives a quarter of all singular triplets, twelve here, of which eight have σ = 0. Their vectors are
#   whatever the SVD filled up with, and what makes all vectors orthogonal moves the true ones by them.
# So: cut adapters' updates at their rank before TSV-M, or give each expert no more triplets than its
#   rank.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 fusion-bench==0.2.33
venv/bin/python - <<'PY'
import torch
from fusion_bench.method.task_singular_vector.utils import TSVM_utils
draw = torch.Generator().manual_seed(0)
def normal(*shape):
    return torch.randn(*shape, generator=draw, dtype=torch.float64)
def merged(updates):
    return TSVM_utils.compute_and_sum_svd_mem_reduction([{"weight": own.clone()} for own in updates], accelerator="cpu")["weight"]
rows, columns = torch.randperm(64, generator=draw), torch.randperm(48, generator=draw)
def apart(updates):
    plain = merged(updates)[rows][:, columns]
    return float((merged([own[rows][:, columns] for own in updates]) - plain).norm() / plain.norm())
low = apart([normal(64, 4) @ normal(4, 48) for _ in range(4)])
full = apart([normal(64, 48) for _ in range(4)])
print(f"of rank 4: {low:.3f} apart, of full rank: {full:.1e}")
assert low > 0.1 and full < 1e-10, (low, full)
PY
