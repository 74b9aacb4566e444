"""Models of different vocabularies, merged by mergekit's recipes, beside what mergekit 0.1.5 made."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

import covmerge
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import load_recipe
from covmerge.plan.recipe.load import import_recipe
from covmerge.plan.recipe.mergekit.reading import ImportLog
from tests.mergekit.agreement import assert_agrees
from tests.mergekit.test_parity import merged
from tests.mergekit.token_cases import RECIPES, by_token, ids_of, save_models

GOLDEN = Path(__file__).parent.parent / "golden" / "mergekit_tokens.safetensors"


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        log = {case: json.loads(own) for case, own in file.metadata().items()}
    return load_file(GOLDEN), log


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture
def here(models, monkeypatch):
    """In the folder of the models, where mergekit looks for them."""
    monkeypatch.chdir(models)
    return models


@pytest.mark.parametrize("name", RECIPES)
def test_equals_mergekit(name, golden, here, tmp_path):
    wanted, log = golden
    out = tmp_path / "out"
    stored = merged(RECIPES[name], out)
    ids = ids_of(out)
    assert set(ids) == set(log[name]["ids"])
    found, padding = by_token(stored, ids)
    assert_agrees(found, wanted[name], yaml.safe_load(RECIPES[name]))
    # The mean of all rows, which mergekit sums up in the rows' own dtype.
    torch.testing.assert_close(padding, wanted[f"{name} padding"], rtol=0, atol=1e-6)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == log[name]["vocab_size"]
    assert covmerge.verify(out).ok


@pytest.mark.parametrize("name", ["union", "rows_of_others"])
def test_the_imported_recipe_makes_the_same(name, here, tmp_path):
    theirs = here / f"{name}.yml"
    theirs.write_text(RECIPES[name])
    first = merged(RECIPES[name], tmp_path / "out")
    ours = here / f"{name}.ours.yml"
    ours.write_text(yaml.safe_dump(import_recipe(theirs, ImportLog()), sort_keys=False))
    run_recipe(load_recipe(ours), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(first[n], again[n]) for n in first)
    for file in ("tokenizer.json", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
