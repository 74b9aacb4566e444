"""What errors advise about experts, statistics and outputs that do not fit: followed."""

import json
from contextlib import closing

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import covmerge
from covmerge.errors import CovmergeError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import StatisticsFile
from covmerge.plan.statistics.write import Contents, Statistic, write_statistics
from tests.adapters.models import llama, make, vit
from tests.advised import advice, rules_in
from tests.cli.runs import save_plain, statistics_for

NAME, NORM = "layers.0.fc.weight", "norm.weight"
BASE = {NAME: torch.eye(8), NORM: torch.ones(8)}
EXPERT = {name: tensor + 0.1 for name, tensor in BASE.items()}
# A base and an expert that are refused, the advice, and those that follow it.
PAIRS = {
    "another width": (
        (BASE | {NAME: torch.eye(6)}, EXPERT),
        advice("Pass the base that it was trained from"),
    ),
    "codes": (
        (BASE | {NAME: torch.ones(8, 8, dtype=torch.int8)}, EXPERT),
        advice("Pass the quantised one as it was before"),
    ),
}


def keep_layers(file, out, wanted, also=None):
    """Write a statistics file of some of the layers of another."""
    held = StatisticsFile.open(file)
    names = [name for name in held.names("gram") if wanted(name)]
    found = [Statistic((name,), held.read("gram", name), 1) for name in names]
    if also is not None:
        found.append(Statistic((also,), torch.eye(4), 1))
    with closing(open_checkpoint(held.about.source)) as model:
        contents = Contents(model, {"gram": found}, examples=1)
        write_statistics({out: contents}, overwrite=True)


@pytest.mark.parametrize(("refused", "said"), PAIRS.values(), ids=PAIRS)
def test_experts_of_another_base(refused, said):
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(refused[0], {"a": refused[1]}, "average")
    found = covmerge.merge(BASE, {"a": EXPERT}, "average").tensors
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_head_under_another_name(tmp_path):
    """A tied base, and an expert of one more tensor, which looks like the head."""
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=True)
    for name in ("base", "a"):
        model.save_pretrained(tmp_path / name)
    file = tmp_path / "a" / "model.safetensors"
    state = {n: t + 0.001 for n, t in load_file(file).items()}
    head = state["model.embed_tokens.weight"].clone() + 0.01
    save_file(state | {"output.weight": head}, file, {"format": "pt"})
    given = (tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    said = advice("embedding ({}): save the expert again under the base's names")
    rules = [{"match": "output.weight", "use": "head"}]
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(*given, rules=rules)
    save_file(state | {"lm_head.weight": head}, file, {"format": "pt"})
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    covmerge.merge(*given)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in (state | {"lm_head.weight": head}).items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("how", ["collect", "rule"])
def test_statistics_of_a_layer_that_one_expert_lacks(how, tmp_path):
    save_plain(tmp_path)
    stats = statistics_for("regmean", tmp_path)
    layer = "layers.1.mlp.up_proj.weight"
    keep_layers(stats["b"], stats["b"], lambda own: own != layer)
    experts = {n: tmp_path / f"{n}.safetensors" for n in "ab"}
    base, few = tmp_path / "base.safetensors", {"few_rows": "allow"}
    said = advice("collect it for all experts, or add {}.")
    with pytest.raises(CovmergeError, match=said) as told:
        covmerge.merge(base, experts, "regmean", statistics=stats, tensors=few)
    rules = []
    if how == "collect":
        stats = statistics_for("regmean", tmp_path)
    else:
        rules = rules_in(str(told.value))
    given = {"statistics": stats, "rules": rules, "tensors": few}
    found = covmerge.merge(base, experts, "regmean", **given).tensors
    means = sum(load_file(path)[layer] for path in experts.values()) / 2
    assert torch.allclose(found[layer], means, atol=1e-6) == (how == "rule")


@pytest.mark.parametrize("how", ["model", "base"])
def test_a_tensor_without_a_place_in_an_adapter(how, tmp_path):
    """A parameter of a module that has others inside, which `modules_to_save` would store too."""
    make(vit, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "a")
    torch.manual_seed(0)
    vit().save_pretrained(tmp_path / "base")
    file, token = tmp_path / "a" / "adapter_model.safetensors", "vit.embeddings.cls_token"
    trained = torch.randn(1, 1, 16)
    save_file(load_file(file) | {f"base_model.model.{token}": trained}, file, {"format": "pt"})
    given = (tmp_path / "base", {"a": tmp_path / "a"}, "average")
    said = advice("or add {} (or head, to keep it per expert).")
    with pytest.raises(CovmergeError, match=said) as told:
        covmerge.merge(*given, tmp_path / "x", form="adapter")
    right = covmerge.merge(*given).tensors
    torch.testing.assert_close(right[token], trained)
    if how == "model":
        covmerge.merge(*given, tmp_path / "out", form="model")
        found = load_file(tmp_path / "out" / "model.safetensors")
    else:
        (rule,) = rules_in(str(told.value))
        covmerge.merge(*given, tmp_path / "out", form="adapter", rules=[rule])
        found = covmerge.merge(tmp_path / "base", {"x": tmp_path / "out"}, "average").tensors
        right[token] = load_file(tmp_path / "base" / "model.safetensors")[token]
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
