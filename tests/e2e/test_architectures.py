"""From files to files: transformers saves the inputs and loads the result."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from tests.e2e.models import build, fine_tuned, run, save_family

# architecture -> a linear layer of the module tree, how to orient its weight, its parameter name
LAYERS = {
    "bert": ("encoder.layer.0.intermediate.dense.weight", lambda w: w),
    "gpt2": ("transformer.h.0.mlp.c_fc.weight", lambda w: w.T),
    "llama": ("model.layers.1.mlp.down_proj.weight", lambda w: w),
    "mixtral": ("model.layers.0.mlp.experts.down_proj", lambda w: w[1]),
    "gpt_oss": ("model.layers.0.mlp.experts.down_proj", lambda w: w[2].T),
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wi.weight", lambda w: w),
    "vit": ("layers.0.attention.q_proj.weight", lambda w: w),
    "clip": ("vision_model.encoder.layers.0.mlp.fc1.weight", lambda w: w),
}


@pytest.mark.parametrize("name", LAYERS)
def test_merge_and_load(name, tmp_path):
    base_path, experts = save_family(name, tmp_path)
    result = covmerge.merge(base_path, experts, method="ace", out=tmp_path / "out", eps=1e-3)
    assert result.verification.ok

    merged = type(build(name)).from_pretrained(tmp_path / "out").eval()
    assert torch.isfinite(run(merged)).all()
    base = build(name)
    models = [fine_tuned(base, seed=t, scale=0.005 * 3**t) for t in (1, 2, 3)]

    parameter, orient = LAYERS[name]
    if parameter not in dict(base.named_parameters()):
        pytest.fail(f"{parameter} not in {sorted(dict(base.named_parameters()))}")
    if name != "mixtral":  # stored as gate and up apart; down_proj is one matrix either way
        updates = [
            orient(m.get_parameter(parameter) - base.get_parameter(parameter)) for m in models
        ]
        expected = covmerge.merge_layer([u.detach() for u in updates], "ace", eps=1e-3)
        actual = orient(merged.get_parameter(parameter) - base.get_parameter(parameter))
        assert torch.allclose(actual, expected, atol=1e-5), (actual - expected).abs().max()

    # Vectors are averaged, as in the papers.
    bias = next(n for n, p in base.named_parameters() if p.dim() == 1)
    mean = torch.stack([m.get_parameter(bias) for m in models]).mean(0)
    assert torch.allclose(merged.get_parameter(bias), mean, atol=1e-6)


def test_stored_conv1d_reproduces_the_authors_orientation(tmp_path):
    base_path, experts = save_family("gpt2", tmp_path)
    base = build("gpt2")
    models = [fine_tuned(base, seed=t, scale=0.005 * 3**t) for t in (1, 2, 3)]
    name = "transformer.h.0.attn.c_attn.weight"
    updates = [(m.get_parameter(name) - base.get_parameter(name)).detach() for m in models]
    stored = covmerge.merge(base_path, experts, method="ace", tensors={"conv1d": "stored"}).tensors[
        name
    ]
    expected = covmerge.merge_layer(updates, "ace", eps=4e-2)  # the paper's ε for GPT-2
    assert torch.allclose(stored - base.get_parameter(name), expected, atol=1e-5)


def test_a_parameter_that_goes_by_the_family_is_told_where_none_is_named(tmp_path):
    base_path, experts = save_family("gpt2", tmp_path)
    states = (
        build("gpt2").state_dict(),
        {n: load_file(f"{e}/model.safetensors") for n, e in experts.items()},
    )
    folder, held = covmerge.merge(base_path, experts, "ace"), covmerge.merge(*states, "ace")
    said = (
        "no config.json names the model's family, by which the eps of ace goes (gpt2 0.04, roberta-base "
        "0.0002): 1e-05 was taken"
    )
    assert (said in folder.notes, said in held.notes) == (False, True)
    assert said not in covmerge.merge(*states, "ace", eps=4e-2).notes
    assert said not in covmerge.merge(*states, "auto").notes


def test_fused_projection_split(tmp_path):
    base_path, experts = save_family("gpt2", tmp_path)
    base = build("gpt2")
    models = [fine_tuned(base, seed=t, scale=0.005 * 3**t) for t in (1, 2, 3)]
    name = "transformer.h.0.attn.c_attn.weight"
    split = covmerge.merge(base_path, experts, method="actmat", tensors={"fused": "split"}).tensors[
        name
    ]
    for part in range(3):
        rows = slice(16 * part, 16 * (part + 1))
        updates = [
            (m.get_parameter(name) - base.get_parameter(name)).detach().T[rows] for m in models
        ]
        actual = (split - base.get_parameter(name)).T[rows]
        assert torch.allclose(actual, covmerge.merge_layer(updates, "actmat"), atol=1e-5)


def test_shards_and_dtype(tmp_path):
    base_path, experts = save_family("llama", tmp_path, max_shard_size="5KB")
    assert len(list(base_path.glob("*.safetensors"))) > 1
    whole = covmerge.merge(base_path, experts, method="average").tensors
    result = covmerge.merge(
        base_path,
        experts,
        method="average",
        out=tmp_path / "out",
        out_dtype="bfloat16",
        shard_size="4KB",
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert 0 < result.stats["totals"]["rounding_loss"] < 0.3
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.bfloat16
    for name, tensor in whole.items():
        assert torch.equal(merged.get_parameter(name), tensor.to(torch.bfloat16))


def test_heads_are_kept_per_expert(tmp_path):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    encoder = transformers.BertModel(config)
    encoder.save_pretrained(tmp_path / "base")
    experts = {}
    for name, labels in (("topic", 3), ("tone", 2)):
        config.num_labels = labels
        model = transformers.BertForSequenceClassification(config)
        model.bert.load_state_dict(fine_tuned(encoder, seed=labels).state_dict())
        model.save_pretrained(tmp_path / name)
        experts[name] = tmp_path / name
    result = covmerge.merge(tmp_path / "base", experts, out=tmp_path / "out")
    assert set(result.stats["heads"]) == {"topic", "tone"}
    for name, labels in (("topic", 3), ("tone", 2)):
        head = load_file(tmp_path / "out" / "heads" / f"{name}.safetensors")
        assert head["classifier.weight"].shape == (labels, 16)
        own = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(head[key], own[key]) for key in head)
    transformers.AutoModel.from_pretrained(tmp_path / "out")


def test_manifest_says_what_happened_to_every_tensor(tmp_path):
    base_path, experts = save_family("gpt2", tmp_path)
    covmerge.merge(base_path, experts, "ace", out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "covmerge.json").read_text())
    assert manifest["family"] == "gpt2"
    assert manifest["sources"]["base"]["content"]["model.safetensors"].startswith("sha256:")
    entry = manifest["tensors"]["transformer.h.0.mlp.c_fc.weight"]
    assert entry["role"] == "conv1d"
    assert entry["rule"] == "ace"
    assert set(entry["update_norm"]) == set(experts)
    assert set(entry["matrices"][0]) >= {"gamma", "gate_fired", "route", "jitter", "rcond"}
    roles = {tensor["role"] for tensor in manifest["tensors"].values()}
    assert roles == {"embedding", "conv1d", "norm", "bias"}


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "actmat", "ace"])
def test_in_memory_equals_on_disk(method, tmp_path):
    base_path, experts = save_family("gpt2", tmp_path)
    covmerge.merge(base_path, experts, method=method, out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = covmerge.merge(base_path, experts, method=method).tensors
    assert stored.keys() == kept.keys()
    assert all(torch.equal(stored[name], kept[name]) for name in kept)
    # A plain state dict has no config: GPT-2's orientation comes from its names.
    states = {n: load_file(p / "model.safetensors") for n, p in experts.items()}
    params = {"eps": 4e-2} if method == "ace" else {}
    from_dicts = covmerge.merge(
        load_file(base_path / "model.safetensors"), states, method=method, **params
    ).tensors
    assert all(torch.equal(from_dicts[name], kept[name]) for name in kept)


def test_order_and_weights(tmp_path):
    base_path, experts = save_family("bert", tmp_path, experts=2)
    first = covmerge.merge(base_path, experts, "average", weights={"e1": 3.0}).tensors
    second = covmerge.merge(base_path, list(experts.values()), "average", weights=[3, 1]).tensors
    assert all(torch.equal(first[name], second[name]) for name in first)
