"""Merges of files on a GPU: what they are on the CPU, and the same bytes whoever does them."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.errors import ResourceError
from covmerge.run.engine.devices import _BESIDE
from covmerge.run.engine.inputs import Inputs
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.transfer import Transfer, pinned_bytes
from tests.cli.runs import covmerge as command
from tests.e2e.models import save_family
from tests.e2e.test_adapters import pytestmark as of_adapters
from tests.e2e.test_adapters import save_two_adapters
from tests.e2e.test_resume import interrupt_after
from tests.engine.layers import models, near, plan, saved
from tests.folders import contents

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)

GPU = torch.device("cuda")
METHODS = [
    "average", "ties", "dare_ties", "della", "ace", "auto", "actmat", "wudi", "iso_c", "iso_cts",
    "tsv_m", "cart", "dc_merge", "knots", "core_space", "ctm", "emr", "consensus", "karcher",
]  # fmt: skip


def alike(one, other, base):
    """Two outputs: the same tensors, to rounding of their updates."""
    start = load_file(base)
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype
        update = (tensor.double() - start[name].double()).norm()
        step = torch.finfo(tensor.dtype).eps * start[name].double().norm()
        assert (second[name].double() - tensor.double()).norm() <= 2e-3 * update + step, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_is_what_it_is_on_the_cpu_and_always_the_same(method, dtype, tmp_path):
    sources = saved(tmp_path / "models", *models(dtype=dtype))
    covmerge.merge(*sources, method, tmp_path / "cpu", threads=1)
    for name, threads in (("gpu", 1), ("again", 3)):
        result = covmerge.merge(*sources, method, tmp_path / name, device="cuda", threads=threads)
        assert result.run["resumed_items"] == 0
    alike(tmp_path / "cpu", tmp_path / "gpu", sources[0])
    assert contents(tmp_path / "gpu") == contents(tmp_path / "again")
    told = [json.loads((tmp_path / own / "covmerge.json").read_text()) for own in ("cpu", "gpu")]
    near(*(own["recipe"] for own in told))


@pytest.mark.parametrize("method", ["ties", "ace", "auto"])
def test_two_processes_share_a_gpu(method, tmp_path):
    sources = saved(tmp_path / "models", *models(layers=6, dtype=torch.bfloat16))
    covmerge.merge(*sources, method, tmp_path / "threads", device="cuda")
    result = covmerge.merge(*sources, method, tmp_path / "workers", device="cuda", workers=2)
    assert result.run["workers"] == 2
    assert contents(tmp_path / "workers") == contents(tmp_path / "threads")


def test_a_rank_on_a_gpu(tmp_path, monkeypatch):
    sources = saved(tmp_path / "models", *models())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    covmerge.merge(*sources, "ace", tmp_path / "rank", device="cuda", executor="ranks")
    covmerge.merge(*sources, "ace", tmp_path / "cpu", executor="ranks")
    alike(tmp_path / "cpu", tmp_path / "rank", sources[0])


@pytest.mark.parametrize("items", [1, 6, 12])
def test_resumed_on_the_gpu(items, tmp_path):
    base, experts = saved(tmp_path, *models())
    covmerge.merge(base, experts, "ace", out=tmp_path / "undisturbed", device="cuda")
    interrupt_after(tmp_path, base, experts, items=items, method="ace", device="cuda", threads=1)
    covmerge.merge(base, experts, "ace", out=tmp_path / "out", device="cuda", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss", "vit", "bert"])
@pytest.mark.parametrize("method", ["auto", "tsv_m"])
def test_models_of_every_form(family, method, tmp_path):
    sources = save_family(family, tmp_path / "models")
    here = covmerge.merge(*sources, method, threads=1)
    there = covmerge.merge(*sources, method, device="cuda")
    for name, tensor in here.tensors.items():
        off = (there.tensors[name].cpu().double() - tensor.double()).norm()
        assert off <= 2e-3 * here.stats["tensors"][name].get("merged_norm", 0.0) + 1e-5, name


@of_adapters
@pytest.mark.parametrize("method", ["ace", "auto", "knots", "tsv_m"])
def test_adapters(method, tmp_path):
    sources = save_two_adapters(tmp_path)
    here = covmerge.merge(*sources, method, threads=1)
    there = covmerge.merge(*sources, method, device="cuda")
    for name, tensor in here.tensors.items():
        assert (there.tensors[name].cpu() - tensor).norm() <= 1e-4 * (1 + tensor.norm())


def test_a_comparison(tmp_path):
    sources = models()
    names = ["average", "ace", "auto", "tsv_m"]
    here = covmerge.compare(*sources, names)
    there = covmerge.compare(*sources, names, device="cuda")
    for one, other in zip(here.rows, there.rows, strict=True):
        assert other.retention == pytest.approx(one.retention, abs=1e-3)


def test_the_command(tmp_path):
    base, experts = saved(tmp_path / "models", *models())
    flags = [f"--expert={name}={path}" for name, path in experts.items()]
    given = ["merge", f"--base={base}", *flags, "--method=ace", tmp_path / "out"]
    command(*given, "--device=cuda")
    command("verify", tmp_path / "out", "--deep")


def test_rows_arrive_as_they_are_while_another_stream_computes():
    transfer = Transfer(GPU)
    busy = torch.randn(2048, 2048, device=GPU)
    for size in (1, 1000, 40 * 2**20 // 4 + 3):
        sent = []
        for seed in range(4):
            rows = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            there, arrival = transfer.send(Inputs(rows.clone(), {}))
            busy = busy @ busy / 2048
            sent.append((rows, there.base, arrival))
        for rows, there, arrival in sent:
            arrival.synchronize()
            assert torch.equal(there.cpu(), rows)


def test_rows_are_sent_ahead():
    made = plan(*models())
    memory = RunOptions(device="cuda").memory([made])
    assert memory.ahead and pinned_bytes(GPU)


def test_what_has_no_room_is_refused_by_name(tmp_path):
    sources = saved(tmp_path, *models())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - _BESIDE // 2, dtype=torch.uint8, device=GPU)
    try:
        with pytest.raises(ResourceError, match="of the memory of cuda"):
            covmerge.merge(*sources, "ace", tmp_path / "out", device="cuda")
    finally:
        del hog
        torch.cuda.empty_cache()
    assert not (tmp_path / "out").exists()


def test_what_libraries_take_beside_tensors_is_within_what_is_left_for_them():
    """In a process of its own: a context, and what cuBLAS and cuSOLVER keep."""
    program = """
import torch
free, whole = torch.cuda.mem_get_info()
import covmerge
for n in (64, 768):
    updates = [torch.randn(n, n, device="cuda") for _ in range(3)]
    for name in ("ace", "auto", "actmat", "tsv_m", "iso_c", "cart"):
        covmerge.merge_layer(updates, name)
torch.cuda.synchronize()
left, _ = torch.cuda.mem_get_info()
print(free - left - torch.cuda.memory_reserved())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    libraries = int(ran.stdout)
    print(f"libraries took {libraries / 2**20:.0f} MiB")
    assert libraries <= _BESIDE
