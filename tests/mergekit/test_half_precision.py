"""What steps in half precision lose of an update is measured and said, against sums in float64."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from covmerge import verify
from covmerge.front.cli import app
from covmerge.methods import get
from covmerge.run.engine.layer import LayerUpdates
from tests.advised import advice
from tests.cli.runs import words

NAME = "model.layers.0.mlp.up_proj.weight"
WEIGHTS = {"a": 0.7, "b": 0.4}


def norm(difference):
    return float(torch.linalg.vector_norm(difference))


@pytest.fixture
def merge(tmp_path, monkeypatch):
    """Merge tensors by a recipe of mergekit's: the output's tensor, its manifest, what is said."""
    monkeypatch.chdir(tmp_path)

    def merged(tensors, recipe):
        for model, tensor in tensors.items():
            (tmp_path / model).mkdir(exist_ok=True)
            save_file({NAME: tensor}, tmp_path / model / "model.safetensors")
        models = ", ".join(
            f"{{model: ./{n}, parameters: {{weight: {w}}}}}" for n, w in WEIGHTS.items()
        )
        (tmp_path / "their.yml").write_text(f"{recipe}\nbase_model: ./base\nmodels: [{models}]\n")
        ran = CliRunner().invoke(app, ["merge", "their.yml", "out", "--overwrite"])
        assert ran.exit_code == 0, ran.output
        manifest = json.loads((tmp_path / "out" / "covmerge.json").read_text())
        made = load_file(tmp_path / "out" / "model.safetensors")[NAME]
        (said,) = [own.detail for own in verify(tmp_path / "out").checks if own.name == "rounding"]
        card = (tmp_path / "out" / "README.md").read_text()
        return made, manifest, [words(ran.output), said, card]

    return merged


def drawn(shape=(48, 64), size=0.02, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(shape, generator=generator)
    updates = {name: size * torch.randn(shape, generator=generator) for name in WEIGHTS}
    experts = {name: (base + own).to(dtype) for name, own in updates.items()}
    return {"base": base.to(dtype), **experts}


def in_float64(tensors):
    """Base, and Σ w_t (W_t − W_0)."""
    base = tensors["base"].double()
    return base, sum(w * (tensors[n].double() - base) for n, w in WEIGHTS.items())


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_is_that_of_the_sum_in_float64(merge, dtype, held):
    tensors = drawn(dtype=getattr(torch, held), size=0.002)
    made, manifest, texts = merge(tensors, f"merge_method: task_arithmetic\ndtype: {dtype}")
    base, update = in_float64(tensors)
    wanted = norm(made.double() - base - update) / norm(update)
    totals = manifest["totals"]
    assert totals["rounding_loss"] == 0.0
    assert totals["arithmetic_loss"] == pytest.approx(wanted, rel=1e-3)
    assert manifest["tensors"][NAME]["arithmetic_loss"] == totals["arithmetic_loss"]
    for said in texts:
        assert f"omputing in {dtype} lost {wanted:.2%}" in said.replace("\n", " ")


def test_of_a_tensor_in_parts_it_is_measured_in_the_first(merge, monkeypatch):
    tensors, asked = drawn(shape=(600, 1024), dtype=torch.bfloat16, size=0.002), []
    whole = LayerUpdates.unrounded

    def unrounded(layer, item, *given):
        asked.append(item.rows)
        return whole(layer, item, *given)

    monkeypatch.setattr(LayerUpdates, "unrounded", unrounded)
    made, manifest, _ = merge(tensors, "merge_method: task_arithmetic\ndtype: bfloat16")
    assert asked == [range(256)]
    base, update = in_float64(tensors)
    entry = manifest["tensors"][NAME]
    assert entry["unrounded_norm"] == pytest.approx(norm(update), rel=0.01)
    assert entry["arithmetic_loss"] == pytest.approx(
        norm(made.double() - base - update) / norm(update), rel=0.01
    )


def test_a_method_gets_weights_as_they_are_stored_where_it_would_cast_them_back(merge, monkeypatch):
    method, seen = get("generalized_task_arithmetic"), []
    kernel = method.kernel

    def spied(group, **parameters):
        seen.append({tensor.dtype for tensor in (group.base, *group.models)})
        return kernel(group, **parameters)

    monkeypatch.setitem(vars(method), "kernel", spied)
    for held in (torch.bfloat16, torch.float32):
        merge(drawn(dtype=held), "merge_method: task_arithmetic\ndtype: bfloat16")
    # The first of each two measures what half-precision steps lose.
    single = {torch.float32}
    assert seen == [single, {torch.bfloat16}, single, single]


def test_it_is_said_where_it_was_not_measured(merge):
    tensors = drawn(shape=(1025, 1024), dtype=torch.bfloat16)
    recipe = "merge_method: ties\nparameters: {density: 0.5}\ndtype: bfloat16"
    _, manifest, texts = merge(tensors, recipe)
    assert "arithmetic_loss" not in manifest["totals"]
    said = advice(
        "{}. Each step rounded the weights. To lose less, merge with `dtype: float32` in the"
    )
    for text in map(words, texts):
        assert "was not measured" in text
        assert re.search(said, text)
    _, manifest, texts = merge(
        tensors, recipe.replace("dtype: bf", "dtype: float32\nout_dtype: bf")
    )
    assert not any("computing in" in said for said in texts)
    assert manifest["totals"]["rounding_loss"] > 0.0


def test_nothing_is_said_of_float32(merge):
    _, manifest, texts = merge(
        drawn(), "merge_method: task_arithmetic\ndtype: float32\nout_dtype: bfloat16"
    )
    assert manifest["totals"]["rounding_loss"] > 0.1
    assert not any("computing in" in said for said in texts)
