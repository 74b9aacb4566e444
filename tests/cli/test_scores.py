"""`covmerge compare --score`: what is run, what is printed, kept and written, and how it ends."""

import csv
import io
import json
import re
import shlex
import sys
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge as covmerge_package
from covmerge.errors import CheckFailed, InputError
from covmerge.run.scoring.job import outcomes
from covmerge.run.scoring.scorer import Command
from tests.advised import advice
from tests.cli.runs import covmerge, flags, words

EVALUATOR = """
import json, sys
from pathlib import Path
model = Path(sys.argv[1])
with open({log!r}, "a") as log:
    log.write(model.name + "\\n")
if model.name in {failing!r}.split():
    sys.exit("no such metric\\nValueError: broken by " + model.name)
right = len(model.name)
print("loading")
print(json.dumps({{"sts": [example < right for example in range(20)], "nli": right / 10}}))
"""
METHODS = ("--methods", "average,ties,iso_c")


def evaluator(folder, failing=""):
    """A script that scores a model by the length of its name, and the command that runs it."""
    script, log = folder / "eval it.py", folder / "log"
    script.write_text(EVALUATOR.format(log=str(log), failing=failing))
    return f"{sys.executable} {shlex.quote(str(script))} {{model}}"


def scored(folder):
    """The models that were put to the script, in order."""
    log = (folder / "log").read_text("utf-8").split()
    (folder / "log").write_text("")
    return log


def test_methods_by_tasks(models):
    out = models / "a study; $(touch x)"
    asked = ["compare", *flags(models), *METHODS, "--out", out, "--score", evaluator(models)]
    ran = covmerge(*asked)
    said = words(ran.stdout)
    assert "model sts nli mean" in said
    assert "average 0.350 [0.150, 0.550] 0.700 0.525" in said  # 7 of 20; no interval of a number
    assert "best average, 0.525; next is iso_c, 0.375" in said
    assert scored(models) == ["average", "ties", "iso_c"]
    rows = list(csv.DictReader(io.StringIO((out / "scores.csv").read_text("utf-8"))))
    assert [(row["model"], row["sts"], row["nli"]) for row in rows] == [
        ("average", "0.35", "0.7"),
        ("ties", "0.2", "0.4"),
        ("iso_c", "0.25", "0.5"),
    ]
    tex = (out / "scores.tex").read_text("utf-8")
    assert r"iso\_c & 0.250 {\scriptsize [" in tex and r"\textbf{0.700}" in tex
    assert "of the examples, 20 of sts.\n" in tex
    assert not (models / "x").exists()


def test_scores_are_kept_by_model_and_command(models):
    out = models / "out"
    asked = ["compare", *flags(models), "--out", out]
    score = ["--score", evaluator(models, failing="ties")]
    ran = covmerge(*asked, *METHODS, *score, code=1)
    assert scored(models) == ["average", "ties", "iso_c"]
    assert "error: ties was not scored: `" in ran.stderr and "ended with 1" in ran.stderr
    assert "  ValueError: broken by ties" in ran.stderr
    assert "iso_c" in ran.stdout
    # What the message advises: the failed one alone is scored again.
    covmerge(*asked, *METHODS, *score, "--resume", code=1)
    assert scored(models) == ["ties"]
    # Another script of the same name scores all anew; a merge anew of the same bytes keeps scores.
    score = ["--score", evaluator(models)]
    covmerge(*asked, *METHODS, *score, "--resume")
    assert len(scored(models)) == 3
    covmerge(*asked, "--methods", "average,ties,ties(density=0.5)", code=2)
    more = ["--methods", "average,iso_c,task_arithmetic"]
    ran = covmerge(*asked, *more, *score, "--resume", code=2)
    assert re.search(
        advice("{} holds models of other experts or methods: pass --overwrite"), ran.stderr
    )
    ran = covmerge(*asked, *more, *score, "--overwrite")
    assert scored(models) == ["task_arithmetic"]
    kept = advice("if what they read changed, delete {} and score again")
    assert re.search("scores of average, iso_c are of an earlier run.*" + kept, words(ran.stdout))
    (out / "scores.json").unlink()
    ran = covmerge(*asked, *more, *score, "--resume")
    assert len(scored(models)) == 3 and "earlier run, as the scorer" not in words(ran.stdout)


def test_a_run_that_scores_nothing_leaves_no_table_of_an_earlier_one(models):
    out = models / "out"
    asked = ["compare", *flags(models), "--methods", "average", "--out", out]
    covmerge(*asked, "--score", evaluator(models))
    assert (out / "scores.csv").is_file() and (out / "scores.tex").is_file()
    covmerge(*asked, "--score", evaluator(models, failing="average"), "--resume", code=1)
    assert not (out / "scores.csv").exists() and not (out / "scores.tex").exists()


def test_base_and_experts(models):
    for name in ("base", "a"):
        (models / f"{name}-folder").mkdir()
        (models / f"{name}-folder" / "config.json").write_text("{}")
        (models / f"{name}.safetensors").rename(models / f"{name}-folder" / "model.safetensors")
    ran = covmerge(
        *("compare", "--base", models / "base-folder", "--expert", f"a={models / 'a-folder'}"),
        *("--expert", f"b={models / 'b.safetensors'}", "--methods", "average", "--bounds"),
        *("--out", models / "out", "--score", evaluator(models), "--json"),
    )
    assert list(ran.json["scores"]["scores"]) == ["base", "expert a", "average"]
    said = advice(
        "put a file into a folder of its own as model.safetensors, or save a model in memory"
    )
    assert any(re.match(f"not scored: expert b. .*{said}", note) for note in ran.json["notes"])
    assert ran.json["recommended"] == "average"  # of the methods, though "base" scores higher
    assert scored(models) == ["base-folder", "a-folder", "average"]
    # What the note advises; no file says what the model is, as in the merges.
    (models / "b-folder").mkdir()
    (models / "b.safetensors").rename(models / "b-folder" / "model.safetensors")
    (models / "base-folder" / "config.json").unlink()
    ran = covmerge(
        *("compare", "--base", models / "base-folder", "--expert", f"b={models / 'b-folder'}"),
        *("--expert", f"a={models / 'a-folder'}", "--methods", "average", "--bounds"),
        *("--out", models / "second", "--score", evaluator(models)),
    )
    assert scored(models) == ["base-folder", "b-folder", "a-folder", "average"]
    assert "note no merge is as good: base has 0.825, expert b has" in words(ran.stdout)
    *_, bounds, merges = (models / "out" / "scores.tex").read_text("utf-8").split(r"\midrule")
    assert r"\textbf" not in bounds and r"\textbf" in merges  # no merge is to beat an expert


def test_without_scores_nothing_is_recommended(models):
    ran = covmerge("compare", *flags(models), *METHODS)
    assert "best not known without scores" in words(ran.stdout)
    assert (
        json.loads(covmerge("compare", *flags(models), *METHODS, "--json").stdout)["recommended"]
        is None
    )


def test_what_messages_of_commands_advise(models):
    """Each next step is followed: `{model}` is written, and a shell is called that gets the folder."""
    (models / "eval.py").write_text("import sys; print('loaded', sys.argv[1]); print(0.5)")
    program = f"{sys.executable} {models}/eval.py"
    asked = ["compare", *flags(models), "--methods", "average", "--out", models / "an out"]
    called = f"sh -c '{program} \"$1\" | tail -n 1' sh {{model}}"
    steps = [
        (
            program,
            advice("does not say where the model's folder goes: write {} there, as in"),
            None,
        ),
        (
            f"{program} {{model}} | tail -n 1",
            advice("and no shell runs it: call one, as in"),
            called,
        ),
        (
            f"sh -c '{program} {{model}}'",
            advice("interpret the folder's name: pass it to the script"),
            called,
        ),
    ]
    for wrong, said, right in steps:
        ran = covmerge(*asked, "--score", wrong, "--overwrite", code=2)
        assert re.search(said, words(ran.stderr))
        right = right or f"{program} {{model}}"
        ran = covmerge(*asked, "--score", right, "--overwrite", "--json")
        assert ran.json["scores"]["scores"]["average"]["score"]["value"] == 0.5
    ran = covmerge(*asked[:-2], "--score", program + " {model}", code=2)
    assert re.search(advice("scores are of models in a folder: pass --out DIR"), words(ran.stderr))


def test_a_function_scores_in_python(models):
    sources = {name: models / f"{name}.safetensors" for name in ("base", "a", "b")}
    asked = []

    def score(folder):
        asked.append(folder.name)
        if folder.name == "ties":
            raise ValueError("no such thing")
        return {"one": [1, 0], "two": [True, True]}

    base = sources.pop("base")
    methods = ["average", "ties"]
    for resume in (False, True):  # nobody knows what a function depends on: it is called again
        with pytest.warns(UserWarning, match="ties was not scored: ValueError: no such thing"):
            found = covmerge_package.compare(
                base, sources, methods, models / "out", score=score, resume=resume
            )
    assert asked == 2 * methods
    assert found.recommended == "average"
    assert found.scores.failed == {"ties": "ValueError: no such thing"}
    (row,) = found.scores.rows
    assert found.scores.value(row, "mean") == 0.75


def test_arrays_and_tensors_are_scores(models):
    sources = {name: models / f"{name}.safetensors" for name in ("base", "a", "b")}

    def score(folder):
        return {"one": np.array([1, 0]), "two": torch.tensor([1.0, 1.0]), "three": np.float32(0.25)}

    base = sources.pop("base")
    found = covmerge_package.compare(base, sources, ["average"], models / "out", score=score)
    (row,) = found.scores.rows
    assert row.scores["one"].examples == (1.0, 0.0)
    assert found.scores.value(row, "mean") == pytest.approx((0.5 + 1 + 0.25) / 3)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("python 'eval.py {model}", "cannot be split into words"),
        ("no-such-program {model}", "there is no program 'no-such-program'"),
        ("transformers:", "does not say what to score on"),
        ("transformers:missing.csv", "missing.csv cannot be read"),
    ],
)
def test_what_is_no_scorer(models, score, message):
    before = sorted(models.iterdir())
    asked = ["compare", *flags(models), *METHODS, "--out", models / "out", "--score", score]
    assert message in words(covmerge(*asked, code=2).stderr)
    assert sorted(models.iterdir()) == before


def test_a_resume_takes_no_changed_model(models):
    """Neither a model that was changed since, nor models of an expert that was."""
    out = models / "out"
    asked = ["compare", *flags(models), "--methods", "average,ties", "--out", out, "--bounds"]
    asked += ["--score", evaluator(models), "--resume"]
    covmerge(*asked)
    assert scored(models) == ["average", "ties"]
    remains = models / ".out.covmerge-partial"
    remains.mkdir()  # of a kill as it cleaned up
    covmerge(*asked)
    assert scored(models) == [] and not remains.exists()
    for changed, said in (
        (
            out / "ties" / "model.safetensors",
            advice(". Pass --overwrite to merge anew, where scores of equal"),
        ),
        (
            models / "b.safetensors",
            advice("changed since the models in {} were merged: pass --overwrite"),
        ),
    ):
        tensors = load_file(changed)
        save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, changed)
        ran = covmerge(*asked, code=2)
        assert re.search(said, words(ran.stderr))
        covmerge(*asked[:-1], "--overwrite")
        covmerge(*asked)
    assert scored(models) == ["average", "ties"]  # of the new expert; the bytes were as before


PRINTED = """
import json, sys
print(json.dumps({{"average": {one}, "ties": {other}}}[sys.argv[1].rpartition("/")[2]]))
"""


@pytest.mark.parametrize(
    ("one", "other", "values", "said"),
    [
        ("float('nan')", 0.5, {"score": None}, "note average has no finite score of score"),
        ("[1, float('inf'), 0]", "[1, 0, 1]", {"score": None}, "best ties, 0.667"),
        ("10**400", "{'score': [1e308, 1e308]}", {"score": None}, "best not known"),
        ("{'a': 0.5}", "{'b': 0.5}", {"a": 0.5, "b": None, "mean": None}, "best not known"),
        ("[1, 0]", "[1, 0, 1]", {"score": 0.5}, "different numbers of examples (2 to 3)"),
        (
            "{'mean': 0.1, 'seconds': 0.3}",
            "{'mean': 0.2, 'seconds': 0.3}",
            {"mean": 0.1, "seconds": 0.3, "covmerge's mean": 0.2},
            "best ties, 0.250",
        ),
    ],
)
def test_odd_scores(models, one, other, values, said):
    """None ends the run, hides another model's score, or passes for a score."""
    (models / "eval.py").write_text(PRINTED.format(one=one, other=other))
    asked = ["compare", *flags(models), "--methods", "average,ties", "--out", models / "out"]
    asked += ["--score", f"{sys.executable} {models}/eval.py {{model}}"]
    ran = covmerge(*asked)
    assert said in words(ran.stdout) and "files " in words(ran.stdout)
    again = covmerge(*asked, "--resume", "--json")
    found = again.json["scores"]["scores"]["average"]
    assert {name: cell["value"] for name, cell in found.items()} == pytest.approx(values)
    (row, _) = csv.DictReader(io.StringIO((models / "out" / "scores.csv").read_text("utf-8")))
    assert {n: float(row[n]) for n, v in values.items() if v is not None} == pytest.approx(
        {n: v for n, v in values.items() if v is not None}
    )


def test_a_score_is_of_the_files_in_the_command(models):
    """Also those that follow a flag's equals sign; a word too long for a name is no file."""
    program = "import sys; print(open(sys.argv[2][7:]).read())" + "#" * 300
    asked = ["compare", *flags(models), "--methods", "average", "--out", models / "out", "--json"]
    asked += ["--score", f"{sys.executable} -c '{program}' {{model}} --data={models / 'test'}"]
    for value, flag in (("0.1", ()), ("0.9", ("--resume",))):
        (models / "test").write_text(value)
        found = covmerge(*asked, *flag).json["scores"]["scores"]["average"]
        assert found["score"]["value"] == float(value)


def test_scores_that_are_no_scores(models):
    asked = ["compare", *flags(models), "--methods", "average", "--out", models / "out"]
    asked += ["--score", evaluator(models), "--resume"]
    covmerge(*asked)
    kept = models / "out" / "scores.json"
    for content in ("{", '{"scores": {"a": {"seconds": "q", "tasks": {}}}}'):
        kept.write_text(content)
        assert re.search(
            advice("{} holds no scores of covmerge: move it away"),
            words(covmerge(*asked, code=2).stderr),
        )
    kept.rename(models / "away")
    covmerge(*asked)


def test_bounds_without_scores(models):
    asked = ["compare", *flags(models), "--methods", "average", "--bounds"]
    said = words(covmerge(*asked, code=2).stderr)
    assert re.search(advice("{} is for scores: pass --score too, or leave it out"), said)
    covmerge(*asked, "--score", evaluator(models), "--out", models / "out")
    covmerge(*asked[:-1])


MEETING = """
import os, sys, time
from pathlib import Path
place = Path(sys.argv[0]).parent
(place / f"here-{os.environ['COVMERGE_SCORER']}").touch()
until = time.monotonic() + 60
while time.monotonic() < until and len([*place.glob("here-*")]) < 2:
    time.sleep(0.01)
print(len([*place.glob("here-*")]))
"""


def test_several_models_are_scored_at_once(models):
    """Each of two commands waits for the other; their numbers tell them apart."""
    (models / "meeting.py").write_text(MEETING)
    score = ("--score", f"{sys.executable} {models / 'meeting.py'} {{model}}", "--scorers", "2")
    ran = covmerge("compare", *flags(models), *METHODS, "--out", models / "out", *score, "--json")
    assert [row["score"]["value"] for row in ran.json["scores"]["scores"].values()] == [2, 2, 2]
    assert list(ran.json["scores"]["scores"]) == ["average", "ties", "iso_c"]


def test_what_is_advised_of_several_scorers(models):
    asked = ["compare", *flags(models), "--methods", "average", "--scorers", "2"]
    ran = covmerge(*asked, code=2)
    assert re.search(advice("{} is for scores: pass --score too, or leave it out"), ran.stderr)
    covmerge(*asked, "--out", models / "out", "--score", evaluator(models))
    with pytest.raises(InputError, match=advice("model after the other: leave out --scorers")):
        covmerge_package.compare(
            models / "base.safetensors",
            [models / "a.safetensors"],
            ["average"],
            models / "second",
            score=lambda model: 0.5,
            scorers=2,
        )


def test_an_interruption_ends_commands_of_other_threads(tmp_path):
    """Else whoever interrupts would wait for a command that takes no notice."""
    script = 'trap "" INT; case "$1" in *long) exec sleep 3600;; esac; echo 1'
    scorer = Command(f"sh -c {shlex.quote(script)} sh {{model}}")
    found = outcomes(scorer, [tmp_path / "short", tmp_path / "long"], 2)
    assert next(found).scores is not None
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    assert not scorer._running


def test_an_interruption_ends_a_command_that_another_thread_was_starting():
    stopped = Event()
    stopped.set()
    with pytest.raises(CheckFailed, match="was ended by signal 9"):
        Command("sleep {model}").score(Path("3600"), stopped=stopped)
