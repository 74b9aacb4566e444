"""Predicted retention: the same while merging and afterwards, from files of every kind."""

import peft
import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.front import api
from covmerge.plan.recipe import parse_recipe
from tests.e2e.models import build, save_family

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.covering(1)
@pytest.mark.parametrize("methods", [("ace", "ties"), ("average", "dare_ties")])
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_comparison_says_what_a_report_says(family, methods, tmp_path):
    base, experts = save_family(family, tmp_path)
    compared = covmerge.compare(base, experts, methods, tmp_path / "out")
    for row in compared.rows:
        seen = api.report(tmp_path / "out" / row.method, spectra="none").inspection
        assert set(row.retention) == set(experts)
        assert seen.retention() == pytest.approx(row.retention, abs=1e-3)
        for layer in seen.matrices:
            assert set(layer.along) == {
                e for e, kept in layer.retention.items() if kept is not None
            }
        layers = {layer.name: layer.retention for layer in seen.matrices}
        assert layers.keys() == row.retention_by_layer.keys()
        for name, kept in row.retention_by_layer.items():
            assert layers[name] == pytest.approx(kept, rel=1e-3, abs=1e-3)


def test_what_is_kept_along_an_update(tmp_path):
    generator = torch.Generator().manual_seed(0)
    name = "h.0.up.weight"
    one, other = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    other -= (other * one).sum() / one.square().sum() * one  # they do not meet
    tensors = {"base": torch.zeros(6, 5), "a": one.float(), "b": other.float()}
    for source, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{source}.safetensors")
    base, *experts = (tmp_path / f"{source}.safetensors" for source in tensors)
    out = tmp_path / "out"
    for scale, kept in ((0.25, 0.4375), (1.0, 1.0), (1.5, 0.75)):
        covmerge.merge(base, experts, "task_arithmetic", out, scale=scale, overwrite=True)
        (layer,) = api.report(out, spectra="none").inspection.matrices
        # 1 − (1 − scale)² of each, whatever the other adds.
        assert list(layer.along.values()) == pytest.approx([kept, kept], abs=1e-6)


def test_where_nothing_is_a_matrix_nothing_is_predicted():
    base = {"norm.weight": torch.ones(4)}
    experts = [{"norm.weight": torch.full((4,), 2.0)}, {"norm.weight": torch.zeros(4)}]
    compared = covmerge.compare(base, experts, ["average", "ties"])
    assert [dict(row.retention) for row in compared.rows] == [{}, {}]
    assert compared.recommended is None


@pytest.mark.parametrize("form", ["model", "adapter"])
def test_adapters(form, tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        model = peft.get_peft_model(
            build("bert"), peft.LoraConfig(r=2, target_modules=["query", "dense"])
        )
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.02)
        model.save_pretrained(tmp_path / name)
    experts = {name: tmp_path / name for name in ("a", "b")}
    covmerge.merge(tmp_path / "base", experts, "actmat", tmp_path / "out", form=form)
    compared = covmerge.compare(tmp_path / "base", experts, ["average", "tsv_m"])
    assert compared.recommended is None and compared.adapters == ("a", "b")
    with_full = {"a": tmp_path / "a", "full": tmp_path / "base"}
    found = covmerge.inspect(tmp_path / "base", with_full, spectra="none")
    assert found.adapters == ("a",) and found.as_json()["adapters"] == ["a"]
    kept = api.report(tmp_path / "out").inspection.retention()
    assert kept == pytest.approx({"a": 1.0, "b": 1.0}, abs=0.02)


def test_an_expert_is_looked_at_where_its_weight_is_0(tmp_path):
    generator = torch.Generator().manual_seed(0)
    names = [f"h.{block}.{kind}.weight" for block in range(2) for kind in ("up", "down")]
    base = {name: torch.randn(4, 4, generator=generator) for name in names}
    for expert, own in {"base": 0.0, "a": 0.1, "b": 0.1}.items():
        moved = {n: w + own * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        save_file(moved, tmp_path / f"{expert}.safetensors")
    weight = {"by_name": [{"match": "*.up.*", "value": 0}, {"match": "h.0.*", "value": 0}]}
    experts = {
        "a": {"source": str(tmp_path / "a.safetensors"), "weight": weight},
        "b": {
            "source": str(tmp_path / "b.safetensors"),
            "weight": {"by_name": [{"match": "h.0.*", "value": 0}]},
        },
    }
    base_file = str(tmp_path / "base.safetensors")
    recipe = parse_recipe({"base": base_file, "experts": experts, "method": "average"})
    api.run_recipe(recipe, tmp_path / "out")
    seen = {
        layer.name: layer.retention for layer in api.report(tmp_path / "out").inspection.matrices
    }
    assert seen.keys() == set(names)
    assert seen["h.1.up.weight"]["b"] == pytest.approx(1.0, abs=1e-5)
    assert seen["h.1.up.weight"]["a"] < 0.9
    assert seen["h.0.up.weight"] == {"a": 0.0, "b": 0.0}
