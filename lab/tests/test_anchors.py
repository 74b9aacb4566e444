"""FDA's inputs: the gradient that they give the base comes to point along the task vector."""

from contextlib import closing

import pytest
import torch
import transformers
from torch import nn

from covmerge import open_checkpoint
from covmerge.errors import InputError
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.statistics.model import load_model
from covmerge_lab.anchors import Call, Effort, anchors, calls, collect_anchors
from tests.e2e.models import TEXT, build, fine_tuned
from tests.statistics.models import classifier, save
from tests.statistics.test_drawn import save_vit


def test_the_gradient_comes_to_point_along_the_task_vector():
    torch.manual_seed(0)
    old, new = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
    found, before, after = anchors(Call(old), Call(new), 6, Effort(sequences=3, length=5, steps=60))
    assert found.shape == (3, 5, 6)
    assert after > before + 0.1

    # The same cosine, by plain autograd of one sum.
    for each in (old, new):
        each.zero_grad()
    with torch.no_grad():
        theirs = new(found)
    (1 - nn.functional.cosine_similarity(old(found), theirs, dim=-1)).sum().backward()
    pull = torch.cat([-p.grad.flatten() for p in old.parameters()])
    ends = torch.cat([p.flatten() for p in new.parameters()])
    moved = ends - torch.cat([p.flatten() for p in old.parameters()])
    expected = float(nn.functional.cosine_similarity(pull, moved, dim=0).detach())
    assert abs(after - expected) < 1e-5


def save_pair(base, folder):
    expert = fine_tuned(base, seed=1, scale=0.1)
    return save(base, folder / "base"), save(expert, folder / "e")


@pytest.mark.slow
def test_every_linear_layer_of_an_encoder_sees_them(tmp_path):
    folders = save_pair(classifier(), tmp_path)
    out = tmp_path / "e.covstats.safetensors"
    effort = Effort(sequences=4, length=7, steps=5)
    cosines = collect_anchors(*folders, out, effort, lambda done, total: None)
    assert len(cosines) == 2 and all(after > before for before, after in cosines)
    with closing(StatisticsFile.open(out)) as file:
        names = file.names("gram")
        assert any("pooler" in name for name in names) and any("query" in name for name in names)
        assert set(file.about.rows.values()) == {4, 28}


@pytest.mark.slow
def test_a_model_of_pictures(tmp_path):
    folder = save_vit(tmp_path / "m")
    out = tmp_path / "e.covstats.safetensors"
    effort = Effort(sequences=2, length=3, steps=1)
    cosines = collect_anchors(folder, folder, out, effort, lambda done, total: None)
    assert all(before == after == 0.0 for before, after in cosines)  # nothing was changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_model(kind, tmp_path):
    folders = save_pair(build(kind), tmp_path)
    out = tmp_path / "e.covstats.safetensors"
    effort = Effort(sequences=4, length=7, steps=5)
    cosines = collect_anchors(*folders, out, effort, lambda done, total: None)
    assert cosines and all(after > before for before, after in cosines)
    with closing(StatisticsFile.open(out)) as file:
        assert set(file.about.rows.values()) == {28}
        assert len(file.names("gram")) == 2 * {"llama": 7, "gpt2": 4}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_model_gives_its_blocks_positions_and_a_mask(kind, tmp_path):
    effort = Effort(sequences=2, length=7)
    states = torch.randn(2, 7, 16)
    later = torch.cat([states[:, :-1], torch.randn(2, 1, 16)], dim=1)
    with closing(open_checkpoint(save(kind, tmp_path / "m"))) as checkpoint:
        first, *_ = calls(load_model(checkpoint, "cpu", head=False), effort)
    with torch.no_grad():
        ends, others = first(states), first(later)
    # What comes later is seen by nothing before it.
    torch.testing.assert_close(ends[:, :-1], others[:, :-1])
    assert not torch.allclose(ends[:, -1], others[:, -1])


@pytest.mark.slow
def test_blocks_that_are_called_more_than_once_are_refused(tmp_path):
    config = transformers.AlbertConfig(
        **TEXT, embedding_size=16, num_hidden_layers=3, intermediate_size=24
    )
    with closing(open_checkpoint(save(transformers.AlbertModel(config), tmp_path / "m"))) as own:
        model = load_model(own, "cpu", head=False)
        with pytest.raises(InputError, match=r"1 blocks, and calls them 3 times"):
            calls(model, Effort(sequences=2, length=3))
