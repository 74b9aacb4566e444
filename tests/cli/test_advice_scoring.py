"""What `covmerge compare --score` advises, followed to a score."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from covmerge.errors import CheckFailed, CovmergeError, InputError
from covmerge.run.scoring import lm_eval
from covmerge.run.scoring.files import read_columns
from covmerge.run.scoring.scorer import Command, scorer_of
from covmerge.run.scoring.values import scores_of
from tests.advised import advice
from tests.cli.runs import covmerge, flags, words
from tests.e2e.following import told
from tests.statistics.models import save

HALF = f"{sys.executable} your_eval.py {{model}}"


@pytest.fixture
def asked(models, monkeypatch):
    monkeypatch.chdir(models)
    (models / "your_eval.py").write_text("print(0.5)")
    return ["compare", *flags(models), "--methods", "average", "--out", "out"]


def check(*args):
    ran = covmerge(*args, "--score", HALF, "--json")
    assert ran.json["scores"]["scores"]["average"]["score"]["value"] == 0.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("no-such {model}", advice("there is no program {}: name one that is installed, or its")),
        ("python 'a {model}", advice("cannot be split into words ({}): correct its quotes")),
    ],
)
def test_a_command(wrong, said, asked):
    told(said, *asked, "--score", wrong)
    check(*asked)


def test_scores_that_were_not_asked_for(asked):
    """The flags that the table advises, without a folder of models and with one."""
    for args in (asked[:-2], asked):
        said = words(covmerge(*args).stdout)
        found = re.search(advice("not known without scores. To have them, add {} to this"), said)
        assert found and re.search(advice("{} --score 'python your_eval.py {model}'"), said)
        more = re.search(r"add (.*?) --score", said)[1]
        check(*args, *more.replace("DIR", "new").split())


def test_a_program_that_fails(asked):
    script = Path("your_eval.py")
    script.write_text("raise SystemExit(3)")
    said = advice("could not be scored: see above. Mend what scores them, and run again with --res")
    told(said, *asked, "--score", HALF, code=1)
    script.write_text("print(0.5)")
    check(*asked, "--resume")


def test_an_interrupted_run(asked, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Command, "score", stop)
        ran = covmerge(*asked, "--score", HALF, code=130)
    assert re.search(advice("run again with --resume, which {}"), words(ran.stderr))
    assert "which takes the scores that are known" in words(ran.stderr)
    check(*asked, "--resume")


def test_a_folder_that_holds_no_comparison(asked):
    covmerge("merge", *asked[1:4], "a-model")
    said = advice("{} holds one model, and no comparison: name another folder")
    told(said, *asked[:-1], "a-model", "--score", HALF, "--resume")
    check(*asked[:-1], "another", "--resume")


def test_a_comparison_of_another_version(asked, models):
    check(*asked)
    manifest = models / "out" / "covmerge.json"
    content = json.loads(manifest.read_text())
    del content["comparison"]["left_out"]
    manifest.write_text(json.dumps(content))
    said = advice("{} was written by another version: pass --overwrite to merge anew")
    told(said, *asked, "--score", HALF, "--resume")
    check(*asked, "--overwrite")


def test_a_method_that_is_left_out_is_named(asked):
    """A method of another number of experts could not be: it has its own reason."""
    ran = covmerge(*asked[:-4], "--json")
    said = advice("sees the models' weights and not their updates: name it to have it compared")
    left = [name for name, why in ran.json["left_out"].items() if re.search(said, why)]
    ran = covmerge(*asked[:-3], ",".join(left), "--json")
    assert [row["method"] for row in ran.json["methods"]] == left and "nuslerp" in left


COLUMNS = [("text", "label"), ("text",)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("text\né".encode("latin-1"), advice("{} is no text in UTF-8: convert it")),
        (b"words\na b", advice("{} has {}: name its columns {}")),
        (b"", advice("{} has {}: name its columns {}")),
        (b"text,label\na", advice("{} has rows without {}: complete them")),
    ],
)
def test_a_file_of_examples(wrong, said, tmp_path):
    file = tmp_path / "test.csv"
    file.write_bytes(wrong)
    with pytest.raises(InputError, match=said):
        read_columns(file, COLUMNS)
    file.write_text("text,label\né,1")
    assert read_columns(file, COLUMNS) == {"text": ["é"], "label": ["1"]}


def test_a_text_of_one_token(tmp_path):
    model, file = save("llama", tmp_path / "model"), tmp_path / "test.csv"
    file.write_text("text\na\na b\n")
    scorer = scorer_of(f"transformers:{file}")
    with pytest.raises(CheckFailed, match=advice("has fewer than two tokens: leave it out")):
        scorer.score(model)
    file.write_text("text\na b\n")
    assert scorer.score(model)["test"].value < 0


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        (3, HALF, advice("is no scorer: pass a command with {model} in it, or a function of a")),
        (3, len, advice("is no scorer: pass a command with {model} in it, or a function of a")),
        (
            "transformers:",
            "transformers:test.csv",
            advice("--score {}: does not say what to score on: write {}:{}"),
        ),
    ],
)
def test_a_scorer(wrong, right, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.csv").write_text("text\na b")
    with pytest.raises(CovmergeError, match=said):
        scorer_of(wrong).check()
    scorer_of(right).check()


def test_a_package_of_a_scorer(tmp_path, monkeypatch):
    file = tmp_path / "test.csv"
    file.write_text("text\na b")
    with monkeypatch.context() as hidden:
        hidden.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(InputError, match=advice("--score {}: needs a package: pip install {}")):
            scorer_of(f"transformers:{file}")
    scorer_of(f"transformers:{file}").check()


def test_a_name_of_a_task():
    with pytest.raises(InputError, match=advice("names a task {}: name tasks by short texts")):
        scores_of({"x" * 300: 1.0}, "it")
    assert scores_of({"x": 1.0}, "it")["x"].value == 1.0


TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: none.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: [a, b]
doc_to_target: label
"""


def test_tasks_of_lm_eval(tmp_path):
    """Their names and folder; what is found of them is lm-eval's."""
    own, more = tmp_path / "own", tmp_path / "more"
    for folder in (own, more):
        folder.mkdir()
        (folder / "mine.yaml").write_text(TASK)
    said = advice("name tasks, and one folder with definitions of your own at most")
    for wrong in ([str(own)], [str(own), str(more), "mine"]):
        with pytest.raises(InputError, match=said):
            lm_eval.by_tasks(wrong)
    lm_eval.by_tasks([str(own), "mine"]).check()
    said = advice("{} is no folder: name one that holds definitions of tasks")
    with pytest.raises(InputError, match=said):
        lm_eval.task_manager(["mine"], tmp_path / "nowhere")
    lm_eval.task_manager(["mine"], own)
    found = {"results": {"text": {"alias": "text"}, "mine": {"acc,none": 0.5}}}
    with pytest.raises(CheckFailed, match=advice("found no number for {}: choose other tasks")):
        list(lm_eval._scores({"results": {"text": found["results"]["text"]}}, ["text"]))
    assert [score.value for _, score in lm_eval._scores(found, ["mine"])] == [0.5]


def test_an_adapter_for_lm_eval(tmp_path):
    config = tmp_path / "adapter_config.json"
    config.write_text("{}")
    said = advice("{} names no base: put its folder under 'base_model_name_or_path'")
    with pytest.raises(InputError, match=said):
        lm_eval._model_arguments(tmp_path)
    config.write_text('{"base_model_name_or_path": "base"}')
    assert lm_eval._model_arguments(tmp_path) == {"pretrained": "base", "peft": str(tmp_path)}
