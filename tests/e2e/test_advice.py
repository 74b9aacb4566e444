"""What errors advise about adapters and shards, done literally and followed to its end."""

import json
import re
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

import covmerge
from covmerge.errors import CheckpointError, TensorError
from covmerge.files.checkpoints.folder import choose_weights
from tests.adapters.models import llama
from tests.advised import advice
from tests.cli.runs import covmerge as command

TOKENS = torch.arange(6)[None]


def adapter(model, config):
    with warnings.catch_warnings():  # of transformers and PEFT about each other
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def trained(model, folder, **settings):
    """An adapter with random factors; the model with it."""
    adapted = adapter(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | settings))
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            tensor.data = 0.3 * torch.randn_like(tensor)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_resized_vocabulary(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(34)
    adapted = trained(model, tmp_path / "a")
    with pytest.raises(
        TensorError,
        match=advice(
            "Resize the base as well (transformers: model.resize_token_embeddings({}), then"
        ),
    ):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    resized = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    resized.resize_token_embeddings(34)
    resized.save_pretrained(tmp_path / "new")
    covmerge.merge(tmp_path / "new", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(TOKENS).logits, adapted(TOKENS).logits)


def test_replicated_layers(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = trained(model, tmp_path / "a", layer_replication=[[0, 2], [1, 3]])
    with pytest.raises(
        CheckpointError,
        match=advice(
            "passthrough), set layer_replication to null in adapter_config.json, and merge"
        ),
    ):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    slices = [
        {"sources": [{"model": str(tmp_path / "base"), "layer_range": layers}]}
        for layers in ([0, 2], [1, 3])
    ]
    (tmp_path / "stack.yml").write_text(
        json.dumps({"merge_method": "passthrough", "slices": slices})
    )
    command("merge", tmp_path / "stack.yml", tmp_path / "stacked")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_replication": None}))
    covmerge.merge(tmp_path / "stacked", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(TOKENS).logits, adapted(TOKENS).logits)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 3, groups=4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.conv(x))


def test_a_convolution_with_groups(tmp_path):
    base = Net()
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    start = base.fc.weight.detach().clone()
    config = LoraConfig(r=4, target_modules=["conv", "fc"], init_lora_weights=False)
    adapted = adapter(base, config)
    adapted.save_pretrained(tmp_path / "a")
    with pytest.raises(
        CheckpointError,
        match=advice(
            "or remove its tensors from a copy of the adapter, and it from target_modules"
        ),
    ):
        covmerge.merge(tmp_path / "base.safetensors", {"a": tmp_path / "a"}, "average")
    file, config = (
        tmp_path / "a" / n for n in ("adapter_model.safetensors", "adapter_config.json")
    )
    factors = {name: t for name, t in load_file(file).items() if ".conv." not in name}
    save_file(factors, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["fc"]}))
    merged = covmerge.merge(tmp_path / "base.safetensors", {"a": tmp_path / "a"}, "average").tensors
    scale = 8 / 4
    down, up = (factors[f"base_model.model.fc.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(merged["fc.weight"], start + scale * up @ down)


def test_patterns_whose_order_decides_are_told(tmp_path):
    patterns = {"q_proj": 4, "layers.1.self_attn.q_proj": 16}  # PEFT sorts them when it saves
    base = llama().state_dict()
    trained(llama(), tmp_path / "ranks", rank_pattern=patterns)
    trained(llama(), tmp_path / "alphas", alpha_pattern=patterns)
    notes = covmerge.merge(base, {"a": tmp_path / "ranks"}, "average").notes
    (note,) = [note for note in notes if "rank_pattern" in note]
    assert re.search(r"the first gives 16, the last 4\. 4 was taken, the rank that is stored", note)
    notes = covmerge.merge(base, {"a": tmp_path / "alphas"}, "average").notes
    (note,) = [note for note in notes if "alpha_pattern" in note]
    assert re.search(r"the first gives 16, the last 4\. 16 was taken, what PEFT reads too", note)


def slices_of(folder, tensors):
    """What two ranks of torch's HuggingFaceStorageWriter leave (torch 2.13), each with half of the rows."""
    folder.mkdir()
    for rank in range(2):
        halves = {name: t.chunk(2)[rank].contiguous() for name, t in tensors.items()}
        offsets = {
            n: {"saved_offsets": [rank * len(t), *[0] * (t.ndim - 1)]} for n, t in halves.items()
        }
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(halves, folder / name, metadata=about)


def test_shards_of_ranks(tmp_path):
    """They are read as they lie; of a folder's listing alone, as on the Hub, they are refused."""
    base = {"fc.weight": torch.eye(4), "b.weight": torch.ones(6, 2)}
    expert = {name: tensor + 0.5 for name, tensor in base.items()}
    slices_of(tmp_path / "a", expert)
    said = advice("with a part of the tensors for each rank. Put them together first: consolidate_")
    with pytest.raises(CheckpointError, match=said):
        choose_weights([path.name for path in (tmp_path / "a").iterdir()], "org/name")
    (tmp_path / "new").mkdir()
    consolidate_safetensors_files(
        str(tmp_path / "a"), str(tmp_path / "new"), fqn_to_index_mapping=dict.fromkeys(expert, 1)
    )
    for source in ("a", "new"):
        merged = covmerge.merge(base, {"a": tmp_path / source}, "average").tensors
        for name, tensor in expert.items():
            torch.testing.assert_close(merged[name], tensor)


def mlx_adapter(folder, rank=3, scale=20.0, factors=None, **fields):
    """As mlx-lm 0.32.2 writes it."""
    folder.mkdir()
    torch.manual_seed(1)
    q = "model.layers.0.self_attn.q_proj"
    factors = factors or {f"{q}.lora_a": torch.randn(16, 3), f"{q}.lora_b": torch.randn(3, 16)}
    save_file(factors, folder / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "num_layers": 1, "optimizer": "adam"} | fields
    config |= {"lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return q, factors


def test_an_adapter_of_mlx(tmp_path):
    """mlx-lm 0.32.2 fuses weight + ((scale * lora_b.T) @ lora_a.T)."""
    base = {n: 9 * t for n, t in llama().state_dict().items()}
    q, factors = mlx_adapter(tmp_path / "a")
    base[f"{q}.weight"] = 400 * torch.randn(16, 16)
    a, b = (factors[f"{q}.lora_{side}"].double().numpy() for side in "ab")
    right = base[f"{q}.weight"].double() + torch.from_numpy((20.0 * b.T) @ a.T)
    for source in ("a", "a/adapters.safetensors"):
        merged = covmerge.merge(base, {"a": tmp_path / source}, "average").tensors
        torch.testing.assert_close(merged[f"{q}.weight"].double(), right, rtol=1e-6, atol=1e-5)
        for name in base.keys() - {f"{q}.weight"}:
            assert torch.equal(merged[name], base[name])


def test_other_forms_of_mlx(tmp_path):
    """DoRA divides by lengths of rows; an embedding's update is lora_a lora_b; "full" has no factors."""
    base = {
        name: tensor.double()
        for name, tensor in llama(tie_word_embeddings=True).state_dict().items()
    }
    q, factors = mlx_adapter(tmp_path / "dora", fine_tune_type="dora")
    more = factors | {f"{q}.m": torch.rand(16) + 1}
    save_file(more, tmp_path / "dora" / "adapters.safetensors")
    turned = base[f"{q}.weight"] + 20 * (factors[f"{q}.lora_a"] @ factors[f"{q}.lora_b"]).T.double()
    expected = {f"{q}.weight": turned * (more[f"{q}.m"].double() / turned.norm(dim=1))[:, None]}
    table = "model.embed_tokens"
    rows = len(base[f"{table}.weight"])
    own = {f"{table}.lora_a": torch.randn(rows, 3), f"{table}.lora_b": torch.randn(3, 16)}
    mlx_adapter(tmp_path / "table", factors=own)
    added = (
        base[f"{table}.weight"] + 20 * (own[f"{table}.lora_a"] @ own[f"{table}.lora_b"]).double()
    )
    whole = {f"{q}.weight": torch.randn(16, 16)}
    mlx_adapter(tmp_path / "full", factors=whole, fine_tune_type="full")
    for name, right in (
        ("dora", expected),
        ("table", {f"{table}.weight": added}),
        ("full", {name: value.double() for name, value in whole.items()}),
    ):
        merged = covmerge.merge(base, {"a": tmp_path / name}, "linear").tensors
        assert merged.keys() == base.keys()
        for key, value in (base | right).items():
            torch.testing.assert_close(merged[key], value, rtol=1e-5, atol=1e-5)


def test_adapters_of_mlx_that_are_not_read(tmp_path):
    base = llama().state_dict()
    mlx_adapter(tmp_path / "other", fine_tune_type="of 2030")
    table = {"model.embed_positions.lora_a": torch.ones(32, 3)}
    mlx_adapter(tmp_path / "table", factors=table)
    experts = {"model.layers.0.mlp.switch_mlp.up_proj.lora_b": torch.ones(2, 24, 3)}
    mlx_adapter(tmp_path / "experts", factors=experts)
    for name in ("other", "table", "experts"):
        with pytest.raises(
            CheckpointError,
            match=advice("fuse it with mlx-lm (mlx_lm.fuse --model BASE --adapter-path FOLDER"),
        ):
            covmerge.merge(base, {"a": tmp_path / name}, "average")
    mlx_adapter(tmp_path / "scale", scale=None)
    with pytest.raises(
        CheckpointError,
        match=advice("which multiplies the update: add those that it was trained with to"),
    ):
        covmerge.merge(base, {"a": tmp_path / "scale"}, "average")


def test_advice_on_files_of_mlx_is_followed(tmp_path):
    base = {n: 400 * t for n, t in llama().state_dict().items()}
    mlx_adapter(tmp_path / "a", rank=8)
    with pytest.raises(
        CheckpointError,
        match=advice("and lora_parameters has rank = {}: correct that in adapter_config.json"),
    ):
        covmerge.merge(base, {"a": tmp_path / "a"}, "average")
    file = tmp_path / "0000100_adapters.safetensors"
    (tmp_path / "a" / "adapters.safetensors").rename(file)
    with pytest.raises(
        CheckpointError,
        match=advice("adapter_config.json: put that and this file, called {}, into one folder"),
    ):
        covmerge.merge(base, {"a": file}, "average")
    mlx_adapter(tmp_path / "b")
    (tmp_path / "b" / "adapters.safetensors").unlink()
    file.rename(tmp_path / "b" / "adapters.safetensors")
    covmerge.merge(base, {"a": tmp_path / "b"}, "average")


@pytest.mark.parametrize("part", ["p_layer.weight", "lambda_layer"])
def test_files_of_lycoris_are_merged_with_lycoris(part, tmp_path):
    """LyCORIS 4.1.3 merges what it wrote by these lines; it is no package of the tests."""
    save_file({f"lycoris_fc.{part}": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(
        CheckpointError,
        match=advice("lycoris_: net, _ = lycoris.create_lycoris_from_weights(1.0, FILE, model)"),
    ) as told:
        covmerge.merge({"fc.weight": torch.eye(4)}, {"a": tmp_path / "a.safetensors"}, "average")
    assert "PEFT" not in str(told.value)


def deepseek_v4(folder, tensors, config):
    """FP8 with `.scale` beside it; experts as two E2M1 numbers a byte, `.scale` of 32 inputs each."""
    held = {}
    for name, tensor in tensors.items():
        scale = name.replace(".weight", ".scale")
        if ".experts." in name:
            codes = torch.randint(0, 8, tensor.shape, dtype=torch.uint8)
            held[name] = (codes[:, ::2] | (codes[:, 1::2] << 4)).view(torch.int8)
            held[scale] = torch.full((len(codes), codes.shape[1] // 32), 2**-6)
        elif name.endswith("attn.wq_a.weight"):
            held[name] = (64 * tensor).to(torch.float8_e4m3fn)
            held[scale] = torch.full((1, 1), 2**-6)
        else:
            held[name] = tensor
        if scale in held and scale != name:
            held[scale] = held[scale].to(torch.float8_e8m0fnu)
    folder.mkdir()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0"}
    settings |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    about = {"expert_dtype": "fp4", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config | about))


def test_the_scales_of_deepseek_v4(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64}
    heads = {"num_attention_heads": 2, "o_groups": 2, "q_lora_rank": 64, "o_lora_rank": 64}
    indexer = {"index_n_heads": 2, "index_head_dim": 64, "index_topk": 4, "qk_rope_head_dim": 32}
    layers = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "hc_mult": 2}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "mlp_layer_types": ["moe"]}
    config = DeepseekV4Config(**sizes, **heads, **indexer, **layers, **experts, dtype="bfloat16")
    model = DeepseekV4ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in ("base", "a"):
        deepseek_v4(tmp_path / name, tensors, config.to_dict())
    covmerge.merge(
        tmp_path / "base",
        {"a": tmp_path / "a"},
        "average",
        tmp_path / "out",
        allow=["not-a-fine-tune"],  # the experts are random
    )
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(merged[name].float(), tensor.float(), rtol=0.02, atol=1e-4)
