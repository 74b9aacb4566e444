"""The commands of the lab, as covmerge finds them."""

from importlib.metadata import entry_points

import pytest

from covmerge.front.cli.commands import GROUP, LAB
from covmerge_lab import run
from tests.cli.runs import covmerge, words
from tests.cli.test_light import printed_without_torch


def test_they_are_those_that_covmerge_knows_by_name():
    found = {entry.name for entry in entry_points(group=GROUP) if entry.dist.name == "covmerge-lab"}
    assert found == LAB
    assert "Commands of covmerge-lab" in words(covmerge("--help").stdout)


def test_help_does_not_wait_for_torch():
    texts = printed_without_torch([[name, "--help"] for name in sorted(LAB)])
    for name, text in zip(sorted(LAB), texts, strict=False):
        assert f"covmerge {name}" in text


def test_results_have_a_place_before_hours_of_work(tmp_path):
    (tmp_path / "file").write_text("")
    place = ["--cache", tmp_path / "cache", "--out"]
    done = covmerge("bench", "text", *place, tmp_path / "file", code=2)
    assert "file is no folder for results (File exists): give another --out" in words(done.stderr)
    done = covmerge("bench", "text", *place, tmp_path / "file" / "out", code=2)
    assert "give another --out" in words(done.stderr)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("")
    done = covmerge("study", "ridge", *place, tmp_path / "other", code=2)
    assert "holds something else than results of a suite" in words(done.stderr)
    assert not (tmp_path / "cache").exists()


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    """`make demo` keeps its cache in the folder of its results, which has nothing else until the end."""

    class Reached(Exception):
        pass

    def reached():
        raise Reached

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(run, "prepare", reached)
    places = {"out": tmp_path, "cache": tmp_path / "cache"}
    with pytest.raises(Reached):
        run.run_bench("text", **places, kinds=("full",), seeds=(0,), methods=None, quick=True)


def test_a_number_of_experts_is_named_once(tmp_path):
    done = covmerge("bench", "text", "--experts", "4,2,4", "--out", tmp_path / "out", code=2)
    assert "--experts is 4,2,4: name each number once" in words(done.stderr)
