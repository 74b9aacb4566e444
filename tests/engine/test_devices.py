"""Which device each process computes on, without any."""

import pytest
import torch

from covmerge.engine import RunOptions, usable_device
from covmerge.errors import InputError
from tests.cli.runs import covmerge as command
from tests.e2e.test_resume import save_plain

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain"), layers=4, width=64)


@pytest.mark.parametrize("name", ["cpuu", "cuda:-3", "meta:x"])
def test_what_is_no_device(name):
    for use in (usable_device, lambda name: RunOptions(device=name, cluster="auto").torch_device):
        with pytest.raises(InputError, match=f"--device {name} cannot be used here: "):
            use(name)


@no_gpu
def test_who_gives_out_tasks_needs_no_gpu_of_its_own(plain):
    options = RunOptions(device="cuda", cluster="auto")
    assert options.torch_device == torch.device("cuda")
    with pytest.raises(InputError, match="--device cuda cannot be used here: "):
        _ = options.device_here  # for what it does itself, such as to run the base
    base, experts = plain
    sources = [f"--expert={name}={path}" for name, path in experts.items()]
    given = ["merge", "--base", base, *sources, "--method=ace", "--dry-run", "--device=cuda"]
    assert "--device cuda cannot be used here" in command(*given, code=2).stderr
    assert command(*given, "--executor=ray", "--address=auto", "--json").json["estimate"]
