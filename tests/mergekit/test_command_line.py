"""mergekit's flags, and `covmerge import-mergekit`."""

import pytest
import yaml
from typer.testing import CliRunner

from covmerge.errors import RecipeError
from covmerge.front.cli import app
from covmerge.front.cli.commands import translated
from tests.advised import advice
from tests.cli.runs import covmerge, save_plain

THEIRS = "merge_method: linear\nmodels: [{model: org/a, parameters: {weight: [0, 1], wieght: 2}}]\n"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--cuda"], ["--device", "cuda"]),
        (["--num-threads", "2"], ["--threads", "2"]),
        (["-j", "2"], ["--threads", "2"]),
        (["-j4"], ["--threads", "4"]),
        (["-v", "-vv", "-vvv"], []),
        (["-I", "mid", "--out-path", "OUT", "r.yml"], ["--stages", "mid", "r.yml", "OUT"]),
        (["r.yml", "-Imid", "--lazy"], ["r.yml", "--stages", "mid", "--resume"]),
        (["--intermediate-dir=mid", "--no-lazy"], ["--stages", "mid", "--overwrite"]),
        (["--random-seed=7"], ["--seed", "7"]),
        (["--out-shard-size", "500M"], ["--shard-size", "500000000"]),
        (["--lora-merge-cache", "./cache", "--dry-run"], ["--dry-run"]),
        (["--copy-tokenizer", "--lazy-unpickle", "--allow-crimes", "--low-cpu-memory"], []),
        (["--unsafe-truncate-embeddings"], ["--tensors", "vocabulary=base"]),
        (["r.yml", "OUT", "--method", "ties"], ["r.yml", "OUT", "--method", "ties"]),
    ],
)
def test_flags_are_ours_or_need_nothing(given, ours):
    assert translated(given) == ours


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--transformers-cache", "x"],
            advice("models of the Hub lie in its own cache: set HF_HOME"),
        ),
        (["--multi-gpu"], "--device cuda:0"),
        (
            ["--no-copy-tokenizer"],
            advice("always copied: remove its files in a copy of the base"),
        ),
        (["--no-write-model-card"], advice("remove README.md, which no check asks for")),
        (["--out-shard-size", "5GiB"], "is not a number with K, M or B"),
    ],
)
def test_flags_that_are_refused_say_what_replaces_them(given, said):
    with pytest.raises(RecipeError, match=said):
        translated(given)


def test_what_an_output_need_not_have_is_removed(tmp_path):
    """As is said of mergekit's flags for it; HF_HOME is the Hub client's own."""
    save_plain(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base.safetensors").rename(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    given = ["merge", "--base", tmp_path / "base", f"--expert=a={tmp_path / 'a.safetensors'}"]
    covmerge(*given, "--method", "average", tmp_path / "out")
    (tmp_path / "out" / "README.md").unlink()
    covmerge("verify", tmp_path / "out")
    (tmp_path / "base" / "tokenizer.json").unlink()
    covmerge(*given, "--method", "average", tmp_path / "out", "--overwrite")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    covmerge("verify", tmp_path / "out")


def test_a_flag_that_is_refused_ends_as_any_bad_input(tmp_path):
    ran = CliRunner().invoke(app, ["merge", "r.yml", str(tmp_path / "out"), "--multi-gpu"])
    assert ran.exit_code == 2
    assert "--multi-gpu is mergekit's, and covmerge has none" in ran.output


class TestImport:
    def run(self, folder, *flags, text=THEIRS):
        file = folder / "their.yml"
        file.write_text(text)
        return CliRunner().invoke(app, ["import-mergekit", str(file), *flags])

    def test_what_it_prints_is_a_recipe(self, tmp_path):
        ran = self.run(tmp_path, "--lenient")
        assert ran.exit_code == 0
        assert "linear has no parameter 'wieght'" in ran.stderr
        assert yaml.safe_load(ran.stdout) == {
            "base": None,
            "experts": {"a": "org/a"},
            "method": "linear",
            "parameters": {
                "arithmetic": "stored",
                "normalize": True,
                "weight": {"by_depth": [0, 1]},
            },
        }

    def test_what_is_unknown_ends_it(self, tmp_path):
        ran = self.run(tmp_path)
        assert ran.exit_code == 2
        assert "Did you mean 'weight'?" in ran.stderr
        assert ran.stdout == ""

    def test_a_recipe_of_covmerges(self, tmp_path):
        ran = self.run(tmp_path, text="base: a\nexperts: {b: b}\n")
        assert ran.exit_code == 2
        assert "is no recipe of mergekit" in ran.stderr


def test_flags_without_effect_are_named_in_one_note(capsys):
    given = ["r.yml", "OUT", "--allow-crimes", "--write-threads", "4", "-vv", "--no-cuda"]
    assert translated(given) == ["r.yml", "OUT"]
    said = " ".join(capsys.readouterr().err.split())
    assert "--allow-crimes, --write-threads, -vv, --no-cuda: without effect in covmerge" in said
