"""Inputs that count by how sure an expert's head is of them, against the equation typed naively."""

from contextlib import closing

import pytest
import torch

from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Generated, StatisticsFile
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.gram import GramCollector
from covmerge.plan.statistics.model import ObservedLayer, load_model
from covmerge_lab.confidence import confidence
from covmerge_lab.weighed import collect_weighed
from tests.e2e.models import fine_tuned
from tests.statistics.models import classifier, save
from tests.statistics.test_drawn import save_vit

OUT = "a.covstats.safetensors"


def by_hand(folder, how, count):
    """Σ w z zᵀ / Σ w with w = 1 − H/log K of each example, every one run alone."""
    model = load_model(open_checkpoint(folder), "cpu", head=True)
    name = next(layer.name for layer in model.layers() if "intermediate" in layer.name)
    module = next(layer.module for layer in model.layers() if layer.name == name)
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2).double()))
    total, weight = 0.0, 0.0
    for batch in model.batches(how, Reading(max_examples=count))[0]:
        for index in range(len(batch["input_ids"])):
            seen.clear()
            with torch.no_grad():
                logits = model.whole(**{k: v[index : index + 1] for k, v in batch.items()}).logits
            p = logits[0].double().softmax(-1)
            w = 1 + float((p * p.log()).sum()) / torch.tensor(float(len(p))).log().item()
            total = total + w * seen[0].T @ seen[0]
            weight += w * len(seen[0])
    return name, total / weight


def test_grams_are_weighed_by_the_head(tmp_path):
    expert = save(fine_tuned(classifier(4), seed=1, scale=0.5), tmp_path / "m")
    how = Generated(seed=2)
    collect_weighed(expert, how, tmp_path / OUT, "head", max_examples=9)
    name, expected = by_hand(expert, how, 9)
    with closing(StatisticsFile.open(tmp_path / OUT)) as file:
        torch.testing.assert_close(file.read("gram", name).double(), expected, rtol=1e-5, atol=1e-6)
        assert file.about.generated["weights"] == "1 - H(p) / log K, of mean 1"
        assert not any("mean" in note for note in file.about.notes)  # experts differ by it


def test_no_head_that_is_sure(tmp_path):
    for number, model in enumerate((classifier(1), classifier(3, problem_type="regression"))):
        folder = save(model, tmp_path / str(number))
        with pytest.raises(InputError, match="without a head that is sure of one of several"):
            collect_weighed(folder, Generated(), tmp_path / OUT, "head", max_examples=3)
    with pytest.raises(InputError, match="without a head that is sure of one of several"):
        collect_weighed(save_vit(tmp_path / "v"), Generated(), tmp_path / OUT, "head")
    assert not (tmp_path / OUT).exists()


def with_head(folder, weight, bias):
    model = fine_tuned(classifier(2), seed=1, scale=0.5)
    with torch.no_grad():
        model.classifier.weight.mul_(weight)
        model.classifier.bias.copy_(torch.tensor(bias))
    return save(model, folder)


@pytest.mark.parametrize(
    ("weight", "bias", "says"),
    [
        (float("nan"), [0.0, 0.0], "/m gives numbers that are not finite, .*: correct its weights"),
        (1.0, [0.0, float("inf")], "/m gives numbers that are not finite"),
        (0.0, [0.0, 0.0], "the head of .*/m all labels of every example are alike"),
        (0.0, [0.3, 0.3 + 1e-7], "every example are alike"),
    ],
)
def test_a_head_that_weighs_nothing(tmp_path, weight, bias, says):
    """max(0.0, nan) is 0.0: a file of zeros was written."""
    expert = with_head(tmp_path / "m", weight, bias)
    with pytest.raises(InputError, match=says):
        collect_weighed(expert, Generated(), tmp_path / OUT, "head", max_examples=4)
    assert not (tmp_path / OUT).exists()


def test_a_layer_whose_inputs_all_weigh_nothing():
    """One of a mixture's may see no example but those that the head is not sure of."""

    class Nothing:
        relative = False

        def of(self, layer, inputs):
            return torch.zeros(len(inputs))

    layer = torch.nn.Linear(2, 3)
    grams = GramCollector([ObservedLayer("fc.weight", layer, 2)], Nothing())
    with grams.watching({}):
        layer(torch.ones(4, 2))
    with pytest.raises(InputError, match=r"all inputs of 'fc\.weight' are of weight 0"):
        grams.statistics()


def test_weights_are_within_bounds():
    assert confidence(torch.tensor([-1e30, 0.0, -1e30])) == 1.0
    assert 0.0 <= confidence(torch.full((7,), 3.3)) < 1e-12
