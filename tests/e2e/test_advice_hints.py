"""What reports, tables, cards and checks of small files advise in passing, followed."""

import os
import re
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge as library
from covmerge.errors import CovmergeError
from tests.advised import advice
from tests.cli.runs import covmerge, flags, save_plain, statistics_for, words, write_recipe
from tests.e2e.following import told


@pytest.fixture
def models(tmp_path):
    return save_plain(tmp_path)


def test_a_name_of_an_expert(models):
    said = advice(
        "{} cannot name an expert; use up to {} letters, digits, '.', '_' or '-', and no '.'"
    )
    given = ["--base", models / "base.safetensors", "--method", "average"]
    told(said, "merge", *given, "--expert", f".a={models / 'a.safetensors'}", models / "out")
    covmerge("merge", *given, "--expert", f"a.1_x-Y={models / 'a.safetensors'}", models / "out")


def test_a_page_of_a_method():
    assert re.search(
        advice("`covmerge methods NAME` shows one:"), words(covmerge("methods").stdout)
    )
    assert "W̄ = W₀" in covmerge("methods", "ace").stdout


def test_a_name_that_is_like_none(models):
    said = advice(" `covmerge methods` lists the {}s.")
    told(said, "merge", *flags(models), "--method", "qqqqqqqq", models / "out")
    assert re.search(r"\baverage\b", covmerge("methods").stdout)
    covmerge("merge", *flags(models), "--method", "average", models / "out")


def test_a_dtype_that_is_stored(models):
    recipe = write_recipe(models, "dtype: bfloat16")
    told(
        advice(", which is computed in; to store another pass --out-dtype {}"),
        "merge",
        recipe,
        models / "out",
    )
    recipe = write_recipe(models)
    covmerge("merge", recipe, "--out-dtype", "bfloat16", models / "out")
    stored = load_file(models / "out" / "model.safetensors")
    assert stored["embed_tokens.weight"].dtype == torch.bfloat16


def test_a_card(models):
    covmerge("merge", write_recipe(models, "method: average"), models / "out")
    card = (models / "out" / "README.md").read_text()
    assert re.search(
        advice("`covmerge merge recipe.yml OUT` carries it out where the sources are"), card
    )
    (models / "again.yml").write_text(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    covmerge("merge", models / "again.yml", models / "again")
    one, other = (load_file(models / out / "model.safetensors") for out in ("out", "again"))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_a_merge_that_is_stopped(models):
    same = load_file(models / "base.safetensors")
    save_file(same, models / "a.safetensors")
    said = advice("The merge is stopped and nothing is kept of it. `covmerge inspect` shows more")
    told(said, "merge", *flags(models), "--method", "average", models / "out")
    assert "equals the base" in words(covmerge("inspect", *flags(models), code=1).stdout)


def test_statistics_that_a_method_needs(models):
    said = advice("`covmerge collect {} DATA {}.covstats.safetensors --kind {}`")
    given = ["merge", *flags(models), "--method", "regmean"]
    found = told(said, *given, models / "out")
    assert "--kind gram" in found.group()
    files = [f"--stats={name}={path}" for name, path in statistics_for("regmean", models).items()]
    covmerge(*given, *files, models / "out")


def test_a_command_with_a_path_is_one_for_the_shell(models):
    base, odd = models / "base.safetensors", models / "b c.safetensors"
    shutil.copy(models / "a.safetensors", odd)
    for source, shown in ((odd, str(odd)), (load_file(odd), "FOLDER")):
        with pytest.raises(CovmergeError) as refused:
            library.merge(base, {"a": source}, "regmean")
        command = str(refused.value).split("`")[1]
        assert shlex.split(command)[2] == shown


MODULES = {
    "no list": (
        "{}",
        advice("each with a `path`: fetch it again, or remove it if this is no model"),
    ),
    "a large one": (
        "[" + " " * 2**21 + "]",
        advice("{} has more than {} bytes: is it the right file?"),
    ),
}


@pytest.mark.parametrize(("content", "said"), MODULES.values(), ids=MODULES)
def test_a_list_of_modules(content, said, models):
    (models / "model").mkdir()
    (models / "a.safetensors").rename(models / "model" / "model.safetensors")
    listed = models / "model" / "modules.json"
    listed.write_text(content)
    with pytest.raises(CovmergeError, match=said):
        library.merge(models / "base.safetensors", {"a": models / "model"}, "average")
    listed.write_text('[{"idx": 0, "name": "0", "path": "", "type": "models.Transformer"}]')
    library.merge(models / "base.safetensors", {"a": models / "model"}, "average")
    listed.unlink()
    library.merge(models / "base.safetensors", {"a": models / "model"}, "average")


def test_a_small_file_that_is_large(models, monkeypatch):
    (models / "model").mkdir()
    (models / "a.safetensors").rename(models / "model" / "model.safetensors")
    config = models / "model" / "config.json"
    config.touch()
    os.truncate(config, 2**30)
    said = advice("{} has {} bytes, and no such file needs more than {}: is it the right file?")
    with pytest.raises(CovmergeError, match=said):
        library.merge(models / "base.safetensors", {"a": models / "model"}, "average")
    config.write_text("{}")
    library.merge(models / "base.safetensors", {"a": models / "model"}, "average")
