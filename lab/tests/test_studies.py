"""The studies on tiny models, and their mathematics on matrices whose answers are known."""

import json
import math
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.maths.covariance.estimate import gate
from covmerge_lab.alone import Cost, Order, run_alone
from covmerge_lab.bench import Bench
from covmerge_lab.models import Section
from covmerge_lab.studies import STUDIES, cost, save
from covmerge_lab.studies.angles import InputSums, StepSums, angle, angles
from covmerge_lab.studies.controlled import (
    Size,
    Training,
    linear_layers,
    run_training,
    watching,
)
from covmerge_lab.studies.entries import BINS, WIDTH, histogram, moments
from covmerge_lab.studies.entries import text as entries_text
from covmerge_lab.studies.heterogeneity import choose, growth_of, update_norms
from covmerge_lab.studies.interference import TRAININGS
from covmerge_lab.studies.layers import open_layers
from covmerge_lab.studies.retention import Pair, agreement, without
from covmerge_lab.studies.spectra import find_spectra, overlap_of, spectrum_of, top_energy
from covmerge_lab.suite import Lessons, Suite, Variant
from covmerge_lab.workers import ignore_progress

# PEFT and transformers warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

LAYERS = ("h.0.fc.weight", "h.1.fc.weight", "h.10.fc.weight")
FULL = Variant("full", 0)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Two layers over tokens, some of them padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x, attention_mask):
        hidden = torch.tanh(self.first(x)) * attention_mask[..., None]
        return self.second(hidden.sum(1) / attention_mask.sum(1, keepdim=True))


def tokens(count, seed):
    mask = torch.ones(count, 3)
    mask[0, 2] = 0
    inputs = {"x": random(count, 3, 5, seed=seed), "attention_mask": mask}
    return inputs, random(count, 4, seed=seed + 1)


def read_all(path):
    with closing(open_checkpoint(path)) as checkpoint:
        return torch.cat([checkpoint.read(name).flatten() for name in LAYERS])


class Tiny(Suite):
    """Three layers in a file; the second task moves them ten times as far."""

    name = "tiny"
    kinds = ("full",)
    usual = (3,)
    adapted = ("first", "second")
    controlled_task = "near"

    @property
    def base(self):
        return self.folder / "base.safetensors"

    def fresh(self, task):
        return Net()

    @property
    def available(self):
        return {"near": "small updates", "far": "large ones", "middle": "in between"}

    def expert(self, task, variant):
        return self.folder / f"{task}.safetensors"

    def prepare(self, on_progress):
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({n: random(12, 10, seed=i) for i, n in enumerate(LAYERS)}, self.base)

    def lessons(self, task, batch_size, seed):
        model = Net()

        def loss(batch):
            inputs, wanted = batch
            return mse_loss(model(**inputs), wanted)

        def batches():
            number = seed
            while True:
                number += 2
                yield tokens(batch_size, number)

        return Lessons(model, batches(), loss)

    def settings(self, task, variant):
        raise NotImplementedError

    def learnt_from(self, task):
        raise NotImplementedError

    def train(self, task, variant, on_progress):
        scale = {"near": 1e-4, "far": 3e-2, "middle": 1e-3}[task]
        weights = {
            name: random(12, 10, seed=i) + scale * random(12, 10, seed=len(task) + 100 * i)
            for i, name in enumerate(LAYERS)
        }
        save_file(weights, self.expert(task, variant))

    def score(self, task, part, model, expert, on_progress=None):
        """The nearer a model is to the expert, the more examples it gets right."""
        found, wanted, start = map(read_all, (model, expert, self.base))
        away = (found - wanted).norm() / (wanted - start).norm()
        right = round(20 * float(1 / (1 + away)))
        return right * [1.0] + (20 - right) * [0.0]

    def inputs(self, task, examples):
        raise NotImplementedError


class Inline:
    """Workers that work here and now."""

    def run(self, jobs):
        return {name: job(ignore_progress) for name, job in jobs.items()}


@pytest.fixture
def bench(tmp_path):
    bench = Bench(Tiny(tmp_path, quick=True), Inline(), Console(quiet=True))
    bench.prepare()
    return bench


@pytest.fixture
def experts(bench):
    bench.train(FULL, list(bench.suite.tasks))
    return {task: bench.suite.expert(task, FULL) for task in bench.suite.tasks}


@pytest.mark.parametrize(
    "name",
    ["interference", "heterogeneity", "spectra", "entries", "cost", "ridge", "retention", "steps"],
)
def test_every_study_runs_and_is_saved(bench, name, monkeypatch, tmp_path):
    taken = Cost(mathematics=0.5, merge=1.0, process=3.0, memory=2**24, device_memory=None)
    monkeypatch.setattr(cost, "run_alone", lambda order: taken)
    study = STUDIES[name]()
    found = study.run(bench, [FULL])
    save(study, bench, found, tmp_path / "out", "covmerge study")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["study"] == name
    assert found.pictures
    for picture in found.pictures:
        assert (tmp_path / "out" / f"{picture}.png").stat().st_size > 0
    assert "|---|" in (tmp_path / "out" / "README.md").read_text()


def test_steps_around_one_method_alone(bench):
    (group,) = STUDIES["steps"](["ties"]).run(bench, [FULL]).numbers["groups"]
    titles = [row["title"] for row in group["rows"] if row["section"] == Section.DATA_FREE.value]
    assert {"ties", "pico, then ties", "ties, then svc"} < set(titles)
    assert all("ties" in title for title in titles)


def test_angles_of_known_matrices():
    one, other = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert angle(one, other) == pytest.approx(45)
    assert angle(one, torch.tensor([[0.0, 1.0], [-1.0, 0.0]])) == pytest.approx(90)
    assert angle(one, torch.zeros(2, 2)) == 90
    # The arccos of the cosine would be 0 here, or far off.
    nearly = torch.tensor([[1.0, 0.0], [0.0, 1.0 + 1e-9]], dtype=torch.float64)
    assert angle(one.double(), nearly) == pytest.approx(math.degrees(1e-9 / 2), rel=1e-3)


def test_sums_of_one_sample_make_every_angle_of_the_gradient_zero():
    z, g = random(1, 5, seed=0), random(1, 4, seed=1)
    steps, inputs = StepSums(4, 5), InputSums(5)
    steps.add(z, g)
    inputs.add(z)
    found = angles(-0.1 * g.mT @ z, steps, inputs)
    for value in (found.optimiser, found.cross, found.corr, found.drift, found.true):
        assert value == pytest.approx(0, abs=1e-2)
    assert found.identity == pytest.approx(math.degrees(math.acos(1 / math.sqrt(5))), abs=1e-4)


def test_sums_are_the_papers():
    z, g = random(7, 5, seed=0), random(7, 4, seed=1)
    steps = StepSums(4, 5)
    steps.add(z, g)
    own = [7 * row for row in g]
    outer = [torch.outer(row, row) for row in z]
    energies = [float(row.square().sum()) for row in own]
    expected = {
        "gradient": sum(torch.outer(a, b) for a, b in zip(own, z, strict=True)) / 7,
        "weighted": sum(o * e for o, e in zip(outer, energies, strict=True)) / 7,
        "separate": sum(outer) / 7 * sum(energies) / 7,
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(steps, name), value, rtol=1e-5, atol=1e-5)


def test_the_angle_of_a_random_rotation_is_that_of_many():
    update, z = random(3, 40, seed=0), random(60, 40, seed=1) * torch.linspace(0.1, 3, 40)
    steps, inputs = StepSums(3, 40), InputSums(40)
    steps.add(z, random(60, 3, seed=2))
    inputs.add(z)
    gram = update.mT @ update
    sampled = []
    for seed in range(200):
        turn, _ = torch.linalg.qr(random(40, 40, seed=seed))
        turned = turn @ gram @ turn.mT
        sampled.append(math.cos(math.radians(angle(turned.double(), inputs.covariance))))
    mean = math.degrees(math.acos(sum(sampled) / len(sampled)))
    assert angles(update, steps, inputs).rotated == pytest.approx(mean, abs=1)


def test_what_the_hooks_see_makes_the_gradient_and_leaves_padding_out():
    model = Net()
    inputs, wanted = tokens(4, seed=3)
    layers = linear_layers(model, ["first", "second"])
    sums = {name: StepSums(*layer.weight.shape) for name, layer in layers.items()}
    rows = {}

    def see(name, z):
        rows[name] = len(z)
        return partial(sums[name].add, z)

    with watching(layers, [inputs["attention_mask"].bool()], see):
        mse_loss(model(**inputs), wanted).backward()
    assert rows == {"first": 11, "second": 4}
    for name, layer in layers.items():
        torch.testing.assert_close(sums[name].gradient, layer.weight.grad)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.title)
def test_the_bound_holds_in_every_controlled_training(tmp_path, training):
    size = Size(batch=6, steps=(1, 4), held=5)
    found = run_training(Tiny(tmp_path), training, seed=0, size=size, on_progress=ignore_progress)
    assert list(found) == [1, 4]
    for layers in found.values():
        assert set(layers) == {"first", "second"}
        assert all(layer.slack >= -1e-6 for layer in layers.values())
    last = found[4].values()
    if training.optimiser == "SGD":
        assert all(layer.optimiser < 0.01 for layer in last)
    else:
        assert all(layer.optimiser > 0.1 for layer in last)


def test_trainings_differ_only_in_what_is_asked(tmp_path):
    size = Size(batch=6, steps=(2,), held=2)
    run = partial(run_training, Tiny(tmp_path), seed=1, size=size, on_progress=ignore_progress)
    assert run(Training("SGD", 1e-2)) == run(Training("SGD", 1e-2))
    small, large = (run(Training("SGD", rate))[2]["second"] for rate in (1e-4, 0.3))
    assert small.identity != large.identity


def test_layers_are_read_in_order_as_differences(bench, experts):
    with open_layers(bench.suite.base, experts) as opened:
        layers = list(opened.all())
    assert [layer.name for layer in layers] == list(LAYERS)
    torch.testing.assert_close(
        layers[1].updates["far"], 3e-2 * random(12, 10, seed=103), rtol=1e-3, atol=1e-6
    )


def test_gamma_of_the_norms_is_that_of_the_merge(bench, experts):
    norms = update_norms(bench.suite.base, experts, ignore_progress)
    stats = covmerge.merge(bench.suite.base, experts, method="ace").stats["tensors"]
    assert list(norms) == list(LAYERS)
    for name, of in norms.items():
        expected = stats[name]["matrices"][0]["gamma"]
        assert gate(list(of.values()), tau=None).gamma == pytest.approx(expected, rel=1e-4)


def test_growth_takes_the_same_subsets_each_time():
    experts = [f"e{number}" for number in range(9)]
    assert len(choose(experts, 4)) == 20
    assert choose(experts, 4) == choose(experts, 4)
    norms = {"layer": dict(zip(experts, [0.01 * 2**n for n in range(9)], strict=True))}
    points = growth_of(norms, "scale_free")
    assert [point.experts for point in points] == list(range(2, 10))
    assert (points[-1].subsets, points[-1].fired) == (1, 1.0)
    assert points[-1].gamma == pytest.approx(7.5 * (2 * math.log(2)) ** 2)
    alike = {"layer": dict.fromkeys(experts, 0.1)}
    assert [point.fired for point in growth_of(alike, "paper")] == [0.0] * 8


def test_refinement_flattens_the_spectrum_and_keeps_the_directions(bench, experts):
    found = find_spectra(bench.suite.base, experts, 2, ignore_progress)
    assert (found.layers, found.fired, len(found.seen)) == (3, 3, 2)
    for spectrum in found.seen:
        assert top_energy(spectrum.after) < top_energy(spectrum.before)
        assert len(spectrum.experts) == 3
    with open_layers(bench.suite.base, experts) as opened:
        layer = next(iter(opened.all()))
    same = spectrum_of(replace(layer, parameters={**layer.parameters, "tau": 1e9}))
    assert same.before == same.after
    assert same.cosines[0] == pytest.approx(1)
    assert same.overlap == pytest.approx(1)


def test_overlap_of_spaces():
    turned = torch.eye(40)[:, torch.randperm(40)]
    assert overlap_of(torch.eye(40), torch.eye(40)) == pytest.approx(1)
    assert overlap_of(torch.eye(40), torch.eye(40).flip(1)) == 0
    assert 0 <= overlap_of(torch.eye(40), turned) <= 1


def test_moments_tell_distributions_apart():
    normal = random(300, 300, seed=0)
    found = moments(3 * normal)
    assert found.gaussian and found.centred
    assert found.std == pytest.approx(3, rel=0.02)
    assert found.tail == pytest.approx(0.0027, rel=0.2)
    laplace = normal.sign() * random(300, 300, seed=1).abs().add(1e-9).square()
    assert not moments(laplace).gaussian
    assert not moments(normal + 0.1).centred
    uniform = torch.rand(300, 300, generator=torch.Generator().manual_seed(0))
    assert moments(uniform).kurtosis == pytest.approx(-1.2, abs=0.02)
    assert sum(histogram(normal)) * 2 * WIDTH / BINS == pytest.approx(1, abs=1e-4)


def test_entries_say_plainly_what_they_are():
    normal = {"a": {"t": moments(random(300, 300, seed=0))}}
    assert "Zero-centred: yes" in entries_text(normal)
    assert "Gaussian: yes" in entries_text(normal)
    uniform = {"a": {"t": moments(torch.rand(100, 100))}}
    assert "Zero-centred: no" in entries_text(uniform)
    assert "Gaussian: no" in entries_text(uniform)


def test_prediction_is_held_against_what_was_measured(bench):
    found = STUDIES["retention"]().run(bench, [FULL, Variant("full", 1)]).numbers["kinds"]["full"]
    models = {pair["model"] for pair in found["pairs"]}
    assert {"average", "ace", "ace eps=0.01", "actmat", "wudi"} <= models
    assert "regmean" not in models and "emr" not in models
    everything, fair = found["agreement"].values()
    assert everything["kept"] != fair["kept"]
    # What Tiny measures is the distance to the expert, which is what Ĉ = I predicts.
    assert fair["unweighted"]["methods"] > fair["kept"]["methods"]


def test_agreement_of_what_agrees():
    pairs = [
        Pair(model, task, kept, -kept, kept, measured)
        for model, task, kept, measured in (
            ("one", "a", 0.1, 0.2), ("one", "b", 0.2, 0.1),
            ("two", "a", 0.8, 0.9), ("two", "b", 0.9, 0.8),
        )
    ]  # fmt: skip
    found, opposite = agreement(pairs, "kept"), agreement(pairs, "unweighted")
    assert (found.methods, found.means, found.tasks) == (1.0, 1.0, -1.0)
    assert (opposite.methods, opposite.means, opposite.tasks) == (-1.0, -1.0, 1.0)
    assert without(pairs, ["two"]) == pairs[:2]


@pytest.mark.slow
def test_a_merge_alone_is_measured(bench, experts, tmp_path):
    order = Order(
        base=str(bench.suite.base),
        experts={name: str(path) for name, path in experts.items()},
        method="ace",
        out=str(tmp_path / "merged"),
        parameters={"eps": 1e-3},
    )
    found = run_alone(order)
    assert 0 < found.mathematics < found.merge < found.process
    assert found.memory >= 0
    assert found.device_memory is None
    assert (tmp_path / "merged" / "covmerge.json").exists()
    with pytest.raises(InputError, match=r"merging by 'acee' alone failed.* no method 'acee'"):
        run_alone(replace(order, method="acee"))
