"""Predicted retention: the same while merging and afterwards, from files of every kind."""

import peft
import pytest
import torch

import covmerge
from covmerge import api
from covmerge.comparison import SPENT
from tests.e2e.models import build, fine_tuned, save_family

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize("methods", [("ace", "ties"), ("average", "dare_ties")])
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_comparison_says_what_a_report_says(family, methods, tmp_path):
    base, experts = save_family(family, tmp_path)
    compared = covmerge.compare(base, experts, methods, tmp_path / "out")
    for row in compared.rows:
        seen = api.report(tmp_path / "out" / row.method, spectra="none").inspection
        assert set(row.retention) == set(experts)
        assert seen.retention() == pytest.approx(row.retention, abs=1e-3)
        layers = {layer.name: layer.retention for layer in seen.matrices}
        assert layers.keys() == row.retention_by_layer.keys()
        for name, kept in row.retention_by_layer.items():
            assert layers[name] == pytest.approx(kept, rel=1e-3, abs=1e-3)


def test_the_recommended_method_serves_the_worst_served_expert_best(tmp_path):
    model = build("bert")
    model.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        fine_tuned(model, seed).save_pretrained(tmp_path / f"e{seed}")
    base, experts = tmp_path / "base", [tmp_path / "e1", tmp_path / "e2"]
    methods = ("average", "tsv_m", "actmat", "cart")
    compared = covmerge.compare(base, experts, methods)
    least = {row.method: min(row.retention.values()) for row in compared.rows}
    assert max(least, key=least.get) in SPENT
    others = {name: kept for name, kept in least.items() if name not in SPENT}
    assert compared.recommended == max(others, key=others.get)
    assert compared.as_json()["recommended"] == compared.recommended


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
    assert compared.recommended is None and compared.adapters
    kept = api.report(tmp_path / "out").inspection.retention()
    assert kept == pytest.approx({"a": 1.0, "b": 1.0}, abs=0.02)
