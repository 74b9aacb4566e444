"""Tensors that are looked over and then merged by rows: the bytes of those that are merged whole."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from covmerge.errors import NotFiniteError
from covmerge.front.api import plan_recipe
from covmerge.plan.planning import build, work
from covmerge.plan.recipe import parse_recipe
from covmerge.run.engine import worker
from covmerge.run.engine.options import RunOptions
from tests.mergekit.kept import digest, goldens
from tests.mergekit.models import save_models
from tests.mergekit.ours import merge_in_memory

LOOKED_OVER = {
    "arcee_fusion",
    "slerp",
    "ties",
    "dare_ties",
    "dare_linear",
    "della",
    "della_linear",
    "breadcrumbs_ties",
    "multislerp",
    "karcher",
    "model_stock",
    "nuslerp",
    "sce",
    "ramplus_tl",
}
RECIPES = {
    f"{recipe['merge_method']}{seed}": (seed, recipe)
    for seed, recipe, *_ in goldens()
    if recipe["merge_method"] in LOOKED_OVER and "slices" not in recipe
}
# Where thresholds fall among equal magnitudes, and what is rescaled hangs on the sum of the whole.
HALF = {
    "merge_method": "ties",
    "base_model": "./half/base",
    "models": [{"model": f"./half/t{t}", "parameters": {"density": 0.4}} for t in range(3)],
    "parameters": {"weight": 0.4, "rescale": True},
}
OWN = {
    "method": "ties",
    "base": "./llama/base",
    "experts": {"a": "./llama/t0", "b": "./llama/t1"},
    "parameters": {"trim": "tensor"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("models")
    save_models(found)
    return found


@pytest.fixture
def looked_over(monkeypatch, folder):
    """Names of the tensors that are looked over, from now on those of more than 40 entries."""
    monkeypatch.chdir(folder)
    found = []
    tensor_pass = worker.tensor_pass

    def noting(item, *given):
        found.append(item.tensor.name)
        return tensor_pass(item, *given)

    def small():
        monkeypatch.setattr(build, "BLOCK_ELEMENTS", 40)
        monkeypatch.setattr(build, "TOGETHER_ELEMENTS", 80)
        monkeypatch.setattr(build, "_PART_ELEMENTS", 17)
        monkeypatch.setattr(work, "_NARROW_ELEMENTS", 60)
        monkeypatch.setattr(worker, "tensor_pass", noting)
        return found

    return small


@pytest.mark.parametrize("recipe", [*RECIPES, "half", "own"])
def test_bytes_are_those_of_the_whole(recipe, folder, looked_over):
    seed, given = {**RECIPES, "half": (0, HALF), "own": (0, OWN)}[recipe]
    whole = merge_in_memory(given, folder, seed, RunOptions(threads=1))
    found = looked_over()
    by_rows = merge_in_memory(given, folder, seed, RunOptions(threads=2))
    assert digest(by_rows) == digest(whole)
    assert len(found) > 5


READ_AS_SAID = {
    "ties": {"density": 0.4},
    "dare_linear": {"density": 0.4},
    "della": {"density": 0.4, "rescale": False},
    "breadcrumbs": {"density": 0.4},
    "slerp": {"t": 0.3},
    "arcee_fusion": {},
    "model_stock": {},
}


@pytest.mark.parametrize("method", [*READ_AS_SAID, "own"])
def test_a_plan_counts_what_a_look_reads(method, folder, looked_over, monkeypatch):
    """But for a block, whose dtype is asked; of looks at all experts at once it counts the first."""
    looked_over()
    alone = method in ("slerp", "arcee_fusion")
    theirs = {
        "merge_method": method,
        "base_model": "./llama/base",
        "models": [{"model": f"./llama/t{t}"} for t in range(1 if alone else 2)],
        "parameters": {"weight": 1.0, **READ_AS_SAID.get(method, {})},
    }
    given = OWN if method == "own" else theirs
    plan, _ = plan_recipe(parse_recipe(given))
    read = []
    groups = worker._groups

    def noting(*given):
        for group in groups(*given):
            base = next(own for own in (group.base, *group.updates) if own is not None)
            read.append((1 + len(group.models or group.updates)) * base.nbytes)
            yield group

    monkeypatch.setattr(worker, "_groups", noting)
    merge_in_memory(given, folder, 0)
    said = sum(item.pass_bytes for item in plan.items)
    assert plan.read_bytes == said + sum(item.read_bytes for item in plan.items)
    assert said <= sum(read)
    assert sum(read) < 1.1 * said or method == "model_stock"


@pytest.mark.parametrize("method", ["own", "ties", "breadcrumbs"])
def test_what_is_not_finite_is_named_with_its_place(method, folder, looked_over, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder / "llama" / "t0", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][21, 3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    looked_over()
    own = {**OWN, "experts": {"a": str(broken)}}
    theirs = {
        "merge_method": method,
        "base_model": "./llama/base",
        "models": [{"model": str(broken)}, {"model": "./llama/t1"}],
        "parameters": {"weight": 1.0, "density": 0.4},
    }
    with pytest.raises(NotFiniteError, match=r"embed_tokens.* NaN or Inf .*\[21, 3\]"):
        merge_in_memory(own if method == "own" else theirs, folder, 0)
