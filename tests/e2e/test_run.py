"""The last checkpoints of one training run, as transformers' Trainer leaves them, averaged."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from covmerge.errors import CheckpointError, RecipeError
from covmerge.plan.recipe import load_recipe, parse_recipe
from covmerge.plan.recipe.sections import Run
from covmerge.run.work import Work
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build
from tests.e2e.test_adapters import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

STEPS = (2, 4, 10)  # by text, 10 comes first


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the Trainer itself, three checkpoints long."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"input_ids": [n, n + 1, 3], "labels": [n, n + 1, 3]} for n in range(20)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=10,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen="all",
    )
    with torch.random.fork_rng():
        transformers.Trainer(build("llama"), arguments, train_dataset=rows).train()
    for step in (6, 8):
        shutil.rmtree(folder / f"checkpoint-{step}")
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def weights_of(run, step):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        (["--last=2"], {4: 1.0, 10: 1.0}),
        ([], {2: 1.0, 4: 1.0, 10: 1.0}),
        (["--weights=step"], {2: 0.2, 4: 0.4, 10: 1.0}),
        (["--weights=ema", "--decay=0.5"], {2: 0.25, 4: 0.5, 10: 1.0}),
        (["--weights=linear"], {2: 1 / 6, 4: 1 / 2, 10: 1 / 3}),
        (["--weights=1-sqrt"], {2: (1 / 6) ** 0.5, 4: 6**-0.5, 10: 1 - (2 / 3) ** 0.5}),
    ],
    ids=["last", "all", "step", "ema", "linear", "1-sqrt"],
)
def test_the_mean_of_a_runs_checkpoints(run, tmp_path, flags, shares):
    ran = command("merge", "--run", run, *flags, tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    each = {step: weights_of(run, step) for step in shares}
    for name, weight in merged.items():
        mean = sum(s * each[step][name].double() for step, s in shares.items())
        expected = mean / sum(shares.values())
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    recipe = json.loads((tmp_path / "out" / "covmerge.json").read_text("utf-8"))["recipe"]
    assert recipe["base"] is None and recipe["method"] == "linear" and "run" not in recipe
    told = {name: expert["weight"] for name, expert in recipe["experts"].items()}
    assert told == pytest.approx({f"checkpoint-{step}": s for step, s in shares.items()}, rel=1e-12)
    assert "optimizer.pt" in ran.stderr and "left aside" in ran.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize(
    "steps", [[500], [3, 4], [100, 200, 300, 400, 500], [2, 4, 10, 11]], ids=str
)
@pytest.mark.parametrize(
    ("weights", "left"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: np.cos(np.pi * x / 2) ** 2),
        ("1-sqrt", lambda x: 1 - x**0.5),
    ],
    ids=["linear", "cosine", "1-sqrt"],
)
def test_the_mean_stands_where_a_decaying_learning_rate_would_have_led(weights, left, steps):
    draw = np.random.default_rng(0)
    learnt = draw.standard_normal((len(steps) - 1, 7))  # between one checkpoint and the next
    saved = np.cumsum([draw.standard_normal(7), *learnt], axis=0)
    shares = np.array(Run(folder="r", weights=weights).shares(steps))
    end = steps[-1] + (steps[-1] - steps[0]) / max(1, len(steps) - 1)
    decayed = saved[0].copy()
    for step, update in zip(steps[1:], learnt, strict=True):
        decayed += left((step - steps[0]) / (end - steps[0])) * update
    np.testing.assert_allclose(shares @ saved / shares.sum(), decayed, rtol=1e-13, atol=1e-13)
    assert min(shares) > 0


# Each step of the run sees two rows of three tokens.
@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        (["--tokens=36"], [10]),
        (["--tokens=37"], [4, 10]),
        (["--tokens=0.06K"], [2, 4, 10]),
        (["--tokens=7", "--tokens-per-step=1"], [4, 10]),
        (["--tokens=6M", "--tokens-per-step=1000000"], [10]),
    ],
)
def test_a_window_of_tokens(run, tmp_path, flags, taken):
    planned = command("merge", "--run", run, *flags, "--dry-run", "--json", tmp_path / "out")
    assert list(planned.json["weights"]) == [f"checkpoint-{step}" for step in taken]


@pytest.mark.parametrize(
    "windows", [["--last=1,2,3"], ["--tokens=36,37,60"]], ids=["last", "tokens"]
)
def test_several_windows_in_one_reading(run, tmp_path, monkeypatch, windows):
    readings, carried_out = [], Work.run

    def counted(*args, **more):
        readings.append(args)
        return carried_out(*args, **more)

    monkeypatch.setattr(Work, "run", counted)
    given = ("merge", "--run", run, *windows, "--weights=equal,linear", tmp_path / "out")
    ran = command(*given)
    assert len(readings) == 1
    name, _, values = windows[0].lstrip("-").partition("=")
    for window in values.split(","):
        for weights in ("equal", "linear"):
            alone = tmp_path / f"{window}-{weights}"
            command("merge", "--run", run, f"--{name}={window}", f"--weights={weights}", alone)
            out = tmp_path / "out" / f"{name}-{window}-{weights}"
            expected = (alone / "model.safetensors").read_bytes()
            assert (out / "model.safetensors").read_bytes() == expected
            assert f"{out.name}: checkpoint-" in words(ran.stdout).replace(" :", ":")
            assert command("verify", out, "--deep").code == 0
    assert "exists" in command(*given, code=2).stderr
    found = command(*given, "--overwrite", "--json").json["windows"]
    assert list(found.values())[:2] == [{"checkpoint-10": 1.0}] * 2


def test_several_windows_of_adapters(trained_adapter, tmp_path):
    given = ("merge", "--run", trained_adapter / "run", "--base", trained_adapter / "base")
    command(*given, "--last=2,3", "--as=adapter", tmp_path / "out")
    for last, rank in ((2, 4), (3, 6)):
        command(*given, f"--last={last}", "--as=adapter", tmp_path / f"{last}")
        own, alone = (tmp_path / "out" / f"last-{last}", tmp_path / f"{last}")
        assert json.loads((own / "adapter_config.json").read_text())["r"] == rank
        for name, factor in load_file(alone / "adapter_model.safetensors").items():
            assert torch.equal(load_file(own / "adapter_model.safetensors")[name], factor)


def test_a_window_that_fails_leaves_nothing(run, tmp_path):
    failed = command(
        "merge", "--run", run, "--last=1,2", "--max-memory=1MB", tmp_path / "out", code=2
    )
    assert "are allowed" in failed.stderr and not (tmp_path / "out").exists()


def test_the_dry_run_says_what_each_counts_for(run):
    given = ("merge", "--run", run, "--last=2", "--weights=step", "--dry-run")
    assert "weights checkpoint-4 0.4, checkpoint-10 1" in words(command(*given).stdout)
    assert command(*given, "--json").json["weights"] == {"checkpoint-4": 0.4, "checkpoint-10": 1.0}
    equal = command("merge", "--run", run, "--dry-run").stdout
    assert "weights 1 each" in words(equal)


def test_in_a_recipe_its_folder_is_relative_to_the_file(run, monkeypatch):
    file = run.parent / "recipe.yml"
    file.write_text("run: {folder: run, last: 2, weights: ema, decay: 0.5}\n")
    monkeypatch.chdir("/")
    recipe = load_recipe(file)
    assert [(name, e.weight) for name, e in recipe.experts.items()] == [
        ("checkpoint-4", 0.5),
        ("checkpoint-10", 1.0),
    ]
    assert {e.source for e in recipe.experts.values()} == {
        str(run / f"checkpoint-{step}") for step in (4, 10)
    }
    file.write_text("run: {folder: run}\nbase: org/base\nmethod: ties\n")
    recipe = load_recipe(file)
    assert (recipe.base, recipe.method, len(recipe.experts)) == ("org/base", "ties", 3)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("run: {folder: run, last: 4}", r"has 3 checkpoints \(checkpoint-2, .*last 4 are asked"),
        ("run: {folder: run, lasts: 2}", "r.yml:1: unknown key 'lasts' in run. Did you mean"),
        ("run: {folder: run, weights: ema}", "needs a 'decay'"),
        ("run: {folder: run, decay: 0.5}", "'decay' belongs to 'weights: ema'"),
        (
            "run: {folder: run, weights: ema, decay: 1.5}",
            "run.decay is 1.5; it must be less than 1",
        ),
        ("run: {last: 3}", "run lacks the key 'folder'"),
        ("run: run", "run is 'run'; it must be a mapping with the keys folder, last"),
        ("base: b\nexperts: {a: b}\nrun: {folder: run}", "r.yml:3: 'run' and 'experts' both"),
        ("run: {folder: nowhere}", "nowhere cannot be listed"),
        ("run: {folder: run/checkpoint-2}", "no folders named checkpoint-NUMBER"),
    ],
)
def test_what_is_refused_in_a_recipe(run, text, word):
    (run.parent / "r.yml").write_text(text)
    with pytest.raises((RecipeError, CheckpointError), match=word):
        load_recipe(run.parent / "r.yml")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--last=4"], "3 checkpoints"),
        (["--expert=a=b"], "--run and --expert both name experts"),
        (["--last=x"], "--last is 'x': give a whole number, or several"),
        (["--last=2,2"], "the window last-2 is asked for twice"),
        (["--last=1,2", "--tokens=9"], "'tokens' and 'last' both say"),
        (["--tokens=1Q"], "'1Q' is no number of tokens: write one such as 12000000000, or 12B"),
        (["--tokens=0"], "'0' is no number of tokens"),
        (["--weights=a=0.5"], "'equal', 'step', 'ema', 'linear', 'cosine' or '1-sqrt'"),
    ],
)
def test_what_is_refused_on_the_command_line(run, flags, word):
    failed = command("merge", "--run", run, *flags, run.parent / "out", code=2)
    assert word in words(failed.stderr)
    assert not (run.parent / "out").exists()


def test_flags_of_a_run_need_one():
    failed = command("merge", "--base=b", "--expert=a=b", "--weights=step", "out", code=2)
    assert "say --run DIR" in failed.stderr and "--weight NAME=NUMBER" in failed.stderr


def test_a_first_checkpoint_without_steps_has_no_weight_by_steps(run):
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-0")
    with pytest.raises(RecipeError, match=r"gives .*checkpoint-0 no weight"):
        parse_recipe({"run": {"folder": str(run), "weights": "step"}})
    assert len(parse_recipe({"run": {"folder": str(run)}}).experts) == 4


def killed_before_its_state(folder):
    (folder / "trainer_state.json").unlink()


def killed_within_its_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def killed_before_its_weights(folder):
    (folder / "model.safetensors").unlink()


def sharded(folder):
    build("llama").save_pretrained(folder, max_shard_size="10KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def without_a_shard(folder):
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def without_its_index(folder):
    sharded(folder)
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        killed_before_its_state,
        killed_within_its_weights,
        killed_before_its_weights,
        without_a_shard,
        without_its_index,
    ],
)
def test_a_checkpoint_that_was_killed_while_it_was_saved(run, damage):
    damage(run / "checkpoint-10")
    failed = command("merge", "--run", run, "--last=2", run.parent / "out", code=2)
    assert "checkpoint-10 is incomplete" in words(failed.stderr)
    assert not (run.parent / "out").exists()
    shutil.rmtree(run / "checkpoint-10")
    command("merge", "--run", run, "--last=2", run.parent / "out")


def test_shards_of_deepspeed_are_no_model(run):
    (run / "checkpoint-10" / "model.safetensors").unlink()
    (run / "checkpoint-10" / "global_step10").mkdir()
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        parse_recipe({"run": {"folder": str(run)}})


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = build("llama")
    base.save_pretrained(folder / "base")
    for seed, step in enumerate(STEPS):
        save_adapter(base, folder / "saved", seed=seed, targets=["q_proj", "down_proj"], r=2)
        shutil.move(folder / "saved" / "adapter", folder / "run" / f"checkpoint-{step}")
        shutil.move(folder / "saved" / "full", folder / "full" / f"checkpoint-{step}")
    return folder


@pytest.mark.parametrize("rank", [None, 2])
def test_adapters_of_a_run_are_averaged_as_adapters(trained_adapter, tmp_path, rank):
    flags = [] if rank is None else [f"--rank={rank}"]
    out = tmp_path / "out"
    ran = command(
        *("merge", "--run", trained_adapter / "run", "--base", trained_adapter / "base"),
        *("--as=adapter", "--weights=step", *flags, out),
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(trained_adapter / "base")
    start = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    assert json.loads((out / "adapter_config.json").read_text())["r"] == (rank or 6)
    assert ("rank 6, exact" in words(ran.stdout)) == (rank is None)
    each = {step: weights_of(trained_adapter / "full", step) for step in STEPS}
    adapted = [n for n in start if n.endswith(("q_proj.weight", "down_proj.weight"))]
    for name in adapted:
        mean = sum(step * (each[step][name] - start[name]).double() for step in STEPS) / sum(STEPS)
        error = torch.linalg.matrix_norm(merged[name] - start[name] - mean, 2)
        lost = 0.0 if rank is None else float(torch.linalg.svdvals(mean)[rank])
        assert abs(error - lost) < 1e-6, name
    assert len(adapted) == 4


def test_adapters_of_a_run_need_the_base_that_they_are_of(trained_adapter, tmp_path):
    failed = command("merge", "--run", trained_adapter / "run", tmp_path / "out", code=2)
    assert "is an adapter" in failed.stderr and "give one" in failed.stderr
