import json
import subprocess
import sys
from collections import Counter

import pytest
import safetensors.torch
import torch

from covmerge.errors import InputError
from covmerge_lab.heads import classifier
from covmerge_lab.run import open_suite
from covmerge_lab.suite import Variant
from covmerge_lab.text import TextSuite, tasks
from covmerge_lab.text.corpora import Example
from tests.cli.runs import covmerge

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def test_a_group_is_wholly_in_training_or_in_testing(tmp_path):
    def read(cache):
        for number in range(900):
            yield Example(f"text {number}", str(number % 3), group=f"group {number // 3}")

    task = tasks.build(tasks.TaskSpec("t", "about", read, 1000, 1000), tmp_path)
    group_of = {f"text {number}": number // 3 for number in range(900)}
    parts = [{group_of[t] for t in part.texts} for part in (task.train, task.validation, task.test)]
    assert len(task.test.texts) == 400 and len(task.validation.texts) == 100
    # A group may be cut off at the end of a part; it never goes on in another.
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    path = tmp_path / "tasks" / "t.json"
    tasks.save(task, path)
    assert tasks.load(path) == task


def test_a_text_with_two_labels_is_left_out(tmp_path):
    def read(cache):
        for number in range(700):
            yield Example(f"text {number}", "a", str(number))
            yield Example(f"TEXT {number}", "b" if number % 7 == 0 else "a", str(number))

    task = tasks.build(tasks.TaskSpec("t", "about", read, 1000, 1000), tmp_path)
    assert task.labels == ("a",)
    assert len(task.train.texts) + len(task.validation.texts) + len(task.test.texts) == 600


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    made = TextSuite(tmp_path_factory.mktemp("cache"), quick=True)
    made.prepare(lambda done, total: None)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_expert_is_trained_once_and_scored(suite, kind):
    variant = Variant(kind, 0)
    told = []
    assert suite.train("sentiment", variant, lambda *step: told.append(step)) > 0
    assert told[-1] == (5, 5)
    expert = suite.expert("sentiment", variant)
    stamp = (expert / "training.json").stat().st_mtime_ns
    assert suite.train("sentiment", variant, lambda *step: None) is None
    assert (expert / "training.json").stat().st_mtime_ns == stamp
    weight, bias = classifier(expert)
    assert weight.shape == (2, 384) and bias.shape == (2,)
    scores = suite.score("sentiment", "test", suite.base, expert)
    assert len(scores) == 32 and set(scores) <= {0.0, 1.0}
    (batch,) = suite.inputs("sentiment", 8)
    assert set(batch) >= {"input_ids", "attention_mask"} and len(batch["input_ids"]) == 8


@pytest.mark.slow
def test_other_seeds_share_nothing_random(suite):
    """Adapters of one seed would share their random `lora_A`."""
    for seed, task in ((0, "sentiment"), (0, "places"), (1, "places")):
        suite.train(task, Variant("lora", seed), lambda *step: None)
    stored = [
        safetensors.torch.load_file(suite.expert(task, variant) / "adapter_model.safetensors")
        for task, variant in (
            ("sentiment", Variant("lora", 0)),
            ("places", Variant("lora", 0)),
            ("places", Variant("lora", 1)),
        )
    ]
    name = next(name for name in stored[0] if "lora_A" in name)
    factors = [tensors[name].flatten() for tensors in stored]
    for one, other in ((0, 1), (1, 2)):
        cosine = torch.nn.functional.cosine_similarity(factors[one], factors[other], dim=0)
        assert abs(cosine) < 0.1


@pytest.mark.slow
@pytest.mark.nightly
def test_bench_from_the_command_line(suite, tmp_path):
    command = [sys.executable, "-m", "covmerge", "bench", "text", "--quick", "--seeds", "1"]
    options = ["--methods", "ace,average,regmean,emr", "--out", tmp_path / "out"]
    ran = subprocess.run(
        [*command, *options, "--cache", suite.cache], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [group["kind"] for group in results["groups"]] == ["full", "lora"]
    for group in results["groups"]:
        titles = {row["title"] for row in group["rows"]}
        wanted = {"ace", "ace eps=0.01", "average", "regmean", "emr"}
        assert wanted < titles
    assert results["command"] == (
        "covmerge bench text --seeds 1 --methods ace,average,regmean,emr --quick"
    )
    pictures = [f"{what}-{kind}-2.png" for what in ("accuracy", "tasks") for kind in suite.kinds]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("results.json", "README.md", "experts.yml", *pictures)
    }
    assert not list((suite.folder / "work").iterdir())
    # The same table by `compare --score`.
    score = f"{sys.executable} -m covmerge bench text --quick --kind full --cache {suite.cache}"
    found = covmerge(
        *("compare", tmp_path / "out" / "experts.yml", "--methods", "average,ace"),
        *("--out", tmp_path / "study", "--score", f"{score} --score {{model}}", "--json"),
    ).json["scores"]["scores"]
    accuracy = {row["title"]: row["accuracy"] for row in results["groups"][0]["rows"]}
    for method, scores in found.items():
        for task, right in accuracy[method].items():
            assert scores[task]["value"] == pytest.approx(right), (method, task)


def test_as_many_experts_as_are_asked_for(tmp_path):
    assert len(TextSuite(tmp_path).tasks) == 8
    assert [len(names) for names in TextSuite(tmp_path).subsets] == [8]
    many = TextSuite(tmp_path, counts=(2, 16))
    assert [len(names) for names in many.subsets] == [2, 16]
    # More tasks change nothing about the training of the first.
    assert list(many.tasks)[:8] == list(TextSuite(tmp_path).tasks)
    assert len(TextSuite(tmp_path, quick=True, counts=(16,)).tasks) == 2
    assert all(len(set(spec.name for spec in tasks.SPECS[:n])) == n for n in (8, 16))
    assert open_suite("text", tmp_path, counts=(3,)).subsets == (tuple(many.tasks)[:3],)
    for counts in ((17,), (1,)):
        with pytest.raises(InputError, match="'text' has 16 tasks, and a merge takes two or more"):
            open_suite("text", tmp_path, counts=counts)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("spec", tasks.SPECS[8:], ids=lambda spec: spec.name)
def test_further_tasks_can_be_told(spec, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "packages-of-text"
    try:
        task = tasks.build(spec, cache)
    except InputError as unreachable:
        pytest.skip(str(unreachable))
    assert len(task.test.texts) == 400 and len(task.train.texts) > 1000
    counts = Counter(task.test.labels)
    assert len(task.labels) > 2 and max(counts.values()) < 200  # no label is half of the answers
    assert set(task.test.labels) <= set(range(len(task.labels)))
    assert not {t.casefold() for t in task.train.texts} & {t.casefold() for t in task.test.texts}
