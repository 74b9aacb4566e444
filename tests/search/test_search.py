"""A search, from a recipe with marks to the best recipe and its model: on tensors of a few numbers."""

import json
import os
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.base.errors import CheckFailed, InputError, RecipeError
from tests.advised import advice
from tests.cli.runs import covmerge as run
from tests.cli.runs import words
from tests.forked import Forked, printed
from tests.held import COMMAND_LINE, wait_until

optuna = pytest.importorskip("optuna")  # the extra `search`
NAMES = ("fc.weight", "proj.weight")
SHARES = {"a": 0.9, "b": 0.3}  # of the updates in the model that the scorer wants


@pytest.fixture
def models(tmp_path):
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(12, 16, generator=draw) for name in NAMES}
    experts = {
        e: {n: w + 0.1 * torch.randn(w.shape, generator=draw) for n, w in base.items()}
        for e in "ab"
    }
    for name, own in {"base": base, **experts}.items():
        (tmp_path / name).mkdir()
        save_file(own, tmp_path / name / "model.safetensors")
    wanted = {
        n: w + sum(share * (experts[e][n] - w) for e, share in SHARES.items())
        for n, w in base.items()
    }
    save_file(wanted, tmp_path / "wanted.safetensors")
    return tmp_path


def recipe(models, **more):
    experts = {e: {"source": str(models / e), "weight": {"search": [0, 1.5]}} for e in "ab"}
    found = {"base": str(models / "base"), "experts": experts, "method": "task_arithmetic"}
    return {**found, "parameters": {"scale": {"search": [0.3, 1.5, "log"]}}, **more}


def closeness(models):
    """A scorer: how near a model is to the wanted one, in 24 parts."""
    wanted = load_file(models / "wanted.safetensors")

    def near(folder):
        found = load_file(folder / "model.safetensors")
        away = torch.cat([(found[n] - wanted[n]).flatten() for n in NAMES])
        return {"near": [-float(part.square().sum()) for part in away.chunk(24)]}

    return near


def test_tokenizers_are_read_once(models, monkeypatch):
    read = []

    def counted(*folders):
        read.append(folders)
        return iter(())

    monkeypatch.setattr("covmerge.run.sources.check_tokenizers", counted)
    covmerge.search(recipe(models), closeness(models), models / "out", trials=8)
    assert len(read) == 1


def test_finds_the_weights(models):
    out = models / "out"
    found = covmerge.search(recipe(models), closeness(models), out, trials=24)
    best = found.best
    scale = best.chosen["parameters.scale"]
    shares = {e: scale * best.chosen[f"experts.{e}.weight"] for e in "ab"}
    assert all(abs(shares[e] - SHARES[e]) < 0.4 for e in "ab")
    assert found.gain["seen"].low > 0 and found.gain["held out"].low > 0
    # The recipe beside it makes the model beside it; the sampler's is what a merge alone makes.
    written = covmerge.load_recipe(out / "best.yml")
    alone = covmerge.run_recipe(written, None).tensors
    stored = load_file(out / "best" / "model.safetensors")
    assert all(torch.equal(alone[n], stored[n]) for n in NAMES)
    assert covmerge.verify(out / "best").ok
    by_hand = closeness(models)(out / "best")["near"]
    seen, held_out = found.seen, found.held_out
    row = next(r for r in seen.rows if r.label == best.label)
    other = next(r for r in held_out.rows if r.label == best.label)
    both = (*row.scores["near"].examples, *other.scores["near"].examples)
    assert sorted(both) == pytest.approx(sorted(by_hand))
    assert {p.name for p in out.iterdir()} == {"best", "best.yml", "search.db", "trials.csv"}
    table = found.table()
    assert len(table.rows) == 25 and table.rows[0][0] == "no trial"
    assert (out / "trials.csv").read_text("utf-8") == table.csv()
    json.dumps(found.as_json())
    # Optuna's own reader finds the trials.
    study = optuna.load_study(study_name="covmerge", storage=f"sqlite:///{out / 'search.db'}")
    assert [t.params for t in study.trials] == [dict(t.chosen) for t in found.trials]
    assert not any(t.system_attrs for t in study.trials)  # which Optuna would unpickle
    study._storage._backend.engine.dispose()


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "iso_c", "tsv_m"])
def test_choices_merged_in_one_reading_are_those_merged_alone(models, method):
    """Choices have weights of their own, also where they share what they read."""
    merged = []

    def keep(folder):
        merged.append(load_file(folder / "model.safetensors"))
        return 0.0

    asked = recipe(models, method=method)
    found = covmerge.search(asked, keep, models / "out", trials=4, together=4)
    for trial, tensors in zip(found.trials, merged[1:], strict=True):
        own = {e: trial.chosen[f"experts.{e}.weight"] for e in "ab"}
        alone = covmerge.merge(
            asked["base"],
            {e: models / e for e in "ab"},
            method,
            weights=own,
            scale=trial.chosen["parameters.scale"],
        )
        assert all(torch.equal(alone.tensors[n], tensors[n]) for n in NAMES)


def test_a_weight_of_nothing_is_read_by_itself(models):
    asked = recipe(models)
    asked["experts"]["a"]["weight"] = {
        "by_name": [{"match": "fc.*", "value": {"search": [0, 0.5, 1]}}]
    }
    found = covmerge.search(asked, closeness(models), models / "out", trials=6, together=6)
    assert 0 in {t.chosen["experts.a.weight.by_name[0].value"] for t in found.trials}
    assert [t.failed for t in found.trials] == [None] * 6


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_goes_on_as_if_it_had_not_stopped(models, sampler):
    """Stopped in the middle of what is merged together; the sampler is told all of it again."""
    score, scored = closeness(models), []

    def stopping(folder):
        scored.append(folder.name)
        if len(scored) == 8:
            raise KeyboardInterrupt
        return score(folder)

    with pytest.raises(KeyboardInterrupt):
        covmerge.search(recipe(models), stopping, models / "x", trials=12, sampler=sampler)
    with pytest.raises(
        InputError, match=advice("{} holds a search already: pass --resume to go on")
    ):
        covmerge.search(recipe(models), score, models / "x", trials=12, sampler=sampler)
    asked = {"trials": 12, "sampler": sampler}
    went_on = covmerge.search(recipe(models), score, models / "x", resume=True, **asked)
    whole = covmerge.search(recipe(models), score, models / "y", **asked)
    assert [t.chosen for t in went_on.trials] == [t.chosen for t in whole.trials]
    assert [t.scores for t in went_on.trials] == [t.scores for t in whole.trials]


def test_no_state_of_a_sampler_is_taken_from_the_record(models, monkeypatch):
    """Optuna keeps it pickled among the attributes that systems write, where a stranger could write too."""
    out, told = models / "out", []
    covmerge.search(recipe(models), closeness(models), out, trials=2)
    study = optuna.load_study(study_name="covmerge", storage=f"sqlite:///{out / 'search.db'}")
    trial = study.trials[0]
    trial.params["parameters.scale"] *= 0.9  # one that the sampler would not have asked for
    trial.system_attrs = {"cma:optimizer": "harmless"}
    study.add_trial(trial)
    adds = optuna.Study.add_trial
    monkeypatch.setattr(
        optuna.Study, "add_trial", lambda own, given: told.append(given) or adds(own, given)
    )
    covmerge.search(recipe(models), closeness(models), out, trials=4, resume=True)
    assert len(told) == 2 and not any(given.system_attrs for given in told)


def test_a_search_without_any_score_can_be_begun_anew(models):
    out = models / "out"
    with pytest.raises(InputError, match="'foo' is none of tpe, cmaes, random"):
        covmerge.search(recipe(models), closeness(models), out, sampler="foo")
    assert not out.exists()
    with pytest.raises(CheckFailed, match="the merge without a search has no score"):
        covmerge.search(recipe(models), "echo {model}", out, trials=2)
    assert list(out.iterdir()) == []
    assert covmerge.search(recipe(models), closeness(models), out, trials=2).best is not None


def test_several_objectives(models):
    """The front is what no other trial is better than, by its definition."""
    experts = {e: load_file(models / e / "model.safetensors") for e in "ab"}

    def near_each(folder):
        found = load_file(folder / "model.safetensors")
        return {
            e: -sum(float((found[n] - own[n]).square().sum()) for n in NAMES)
            for e, own in experts.items()
        }

    asked = {"trials": 16, "objectives": ["a", "b"]}
    found = covmerge.search(recipe(models), near_each, models / "out", **asked)
    points = {t.number: (t.scores["a"].value, t.scores["b"].value) for t in found.trials}
    front = {
        n
        for n, (a, b) in points.items()
        if not any((x >= a and y >= b) and (x > a or y > b) for x, y in points.values())
    }
    assert {t.number for t in found.front} == front and found.best is None
    files = {int(p.stem.removeprefix("trial-")) for p in (models / "out" / "front").iterdir()}
    assert files == front
    assert found.held_out is None  # numbers without examples
    with pytest.raises(RecipeError, match=r'objectives=\["c"\]: the scorer gives a, b, mean'):
        covmerge.search(recipe(models), near_each, models / "o", objectives=["c"])


def test_what_cannot_be_told_is_said(models):
    numbers = covmerge.search(recipe(models), lambda folder: 1.0, models / "x", trials=2)
    assert "the scorer gives no number for each example" in dict(numbers.says())["other half"]
    every = covmerge.search(
        recipe(models), closeness(models), models / "y", trials=2, all_examples=True
    )
    assert "it saw every example" in dict(every.says())["other half"]
    asked = {**recipe(models, method="linear"), "base": None, "parameters": {}}
    found = covmerge.search(asked, lambda folder: 1.0, models / "z", trials=2)
    assert found.untuned is None and "no merge to compare with" in found.notes[0]


def test_trials_that_fail(models):
    score, calls = closeness(models), []

    def failing(folder):
        calls.append(folder)
        match len(calls):
            case 2:
                raise ValueError("no such metric")
            case 3:
                return {"near": [1.0]}
            case 4:
                return {"near": [float("nan")] * 24}
        return score(folder)

    found = covmerge.search(recipe(models), failing, models / "out", trials=6)
    assert [t.failed for t in found.trials[:2]] == [
        "ValueError: no such metric",
        "near was scored on 1 examples, and before on 24",
    ]
    assert "not finite" in found.trials[2].failed
    assert found.best.number > 2
    with pytest.raises(
        CheckFailed, match="the merge without a search has no score: ValueError: broken"
    ):
        covmerge.search(recipe(models), _broken, models / "o", trials=6)


def _broken(folder):
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("recipe_", "asked", "said"),
    [
        ({"parameters": {"scale": {"search": [0, 1]}, "density": 1}}, {}, "no parameter 'density'"),
        (
            {"method": "ties", "parameters": {"density": {"search": [0.1, 3]}}},
            {},
            "parameters.density at 3",
        ),
        ({"method": {"search": ["tsv_m", "tiess"]}}, {}, "method: there is no method 'tiess'"),
        ({"base": "/nowhere/at/all"}, {}, "/nowhere"),
        ({}, {"trials": 0}, advice("give 1 or more")),
        ({}, {"sampler": "tpee"}, "'tpee' is none of tpe, cmaes, random"),
        ({}, {"resume": True}, advice("holds no search to go on with: leave out --resume")),
        ({}, {"max_memory": "1KB"}, "memory"),
    ],
    ids=str,
)
def test_wrong_input(models, recipe_, asked, said):
    with pytest.raises(InputError, match=said):
        covmerge.search(recipe(models, **recipe_), closeness(models), models / "out", **asked)
    assert not (models / "out" / "search.db").exists() or not asked


def test_of_another_search_or_none(models):
    score, out = closeness(models), models / "out"
    covmerge.search(recipe(models), score, out, trials=2)
    with pytest.raises(
        RecipeError, match=advice("{} holds a search with other {}: name another folder")
    ):
        covmerge.search(recipe(models, method="ties"), score, out, resume=True)
    with pytest.raises(RecipeError, match="a search with other seed"):
        covmerge.search(recipe(models), score, out, resume=True, seed=1)
    with pytest.raises(
        InputError, match=advice("{} is not empty, and holds no search: name another")
    ):
        covmerge.search(recipe(models), score, models)
    chosen = recipe(models, method={"search": ["ties", "tsv_m"]})
    with pytest.raises(
        RecipeError,
        match=advice("{} has choices, and CMA-ES searches numbers alone: pass --sampler tpe"),
    ):
        covmerge.search(chosen, score, models / "p", sampler="cmaes")
    covmerge.search(chosen, score, models / "q", sampler="tpe", trials=1)
    (models / "r").mkdir()
    (models / "r" / "search.db").write_text("not a database")
    with pytest.raises(
        InputError, match=advice("is no record of a search ({}): name another folder by --out")
    ):
        covmerge.search(recipe(models), score, models / "r", resume=True)


SCORE = """
import os, sys, time
from safetensors.numpy import load_file
wanted, found = load_file(sys.argv[1]), load_file(sys.argv[2] + "/model.safetensors")
time.sleep(float(os.environ.get("SLOW", 0)))
print(-sum(float(abs(found[n] - wanted[n]).sum()) for n in wanted))
"""


def test_commands(models):
    """Exit codes, and what is printed: of one objective, of several, as CSV."""
    (models / "score.py").write_text(SCORE_LENGTH)
    (models / "recipe.yml").write_text(yaml.safe_dump(recipe(models)))
    score = ("--score", f"{sys.executable} {models / 'score.py'} {{model}}", "--trials", 2)
    ran = run("search", models / "recipe.yml", *score, "--out", models / "one")
    assert "parameters.scale" in ran.stdout and "best trial" in words(ran.stdout)
    asked = ("--objective", "a", "--objective", "b", "--out", models / "two", "--csv")
    ran = run("search", models / "recipe.yml", *score, *asked)
    assert ran.stdout == (models / "two" / "trials.csv").read_text("utf-8")
    refused = run("merge", models / "recipe.yml", models / "out", code=2)
    assert "recipe.yml:5: experts.a.weight is marked by `search`" in refused.stderr
    run("merge", models / "one" / "best.yml", models / "out")
    refused = run("search", models / "one" / "best.yml", *score, code=2)
    assert "no value is marked" in refused.stderr
    failed = ("--score", f"{sys.executable} {models / 'none.py'} {{model}}", "--out", models / "x")
    refused = run("search", models / "recipe.yml", *failed, code=1)
    assert "the merge without a search has no score" in refused.stderr


SCORE_LENGTH = """
import json, os, sys
print(json.dumps({"a": os.path.getsize(sys.argv[1] + "/covmerge.json"), "b": 1}))
"""


def test_command_killed_and_gone_on_with(models):
    (models / "score.py").write_text(SCORE)
    (models / "recipe.yml").write_text(yaml.safe_dump(recipe(models)))
    command = f"{sys.executable} {models / 'score.py'} {models / 'wanted.safetensors'} {{model}}"
    asked = ("search", "recipe.yml", "--score", command, "--trials", 3, "--together", 2)
    slow = {**os.environ, "SLOW": "1"}
    running = Forked(COMMAND_LINE, *asked, cwd=models, environment=slow)
    record = models / "recipe-search" / "search.db"
    wait_until(lambda: _trials_in(record) > 0, running)
    running.kill()
    running.wait()
    before = _trials_in(record)
    said = words(printed(COMMAND_LINE, *asked, "--resume", cwd=models))
    assert "best" in said and "the scorer gives no number for each" in said
    assert 1 <= before < 3 == _trials_in(record)
    folder = models / "recipe-search"
    assert (folder / "best" / "model.safetensors").exists()
    (folder / ".best.covmerge-partial").mkdir()  # of a kill as it cleaned up, and one as it wrote
    (folder / ".best.yml.0123abcd.unfinished").write_text("base:")
    printed(COMMAND_LINE, *asked, "--resume", cwd=models)
    assert {p.name for p in folder.iterdir()} == {"best", "best.yml", "search.db", "trials.csv"}


def _trials_in(record):
    import sqlite3

    if not record.exists():
        return 0
    try:
        opened = sqlite3.connect(f"file:{record}?mode=ro", uri=True)
        with opened:
            (count,) = opened.execute("SELECT COUNT(*) FROM trials").fetchone()
        opened.close()
    except sqlite3.OperationalError:
        return 0
    return count


def test_no_more_scorers_than_models_that_are_there(models):
    asked = {
        "score": f"{sys.executable} -c 'print(1)' {{model}}",
        "out": models / "out",
        "trials": 2,
    }
    with pytest.raises(
        InputError, match=advice("models are there at once: pass --together {} too")
    ):
        covmerge.search(recipe(models), **asked, scorers=2, together=1)
    found = covmerge.search(recipe(models), **asked, scorers=2, together=2)
    assert [trial.failed for trial in found.trials] == [None, None]
