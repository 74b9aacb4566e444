"""Recipes of mergekit, unchanged, beside what mergekit 0.1.5 made of them: tensor by tensor."""

from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import covmerge
from covmerge.front.api import run_recipe
from covmerge.front.cli.flags import read_recipe
from covmerge.plan.recipe import load_recipe
from covmerge.plan.recipe.load import import_recipe
from covmerge.plan.recipe.mergekit.methods import METHODS
from covmerge.plan.recipe.mergekit.reading import ImportLog
from covmerge.run.recompute import recompute
from tests.mergekit.agreement import assert_agrees
from tests.mergekit.cases import RECIPES, SEED
from tests.mergekit.models import EXPERTS, LAYERS, flat, save_models

GOLDEN = Path(__file__).parent.parent / "golden" / "mergekit_recipes.safetensors"
# Updates of other layers than the base's are no fine-tunes, which mergekit does not look at.
ALLOWED = {"stack_over_a_base": ("not-a-fine-tune",)}


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


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


def merged(text, out, **flags):
    file = out.with_suffix(".yml")
    file.write_text(text)
    run_recipe(read_recipe(file, dict(seed=SEED, **flags)), out)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("name", RECIPES)
def test_equals_mergekit(name, golden, here, tmp_path):
    found = flat(merged(RECIPES[name], tmp_path / "out", allow=ALLOWED.get(name, ())))
    assert_agrees(found, golden[name], yaml.safe_load(RECIPES[name]))
    assert covmerge.verify(tmp_path / "out").ok


@pytest.mark.parametrize("name", ["ties_with_everything", "stack_of_means", "passthrough_stack"])
def test_the_imported_recipe_makes_the_same(name, here, tmp_path):
    theirs = here / f"{name}.yml"
    theirs.write_text(RECIPES[name])
    first = merged(RECIPES[name], tmp_path / "out")
    ours = here / f"{name}.ours.yml"
    ours.write_text(yaml.safe_dump(import_recipe(theirs, ImportLog()), sort_keys=False))
    assert load_recipe(ours).slices == load_recipe(theirs).slices
    run_recipe(load_recipe(ours), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_merged_in_half_precision_is_computed_again(method, here, tmp_path):
    """Where reference implementations must round as mergekit does."""
    their = METHODS[method]
    parameters = {
        name: value
        for name, value in {"weight": 1.0, "density": 0.6, "t": 0.3, "epsilon": 0.05}.items()
        if name in {**their.shared, **their.each}
    }
    theirs = {
        "merge_method": method,
        "models": [
            {"model": f"./half/t{t}"} for t in range(min(EXPERTS, their.experts[1] or EXPERTS))
        ],
        "parameters": parameters,
    }
    if their.base == "required":
        theirs["base_model"] = "./half/base"
    merged(yaml.safe_dump(theirs), tmp_path / "out")
    check = recompute(tmp_path / "out", tensors=99)
    assert check.ok, check.detail


@pytest.mark.parametrize(("name", "layers"), [("passthrough_stack", 6), ("stack_over_a_base", 6)])
def test_transformers_loads_a_stack(name, layers, here, tmp_path):
    merged(RECIPES[name], tmp_path / "out", allow=ALLOWED.get(name, ()))
    model, log = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(log[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_hidden_layers == layers != LAYERS


def test_one_changed_line_and_it_is_covmerges_own(here, tmp_path):
    text = RECIPES["ties_with_everything"].splitlines()
    changed = "\n".join("merge_method: auto" if "merge_method" in line else line for line in text)
    log = ImportLog()
    file = tmp_path / "auto.yml"
    file.write_text(changed)
    recipe = load_recipe(file, log)
    assert recipe.method == "auto"
    assert any("density, int8_mask, lambda, normalize" in note for note in log.notes)
    assert run_recipe(recipe, None).tensors is not None
