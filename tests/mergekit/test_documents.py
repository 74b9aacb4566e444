"""Several recipes in a file: stages that name each other's outputs."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from covmerge import verify
from covmerge.errors import RecipeError
from covmerge.front.cli import app
from covmerge.plan.recipe import load_recipe
from covmerge.plan.recipe.load import load_stages
from tests.advised import advice
from tests.mergekit.models import save_models

MEAN = """
name: mean
merge_method: linear
models:
  - {model: ./llama/t0, parameters: {weight: 0.5}}
  - {model: soup, parameters: {weight: 0.5}}
"""
LAST = """
merge_method: task_arithmetic
base_model: ./llama/base
models:
  - {model: mean, parameters: {weight: 0.7}}
  - {model: ./llama/t2, parameters: {weight: 0.2}}
"""
SOUP = """
name: soup
merge_method: slerp
base_model: ./llama/t1
models: [{model: ./llama/t2}]
parameters: {t: 0.3}
"""


def file_of(folder, *documents):
    file = folder / "their.yml"
    file.write_text("---".join(documents))
    return file


@pytest.fixture
def here(tmp_path, monkeypatch):
    save_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


class TestMerging:
    def test_each_is_merged_after_what_it_names(self, here):
        ran = run(file_of(here, MEAN, LAST, SOUP), "out")
        assert ran.exit_code == 0, ran.output
        stages = here / "out.stages"
        assert sorted(path.name for path in stages.iterdir()) == ["mean", "soup"]
        assert all(verify(path).ok for path in (here / "out", *stages.iterdir()))
        for text, name in ((SOUP, "soup"), (MEAN, "mean"), (LAST, "out")):
            alone = text.replace(f"name: {name}\n", "").replace(
                "model: mean", "model: out.stages/mean"
            )
            alone = alone.replace("model: soup", "model: ./out.stages/soup")
            assert run(file_of(here, alone), f"alone-{name}").exit_code == 0
            made = load_file(
                (here / "out" if name == "out" else stages / name) / "model.safetensors"
            )
            wanted = load_file(here / f"alone-{name}" / "model.safetensors")
            assert all(torch.equal(made[n], wanted[n]) for n in wanted)

    def test_where_all_have_names_each_is_an_output(self, here):
        file = file_of(here, MEAN, SOUP)
        ran = run(file, "-I", "made", "--lazy", "-vv")
        assert ran.exit_code == 0, ran.output
        assert sorted(path.name for path in (here / "made").iterdir()) == ["mean", "soup"]
        assert run(file, "out", "-j1").exit_code == 0
        for name in ("mean", "soup"):
            assert verify(here / "out" / name).ok
            one = (here / "out" / name / "model.safetensors").read_bytes()
            assert one == (here / "made" / name / "model.safetensors").read_bytes()

    def test_a_stage_that_fails_leaves_no_output(self, here):
        broken = load_file(here / "llama" / "t0" / "model.safetensors")
        broken["model.norm.weight"][0] = torch.nan
        save_file(broken, here / "llama" / "t0" / "model.safetensors")
        file = file_of(here, MEAN, LAST, SOUP)
        ran = run(file, "out")
        assert ran.exit_code == 2
        assert "model.norm.weight" in ran.output
        assert [path.name for path in (here / "out.stages").iterdir()] == ["soup"]
        assert not (here / "out").exists()

    def test_a_model_that_the_last_lacks_is_missed_before_the_first_is_merged(self, here):
        ran = run(file_of(here, MEAN, LAST.replace("llama/t2", "llama/t9"), SOUP), "out")
        assert ran.exit_code == 2
        assert "llama/t9" in ran.output
        assert not (here / "out.stages").exists()

    def test_resumed_it_takes_what_is_finished_and_the_same(self, here):
        file = file_of(here, MEAN, LAST, SOUP)
        (here / "out").mkdir()
        (here / "out" / "mine").touch()
        assert run(file, "out").exit_code == 2  # before any of the work
        assert not (here / "out.stages").exists()
        assert run(file, "other").exit_code == 0
        (here / "other").rename(here / "away")
        before = (here / "other.stages" / "mean" / "covmerge.json").stat().st_mtime_ns
        ran = run(file, "other", "--resume")
        assert ran.exit_code == 0
        assert "stage mean is finished" in ran.output
        assert (here / "other.stages" / "mean" / "covmerge.json").stat().st_mtime_ns == before

    def test_resumed_it_removes_what_a_kill_left_of_a_finished_stage(self, here):
        """It stayed beside the stage for good, where the kill came as the merge cleaned up."""
        file = file_of(here, MEAN, LAST, SOUP)
        assert run(file, "out").exit_code == 0
        (here / "out").rename(here / "away")
        remains = {n: here / "out.stages" / f".{n}.covmerge-partial" for n in ("mean", "soup")}
        for folder in remains.values():
            folder.mkdir()
            (folder / "journal.jsonl").write_text("{}")
        (remains["soup"] / "output").mkdir()  # of a merge that was to replace it
        assert run(file, "out", "--resume").exit_code == 0
        assert not remains["mean"].exists() and (remains["soup"] / "output").exists()
        ran = run(file, "out", "--resume")
        assert ran.exit_code == 2
        assert "exists, and a merge that ended is not resumed" in " ".join(ran.output.split())

    def test_resumed_and_replacing_it_merges_anew_what_is_another(self, here):
        """A run that replaced changed stages and was killed between them could not be gone on with."""
        file = file_of(here, MEAN, LAST, SOUP)
        assert run(file, "out").exit_code == 0
        file_of(here, MEAN, LAST, SOUP.replace("0.3", "0.4"))
        assert run(file, "out", "--resume", "--overwrite").exit_code == 0
        assert run(file, "fresh", "--stages", "all").exit_code == 0
        for one, other in (("out", "fresh"), ("out.stages/soup", "all/soup")):
            made, anew = (load_file(here / f / "model.safetensors") for f in (one, other))
            assert made.keys() == anew.keys() and all(made[n].equal(anew[n]) for n in made)

    def test_resumed_it_refuses_what_is_finished_and_another(self, here):
        file = file_of(here, LAST, MEAN, SOUP)
        assert run(file, "out").exit_code == 0
        (here / "out").rename(here / "away")
        assert "--overwrite" in run(file, "out").output  # without a word, nothing is taken
        file_of(here, LAST, MEAN, SOUP.replace("0.3", "0.4"))
        ran = run(file, "out", "--resume")
        assert ran.exit_code == 2
        assert "is a finished stage of another recipe (parameters)" in " ".join(ran.output.split())
        head, *models = MEAN.rstrip().split("\n  - ")
        file_of(here, LAST, "\n  - ".join([head, *reversed(models)]) + "\n", SOUP)
        ran = run(file, "out", "--resume")
        assert "is a finished stage of another recipe (experts)" in " ".join(ran.output.split())
        file_of(here, LAST, MEAN, SOUP)
        changed = load_file(here / "llama" / "t1" / "model.safetensors")
        save_file(
            {n: 2 * w for n, w in changed.items()}, here / "llama" / "t1" / "model.safetensors"
        )
        ran = run(file, "out", "--resume")
        assert ran.exit_code == 2
        assert "is a finished stage of other sources" in " ".join(ran.output.split())
        assert run(file, "out", "--overwrite").exit_code == 0

    def test_an_output_that_is_an_input_of_any_stage_is_refused_before_the_work(self, here):
        file = file_of(here, SOUP, MEAN, LAST)
        assert run(file, "out").exit_code == 0
        (here / "out").rename(here / "llama" / "again")
        for out, documents in (
            ("llama/again", (SOUP.replace("./llama/t2", "./llama/again"), MEAN, LAST)),
            ("llama/t2", (SOUP, MEAN, LAST.replace("./llama/t2", "./llama/t0"))),
            # The place of a later stage, named by its path.
            ("out", (SOUP.replace("./llama/t2", f"{here}/out.stages/mean"), MEAN, LAST)),
        ):
            before = {path: path.stat().st_mtime_ns for path in here.rglob("*.safetensors")}
            ran = run(file_of(here, *documents), out, "--overwrite")
            assert ran.exit_code == 2
            assert "overlap: choose an output" in " ".join(ran.output.split())
            assert before == {path: path.stat().st_mtime_ns for path in here.rglob("*.safetensors")}

    def test_recipes_of_covmerge_are_no_stages(self, here):
        experts = "experts: {a: ./llama/t1, b: ./llama/t2}\nmethod: average\n"
        stages = (f"name: soup\nbase: ./llama/t0\n{experts}", f"\nbase: soup\n{experts}")
        file = file_of(here, *stages)
        ran = run(file, "out")
        assert ran.exit_code == 2
        said = advice("no `experts`: give each recipe a file, and merge one after the other")
        assert re.search(said, ran.output)
        for number, (base, out) in enumerate((("./llama/t0", "soup"), ("soup", "out"))):
            (here / f"{number}.yml").write_text(f"base: {base}\n{experts}")
            assert run(f"{number}.yml", out).exit_code == 0

    def test_a_file_in_the_place_of_the_stages(self, here):
        (here / "out.stages").touch()
        ran = run(file_of(here, SOUP, MEAN, LAST), "out")
        assert ran.exit_code == 2
        assert "out.stages/soup exists and is no folder" in " ".join(ran.output.split())

    def test_a_report_that_cannot_be_is_refused_before_the_work(self, here):
        last = MEAN.replace("name: mean\n", "")
        ran = run(file_of(here, SOUP, last), "out", "--report")
        assert ran.exit_code == 2
        assert "--report shows updates of a base" in ran.output
        assert not (here / "out.stages").exists()

    @pytest.mark.parametrize("damage", ["altered", "missing"])
    def test_resumed_it_takes_no_stage_that_is_not_as_it_was_written(self, here, damage):
        file = file_of(here, SOUP, LAST.replace("mean", "soup"))
        assert run(file, "out").exit_code == 0
        (here / "out").rename(here / "away")
        weights = here / "out.stages" / "soup" / "model.safetensors"
        if damage == "missing":
            weights.unlink()
        else:
            content = bytearray(weights.read_bytes())
            content[-3] ^= 0xFF
            weights.write_bytes(content)
        ran = run(file, "out", "--resume")
        assert ran.exit_code == 2
        told = " ".join(ran.output.split())
        assert "soup is a finished stage that is not as it was written: model.safetensors" in told
        assert "--overwrite merges it anew" in told
        assert not (here / "out").exists()
        assert run(file, "out", "--overwrite").exit_code == 0


class TestReading:
    @pytest.mark.parametrize(
        ("documents", "said"),
        [
            ((LAST, LAST), r"their.yml:7: 2 of the 2 documents have no `name`"),
            ((MEAN, MEAN, LAST), r"their.yml:8: the name 'mean' is taken"),
            (
                (MEAN, SOUP.replace("soup", "MEAN"), LAST),
                r"their.yml:8: the name 'MEAN' is taken",
            ),
            ((MEAN.replace("name: mean", "name: ../x"), LAST), r"their.yml:2: `name` is '../x'"),
            (
                (MEAN.replace("name: mean", "name: 3"), LAST),
                "`name` is 3, and a folder is called so",
            ),
            (
                (MEAN.replace("name: mean", f"name: {'n' * 101}"), LAST),
                r"their.yml:2: `name` is 'nnn.*use up to 100 letters",
            ),
            ((SOUP.replace("./llama/t2", "mean"), MEAN, LAST), "need each other's output: .*mean"),
            ((LAST, "\n"), "a document is no mapping"),
            ((SOUP, "\nmerge_method: linear\n"), "their.yml:7: exactly one of"),
            ((SOUP, LAST + "wieght: 1\n"), "their.yml:13: unknown key 'wieght'"),
        ],
    )
    def test_what_is_refused(self, documents, said, tmp_path):
        with pytest.raises(RecipeError, match=said):
            load_stages(file_of(tmp_path, *documents), tmp_path / "out")

    def test_one_document_is_one_recipe(self, tmp_path):
        file = file_of(tmp_path, SOUP.replace("name: soup", ""))
        assert load_stages(file, tmp_path / "out") == [(tmp_path / "out", load_recipe(file))]

    def test_where_stages_and_outputs_lie(self, tmp_path):
        named, last = file_of(tmp_path, MEAN, SOUP), tmp_path / "last.yml"
        last.write_text(f"{LAST}---{MEAN}---{SOUP}")
        out, mid = tmp_path / "out", tmp_path / "mid"

        def places(file, out, folder=None):
            return [path for path, _ in load_stages(file, out, folder=folder)]

        beside = tmp_path / "out.stages"
        assert places(last, out) == [beside / "soup", beside / "mean", out]
        assert places(last, out, mid) == [mid / "soup", mid / "mean", out]
        assert places(named, out) == [out / "soup", out / "mean"]
        assert places(named, None, mid) == [mid / "soup", mid / "mean"]
        alone = tmp_path / "alone.yml"
        alone.write_text(LAST)
        for file, given, said in (
            (named, (out, mid), "none is the output"),
            (last, (None, mid), "which makes the output, and none is given"),
            (alone, (None, mid), "has one recipe, and stages are of several"),
            (last, (mid / "soup", mid), "the output .*soup and the stage .*soup overlap"),
            (last, (mid, mid), "the output .*mid and the stage .*soup overlap: choose"),
            (last, (mid / "mean" / "x", mid), "overlap"),
        ):
            with pytest.raises(RecipeError, match=said):
                places(file, *given)

    @pytest.mark.parametrize("flags", [["--as", "adapter"], ["--keep", "*"], ["--report"]])
    def test_flags_for_one_output(self, flags, tmp_path):
        ran = run(file_of(tmp_path, SOUP, MEAN), tmp_path / "out", *flags)
        assert ran.exit_code == 2
        assert "and each is an output" in " ".join(ran.output.split())
        assert not list(tmp_path.glob("out*"))

    def test_a_dry_run_is_of_one(self, tmp_path):
        file = file_of(tmp_path, SOUP, MEAN)
        ran = run(file, "-I", tmp_path / "mid", "--dry-run")
        assert (ran.exit_code, "--dry-run shows one" in " ".join(ran.output.split())) == (2, True)
        ran = run(file, tmp_path / "out", "--dry-run")
        assert (ran.exit_code, "a dry run" in " ".join(ran.output.split())) == (2, True)

    def test_stages_of_flags(self, tmp_path):
        ran = run("--base", "b", "--expert", "a=a", tmp_path / "out", "--stages", tmp_path)
        assert ran.exit_code == 2
        assert "--stages is the folder of several recipes" in " ".join(ran.output.split())

    def test_flags_for_one_recipe(self, tmp_path):
        ran = run(file_of(tmp_path, SOUP, LAST), tmp_path / "out", "--base", "x")
        assert ran.exit_code == 2
        assert "has several recipes" in ran.output
        assert not list(tmp_path.glob("out*"))

    def test_where_a_stage_lies_is_recorded(self, here):
        file = file_of(here, SOUP, LAST.replace("mean", "soup"))
        assert run(file, "out", "--seed", "3").exit_code == 0
        recorded = json.loads((here / "out" / "covmerge.json").read_text())
        assert recorded["recipe"]["experts"]["soup"]["source"] == "out.stages/soup"
