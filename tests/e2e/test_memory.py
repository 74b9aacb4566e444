"""Peak memory follows the plan, measured by the operating system on real processes."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from tests.forked import run

WIDE = (768, 3072)
NARROW = (128, 12288)  # merged in a fraction of the time of as many bytes of the other

MERGE = """
import json, sys, covmerge
options = json.loads(sys.argv[1])
result = covmerge.merge(options.pop("base"), options.pop("experts"), threads=2, **options)
print(json.dumps(dict(result.run)))
"""


def save_layers(folder, layers, shape):
    """Three checkpoints of `layers` blocks, all alike, of two large matrices, in bfloat16."""
    paths = {}
    for number, name in enumerate(("base", "e1", "e2")):
        generator = torch.Generator().manual_seed(number)
        down = torch.randn(shape, generator=generator).mul_(0.02 if number else 0.1).bfloat16()
        tensors = {}
        for layer in range(layers):
            tensors[f"layers.{layer}.up.weight"] = down.T.contiguous()
            tensors[f"layers.{layer}.down.weight"] = down.clone()
        paths[name] = str(folder / f"{name}-{layers}.safetensors")
        save_file(tensors, paths[name])
    return paths.pop("base"), paths


def merge(base, experts, out, **options):
    """Return the run's own report, with the kernel's high-water mark, or the errors."""
    arguments = json.dumps(
        {
            **{"base": base, "experts": experts, "out": str(out)},
            "allow": ["not-a-fine-tune"],
            **options,
        }
    )
    done = run(MERGE, arguments)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_peak_follows_the_largest_tensor_not_the_model(tmp_path):
    peaks, expected = {}, {}
    # Every fifth block: while it is computed, all others could be read.
    rules = [{"match": "layers.*[05].*", "method": "ace"}]
    for layers in (8, 40):
        base, experts = save_layers(tmp_path, layers, NARROW)
        out = tmp_path / f"out{layers}"
        report = merge(base, experts, out, method="average", rules=rules)
        peaks[layers] = report["peak_memory"]
        expected[layers] = report["expected_peak_memory"]
        assert peaks[layers] <= expected[layers]
    assert abs(expected[40] - expected[8]) < 0.02 * expected[8]
    # How full the read-ahead (128 MiB) gets, and whether the workspaces of two items (150 MB each) meet,
    # depends on timing; it is less than half of what the larger model reads more, 604 MB.
    more = 32 * 2 * 3 * math.prod(NARROW) * 2
    assert peaks[40] - peaks[8] < more / 2


@pytest.mark.slow
def test_max_memory_is_obeyed_or_refused(tmp_path):
    base, experts = save_layers(tmp_path, 3, WIDE)
    report = merge(base, experts, tmp_path / "free", method="ace")
    assert report["peak_memory"] <= report["expected_peak_memory"]
    allowed = report["expected_peak_memory"] - 32 * 2**20
    tight = merge(base, experts, tmp_path / "tight", method="ace", max_memory=allowed)
    assert tight["peak_memory"] <= allowed
    assert tight["expected_peak_memory"] <= allowed
    refused = merge(base, experts, tmp_path / "refused", method="ace", max_memory="300MB")
    assert "ResourceError" in refused
    assert "(max_memory)" in refused
    assert not (tmp_path / "refused").exists()
