"""`covmerge evaluate`: what it prints, what it writes, how it ends."""

import pytest

from language import LEARNT, UNKNOWN, define, offline, save_taught
from tests.cli.runs import covmerge, words

# lm-eval's dependencies warn of one another.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.slow
@pytest.mark.nightly
def test_good(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    model, tasks = save_taught(tmp_path / "model"), define(tmp_path)
    asked = ["evaluate", model, "--tasks", "covmerge_next", "--include-path", tasks]
    share = len(LEARNT) / len(LEARNT + UNKNOWN)

    ran = covmerge(*asked, "--device", "cpu")
    assert f"covmerge_next exact_match (strip) {share:.4g} ±" in words(ran.stdout)
    assert ran.stdout.endswith(f"{model}: written to evaluation.json and README.md\n")

    ran = covmerge(*asked, "--limit", 2, "--batch-size", 1, "--json")
    (result,) = ran.json["results"]
    assert (result["task"], result["examples"], result["limit"]) == ("covmerge_next", 2, 2)
    assert "| 2 (limited) |" in (model / "README.md").read_text()

    # The only one that lm-eval goes through its own 14 000 definitions for: arc_easy is one of them.
    asked = ["evaluate", model, "--tasks", "arc_easy,covmerge_nx", "--include-path", tasks]
    ran = covmerge(*asked, code=2)
    assert "error: lm-eval has no task 'covmerge_nx'. Did you mean" in ran.stderr
    assert ran.stdout == ""


def test_bad(tmp_path):
    ran = covmerge("evaluate", tmp_path, "--tasks", "arc_easy", code=2)
    assert ran.stderr.startswith(f"error: {tmp_path} is no model folder")
    (tmp_path / "config.json").write_text("{}")
    ran = covmerge("evaluate", tmp_path, "--tasks", ",", code=2)
    assert "no task is given" in ran.stderr
    ran = covmerge("evaluate", tmp_path, "--tasks", "a", "--harness", "lm_eval", code=2)
    assert "there is no harness 'lm_eval'. Did you mean 'lm-eval'?" in ran.stderr
    ran = covmerge("evaluate", tmp_path, "--tasks", "a", "--device", "cuda:99", code=2)
    assert "--device cuda:99 cannot be used here" in ran.stderr
    missing = tmp_path / "missing"
    ran = covmerge("evaluate", tmp_path, "--tasks", "a", "--include-path", missing, code=2)
    assert f"{missing} is no folder" in ran.stderr
