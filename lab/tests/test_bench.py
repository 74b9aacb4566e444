import pytest

from tests.cli.runs import covmerge


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("bench", "txt"), "unknown suite 'txt'. Did you mean 'text'?"),
        (("bench", "text", "--kind", "loar"), "Did you mean 'lora'?"),
        (("bench", "text", "--methods", "acee"), "Did you mean 'ace'?"),
        (("study", "ablations"), "Did you mean 'ablation'?"),
        (("study", "ablation", "--suite", "txt"), "unknown suite 'txt'"),
    ],
)
def test_unknown_names_are_refused_before_any_work(given, said, tmp_path):
    ran = covmerge(*given, "--out", tmp_path / "out", "--cache", tmp_path / "cache", code=2)
    assert said in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    ran = covmerge("bench", "text", "--out", tmp_path, "--cache", tmp_path / "cache", code=2)
    assert "something else" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("command", [("bench", "text"), ("study", "ablation")])
def test_a_cache_that_cannot_be(command, tmp_path):
    (tmp_path / "file").touch()
    given = ("--cache", tmp_path / "file" / "cache", "--out", tmp_path / "out")
    ran = covmerge(*command, *given, code=2)
    assert f"{tmp_path / 'file'} is not a folder" in ran.stderr.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_studies_are_listed():
    ran = covmerge("study")
    for name in ("ablation", "sensitivity", "ridge", "covariance"):
        assert f"{name}:" in ran.stdout
