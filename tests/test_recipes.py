"""The recipes and the program of examples/ do what they say, on tiny checkpoints."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import covmerge
from tests.cli.runs import covmerge as command
from tests.e2e.models import fine_tuned
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.quantised.models import llama

ROOT = Path(covmerge.__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted(EXAMPLES.glob("*.yml"))

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the checkpoints that the recipes name."""
    folder = tmp_path_factory.mktemp("recipes")
    base = llama(0, hidden_size=128)
    base.save_pretrained(folder / "base")
    for seed, name in enumerate(("code", "math"), start=1):
        fine_tuned(base, seed).save_pretrained(folder / name)
        save_adapter(base, folder / name / "lora", seed=seed, targets=TARGETS["llama"])
        (folder / name / "lora" / "adapter").rename(folder / f"{name}-lora")
        shutil.rmtree(folder / name / "lora")
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_merges(folder, recipe):
    (says,) = re.findall(r"^#   (covmerge merge .*)$", recipe.read_text("utf-8"), re.M)
    assert says.split()[2] == f"examples/{recipe.name}"
    shutil.copy(recipe, folder)
    out = folder / recipe.stem
    command("merge", folder / recipe.name, out)
    assert covmerge.verify(out).ok
    if recipe.stem == "adapters":
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        PeftModel.from_pretrained(base, out)
        return
    assert (out / "config.json").exists() and (out / "README.md").exists()
    names = set[str]()
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names |= set(weights.keys())
    with safe_open(folder / "base" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) <= names


def test_the_first_steps_of_an_installation(capsys):
    runpy.run_path(str(EXAMPLES / "first_steps.py"), run_name="__main__")
    assert "in memory as on disk" in capsys.readouterr().out
