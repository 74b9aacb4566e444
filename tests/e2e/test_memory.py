"""Peak memory follows the plan, measured by the operating system on real processes."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.forked import Forked, printed, run

WIDE = (512, 2048)
NARROW = (128, 12288)  # merged in a fraction of the time of as many bytes of the other
# By `actmat` soon merged too, for what they take while they are: 473 MB, and 237 MB on one core each.
HEAVY, HEAVY_NARROW = (256, 32768), (256, 16384)

MERGE = """
import json, sys, covmerge
options = {"threads": 2, **json.loads(sys.argv[1])}
result = covmerge.merge(options.pop("base"), options.pop("experts"), **options)
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


def given(base, experts, out, **options):
    """The program's argument."""
    sources = {"base": base, "experts": experts, "out": str(out)}
    return json.dumps({**sources, "allow": ["not-a-fine-tune"], **options})


def merge(*sources, **options):
    """Return the run's own report, with the kernel's high-water mark, or the errors."""
    done = run(MERGE, given(*sources, **options))
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


# The dry run of a merge.
PLAN = """
import json, sys
from covmerge.front.api import plan_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine.options import RunOptions
recipe = json.loads(sys.argv[1])
options = RunOptions(**{name: recipe.pop(name) for name in ("threads", "workers")})
del recipe["out"]
print(plan_recipe(parse_recipe(recipe), options)[1].peak)
"""


def together(pid):
    """What a process and all that it has started hold, each page once."""
    found = 0
    with suppress(psutil.Error):
        for process in (own := psutil.Process(pid), *own.children(recursive=True)):
            with suppress(psutil.Error):
                found += process.memory_full_info().pss
    return found


def high_water(pid):
    """The most that a process has held, as the kernel tells it of one that runs."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def watched(measure, *processes):
    """The most that was found of each process until all had ended, and the first one's report."""
    peaks = [0] * len(processes)
    while any(process.poll() is None for process in processes):
        peaks = [max(peak, measure(own.pid)) for peak, own in zip(peaks, processes, strict=True)]
        time.sleep(0.03)  # looking takes a core's time too
    for process in processes:
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stdout + stderr
    return peaks, json.loads(processes[0].communicate()[0])


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


@pytest.mark.slow
def test_max_memory_is_of_all_workers_together(tmp_path):
    """Measured over the tree of processes, page by page: of eight workers as many run as fit."""
    sources = save_layers(tmp_path, 3, HEAVY)
    how = {"method": "actmat", "threads": 1}
    two = printed(PLAN, given(*sources, tmp_path / "two", **how, workers=2))
    # The least that two of them are let do it in, but for what differs from start to start.
    allowed = int(two) + 32 * 2**20
    limited = given(*sources, tmp_path / "limited", **how, workers=8, max_memory=allowed)
    (measured,), report = watched(together, Forked(MERGE, limited))
    assert measured <= allowed and report["workers"] == 2
    refused = merge(*sources, tmp_path / "no", **how, workers=8, max_memory=allowed // 2)
    assert "leave out workers" in refused


@pytest.mark.slow
@pytest.mark.nightly
def test_what_two_items_in_hand_take_is_expected(tmp_path):
    """As workers on GPUs have them: over the tree of processes, and where there is room for one alone."""
    sources = save_layers(tmp_path, 3, HEAVY)
    how = {"method": "actmat", "threads": 1, "workers": 2}
    two = "from covmerge.run.engine import budget; budget._hands = lambda device: 2\n" + MERGE
    (peak,), report = watched(together, Forked(two, given(*sources, tmp_path / "two", **how)))
    assert peak <= report["expected_peak_memory"]
    # Half of what a second item takes that is read (three tensors) and written, of each.
    how["max_memory"] = allowed = report["expected_peak_memory"] - 2 * 2 * 2 * math.prod(HEAVY)
    (peak,), report = watched(together, Forked(two, given(*sources, tmp_path / "one", **how)))
    assert peak <= allowed and report["workers"] == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_max_memory_is_of_each_rank(tmp_path):
    """Each of two ranks computes one item at a time where four at once would take too much."""
    sources = save_layers(tmp_path, 12, HEAVY_NARROW)
    how = {"method": "actmat", "threads": 4, "executor": "ranks", "patience": 60}

    def ranks(name, **more):
        return watched(
            high_water,
            *(
                Forked(
                    MERGE,
                    given(*sources, tmp_path / name, **how, **more),
                    environment={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
                )
                for rank in range(2)
            ),
        )

    free, report = ranks("free")
    assert max(free) <= report["expected_peak_memory"]
    # Room for one of these items and not for a second.
    allowed = report["expected_peak_memory"] - 3 * 270 * 2**20
    limited, report = ranks("limited", max_memory=allowed)
    assert max(limited) <= allowed < max(free)
    assert report["expected_peak_memory"] <= allowed
