import json

import pytest
import torch

from covmerge_lab import training
from covmerge_lab.training import MARKER, Settings
from covmerge_lab.workers import ignore_progress


def test_fit_learns_and_leaves_what_is_frozen():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    inputs = torch.randn(64, 3)
    wanted = inputs.sum(1, keepdim=True)

    def loss(batch):
        return (model(batch) - wanted).square().mean()

    before = loss(inputs).item()
    told = []
    training.fit(
        model, iter([inputs] * 100), loss, Settings(50, 0.05), lambda *step: told.append(step)
    )
    assert loss(inputs).item() < before / 2
    assert torch.equal(model[0].weight, frozen)
    assert told[-1] == (50, 50)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_decays_weights_no_more_than_adamw(optimizer):
    """What no gradient reaches is (1 − rate · decay) of itself after each step."""
    still = torch.nn.Linear(3, 4, bias=False)
    before = still.weight.detach().clone()
    settings = Settings(400, 2e-3, warmup=0.0).by(optimizer)

    def loss(batch):
        return 0.0 * still.weight.sum()

    training.fit(still, iter([None] * 400), loss, settings, ignore_progress, by=optimizer)
    # The rate falls to nothing, so that it is half of it in the mean.
    torch.testing.assert_close(still.weight, before * (1 - 2e-3 * 0.01) ** 200, rtol=1e-3, atol=0)


def test_only_a_whole_expert_is_taken_for_trained(tmp_path):
    marker = training.marker(Settings(5, 1e-3), variant="full-0")
    folder = tmp_path / "expert"
    with pytest.raises(KeyboardInterrupt), training.finished(folder, marker) as unfinished:
        (unfinished / "model.safetensors").write_text("half of it")
        raise KeyboardInterrupt
    assert not folder.exists() and not training.is_trained(folder, marker)
    with training.finished(folder, marker) as unfinished:
        (unfinished / "model.safetensors").write_text("all of it")
    assert training.is_trained(folder, marker)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expert"]
    assert not training.is_trained(folder, training.marker(Settings(6, 1e-3), variant="full-0"))
    assert json.loads((folder / MARKER).read_text())["variant"] == "full-0"
