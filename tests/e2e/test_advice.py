"""What errors advise about adapters and shards, done literally and followed to its end."""

import json
import re
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import AutoModelForCausalLM

import covmerge
from covmerge.errors import CheckpointError, TensorError
from tests.checkpoints.adapters import llama
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
    with pytest.raises(TensorError, match=r"model\.resize_token_embeddings\(34\)"):
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
    with pytest.raises(CheckpointError, match=r"stack the layers .*set layer_replication to null"):
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
    with pytest.raises(CheckpointError, match=r"4 groups.*remove its tensors .* target_modules"):
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
    base = {"fc.weight": torch.eye(4), "b.weight": torch.ones(6, 2)}
    expert = {name: tensor + 0.5 for name, tensor in base.items()}
    slices_of(tmp_path / "a", expert)
    with pytest.raises(CheckpointError, match=r"Put them together first: consolidate_"):
        covmerge.merge(base, {"a": tmp_path / "a"}, "average")
    (tmp_path / "new").mkdir()
    consolidate_safetensors_files(
        str(tmp_path / "a"), str(tmp_path / "new"), fqn_to_index_mapping=dict.fromkeys(expert, 1)
    )
    merged = covmerge.merge(base, {"a": tmp_path / "new"}, "average").tensors
    for name, tensor in expert.items():
        torch.testing.assert_close(merged[name], tensor)


def test_modules_of_sentence_transformers_with_weights(tmp_path):
    """Each file by itself, and the results over the files of a copy of the base's folder."""
    values = {"base": 0.0, "a": 1.0}
    for name, value in values.items():
        (tmp_path / name / "2_Dense").mkdir(parents=True)
        save_file({"w.weight": torch.full((4, 4), value)}, tmp_path / name / "model.safetensors")
        dense = {"linear.weight": torch.full((2, 4), value)}
        save_file(dense, tmp_path / name / "2_Dense" / "model.safetensors")
        modules = [{"idx": 0, "path": ""}, {"idx": 2, "path": "2_Dense"}]
        (tmp_path / name / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        CheckpointError, match=r"2_Dense/model\.safetensors.*file of weights by itself"
    ):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    for number, file in enumerate(("model.safetensors", "2_Dense/model.safetensors")):
        out = tmp_path / f"out{number}"
        covmerge.merge(tmp_path / "base" / file, {"a": tmp_path / "a" / file}, "average", out)
        shutil.copy(out / "model.safetensors", tmp_path / "copy" / file)
        for tensor in load_file(tmp_path / "copy" / file).values():
            assert bool((tensor == 1).all())
