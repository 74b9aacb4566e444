"""Adapters of layers that transformers makes of parts of a tensor: q, k and v of one in the files."""

import copy

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.run.recompute import recompute

pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
FAMILIES = ["NomicBert", "JinaEmbeddingsV3", "Gte", "Molmo2Text"]
OF_SOME = {
    "Molmo2Text": {"num_key_value_heads": 1, "head_dim": 8}
}  # k and v have fewer rows than q
Q, QV, KO = ["q_proj"], ["q_proj", "v_proj"], ["k_proj", "o_proj"]
CASES = {
    "lora": peft.LoraConfig(r=2, lora_alpha=3, target_modules=QV),
    "lora with biases": peft.LoraConfig(r=2, bias="lora_only", target_modules=KO),
    "dora": peft.LoraConfig(r=2, use_dora=True, target_modules=KO),
    "whole": peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["v_proj"]),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=Q),
    "hra": peft.HRAConfig(r=2, target_modules=Q),
    "ia3": peft.IA3Config(target_modules=QV, feedforward_modules=[]),
    "ia3 of inputs": peft.IA3Config(target_modules=Q, feedforward_modules=Q),
    "fourier": peft.FourierFTConfig(n_frequency=9, target_modules=Q),
    "vera": peft.VeraConfig(r=2, target_modules=QV),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A folder with a base, and the class of its model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        **SIZES, **OF_SOME.get(request.param, {})
    )
    model = moved(getattr(transformers, f"{request.param}Model")(config).float(), 1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "base")
    assert any(is_fused(name) for name in weights(folder / "base"))
    return folder, type(model)


def is_fused(name):
    return "qkv" in name.lower() or "att_proj" in name


def moved(model, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def weights(folder):
    return load_file(folder / "model.safetensors")


def adapted(family, out, config, seed=2):
    """Save an adapter, and the model that PEFT makes of it."""
    folder, kind = family
    base = kind.from_pretrained(folder / "base", dtype=torch.float32)
    model = moved(peft.get_peft_model(base, copy.deepcopy(config)), seed)
    model.save_pretrained(out / "adapter")
    model.merge_and_unload().save_pretrained(out / "folded")
    return weights(out / "folded")


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("JinaEmbeddingsV3", case) for case in CASES),
        ("NomicBert", "dora"),
        ("Gte", "ia3"),
        ("Molmo2Text", "dora"),
        ("Molmo2Text", "hra"),
    ],
    indirect=["family"],
)
def test_its_update_is_what_peft_makes_of_it(family, tmp_path, case):
    """Of the part that it is of, and of no other: OFT's, HRA's and IA3's shapes fit the whole as well."""
    expected = adapted(family, tmp_path, CASES[case])
    experts = {"a": tmp_path / "adapter"}
    base = family[0] / "base"
    covmerge.merge(base, experts, "task_arithmetic", tmp_path / "out", scale=1.0)
    assert_close(weights(tmp_path / "out"), expected)
    assert covmerge.verify(tmp_path / "out").ok
    assert recompute(tmp_path / "out", tensors=3).ok


def test_an_adapter_made_of_adapters_names_the_parts(family, tmp_path):
    folder, kind = family
    base = weights(folder / "base")
    both = [
        adapted(family, tmp_path / n, peft.LoraConfig(r=2, target_modules=those), seed)
        for n, those, seed in (("a", QV, 2), ("b", ["q_proj", "k_proj"], 3))
    ]
    experts = {n: tmp_path / n / "adapter" for n in "ab"}
    covmerge.merge(
        folder / "base", experts, "task_arithmetic", tmp_path / "out", scale=1.0, form="adapter"
    )
    assert covmerge.verify(tmp_path / "out").ok
    model = kind.from_pretrained(folder / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload()
    model.save_pretrained(tmp_path / "folded")
    total = {n: sum(one[n] - tensor for one in both) + tensor for n, tensor in base.items()}
    assert_close(weights(tmp_path / "folded"), total)


def test_an_adapter_made_of_a_full_model_holds_the_parts(family, tmp_path):
    folder, kind = family
    base = kind.from_pretrained(folder / "base", dtype=torch.float32)
    moved(base, 4).save_pretrained(tmp_path / "full")
    experts = {"a": tmp_path / "full"}
    settings = {"form": "adapter", "rank": 16, "whole": True}
    covmerge.merge(
        folder / "base", experts, "task_arithmetic", tmp_path / "out", scale=1.0, **settings
    )
    model = kind.from_pretrained(folder / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload()
    model.save_pretrained(tmp_path / "folded")
    ours, theirs = weights(tmp_path / "folded"), weights(tmp_path / "full")
    for name in ours:
        if is_fused(name):
            assert torch.allclose(ours[name], theirs[name], atol=1e-5), name
