"""SSR-Merge on adapters with statistics: by their own factors, as a model and as an adapter."""

from contextlib import closing

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from tests.cli.runs import covmerge as command
from tests.e2e.models import build
from tests.e2e.test_adapters import save_adapter

TARGETS = ["q_proj", "v_proj", "down_proj"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def with_statistics(folder, source, base, seed):
    """Gram matrices of random inputs, as of this expert."""
    generator = torch.Generator().manual_seed(seed)
    measured = []
    for name, weight in base.items():
        if any(target in name for target in TARGETS):
            inputs = torch.randn(200, weight.shape[1], generator=generator)
            measured.append(Statistic((name,), inputs.T @ inputs / 200, rows=200))
    path = folder / f"{source.name}{seed}.covstats.safetensors"
    with closing(open_checkpoint(source)) as checkpoint:
        contents = Contents(checkpoint, {"gram": measured}, examples=200, protocol="inputs")
        write_statistics({path: contents}, overwrite=False)
    return path


def test_adapters_and_the_models_they_become(tmp_path):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    start = load_file(tmp_path / "base" / "model.safetensors")
    experts, statistics = {}, {}
    for kind in ("adapter", "full"):
        experts[kind] = {f"e{n}": tmp_path / f"e{n}" / kind for n in (1, 2)}
    for n in (1, 2):
        save_adapter(base, tmp_path / f"e{n}", seed=n, targets=TARGETS, r=2 + n)
    for kind, folders in experts.items():
        statistics[kind] = {
            name: with_statistics(tmp_path, path, start, int(name[1:]))
            for name, path in folders.items()
        }
        covmerge.merge(
            tmp_path / "base", folders, "ssr", tmp_path / kind, statistics=statistics[kind]
        )
    thin, folded = (load_file(tmp_path / kind / "model.safetensors") for kind in experts)
    changed = [name for name in start if not torch.equal(thin[name], start[name])]
    assert len(changed) == sum(any(target in name for target in TARGETS) for name in start)
    for name in changed:  # but for the ridge, which pulls where A is small
        change = thin[name] - start[name]
        assert (folded[name] - thin[name]).norm() < 1e-2 * change.norm()
    checks = command("verify", tmp_path / "adapter", "--deep", "--json").json["checks"]
    assert all(check["ok"] for check in checks)

    command(
        *("merge", "--base", tmp_path / "base", "--as=adapter", "--method=ssr", "--json"),
        *(f"--expert={name}={path}" for name, path in experts["adapter"].items()),
        *(f"--stats={name}={path}" for name, path in statistics["adapter"].items()),
        tmp_path / "out",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    weights = peft.PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload()
    for name, found in weights.state_dict().items():
        if name in changed:
            assert (found - thin[name]).norm() < 1e-5 * (thin[name] - start[name]).norm() + 1e-6
