"""What is said of adapters of other types than LoRA that do not fit, followed to the merge."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import covmerge
from covmerge.errors import CovmergeError
from tests.adapters.test_types import LINEAR, config_of, trained
from tests.advised import advice


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 12)
        self.first = nn.Linear(12, 8)
        self.second = nn.Linear(8, 12, bias=False)
        self.same = nn.Linear(8, 8)

    def forward(self, tokens):
        return self.same(self.first(self.table(tokens)))


def part(end, change):
    """A tensor of the layer `first` becomes another one."""

    def damaged(tensors, config, base):
        name = next(name for name in tensors if name.endswith(f"first.{end}"))
        tensors[name] = change(tensors[name])

    return damaged


def more(end, tensor):
    def damaged(tensors, config, base):
        tensors[f"base_model.model.first.{end}"] = tensor

    return damaged


def says(**fields):
    return lambda tensors, config, base: config.update(fields)


def of(**changed):
    """Another base."""
    return lambda tensors, config, base: base.update(
        {name.replace("_", "."): tensor for name, tensor in changed.items()}
    )


# What it is, what makes it another, and what is said.
ROWS = {
    "no use": (
        ("LOKR", {"r": 1}),
        more("lokr_w1_a", torch.ones(2, 1)),
        advice("for beside {}: the file is damaged, fetch it again"),
    ),
    "a part that is missing": (
        ("LOHA", {"r": 2}),
        more("hada_t1", torch.ones(2, 2, 3, 3)),
        advice("has {} and no '{}' beside it: the file is incomplete, fetch it again"),
    ),
    "a factor of OLoRA that is missing": (
        ("LORA", {"r": 2, "init_lora_weights": "olora"}),
        lambda tensors, config, base: tensors.pop("base_model.model.first.lora_B.weight"),
        advice("has {} and no '{}' beside it: the file is incomplete, fetch it again"),
    ),
    "(IA)³'s numbers are one": (
        ("IA3", {"feedforward_modules": []}),
        part("ia3_l", lambda t: torch.tensor(1.0)),
        advice(
            "where {} belongs: pass the base that the adapter was trained on, or fetch the adapter"
        ),
    ),
    "OFT has more blocks than inputs": (
        ("OFT", {"oft_block_size": 4, "r": 0}),
        part("oft_R.weight", lambda t: torch.ones(15, 2)),
        advice("has {} inputs, which are not {} blocks: fetch the adapter again"),
    ),
    "an empty part": (
        ("HRA", {"r": 4}),
        part("hra_u", lambda t: t[:0]),
        advice("as the parts of a sharded model are: save the adapter again from gathered weights"),
    ),
    "a dtype": (
        ("HRA", {"r": 4}),
        part("hra_u", lambda t: t.int()),
        advice("has '{}' of dtype {}: fetch the adapter again"),
    ),
    "a shape": (
        ("HRA", {"r": 4}),
        of(first_weight=torch.ones(8, 16)),
        advice(
            "where {} belongs: pass the base that the adapter was trained on, or fetch the adapter"
        ),
    ),
    "places": (
        ("SUPERTUNING", {"sparsity": 0.5}),
        of(first_weight=torch.ones(4, 4)),
        advice("its places go from {} to {} of {}: pass the base that the adapter was trained on"),
    ),
    "no matrix": (
        ("LOHA", {"r": 2}),
        of(first_weight=torch.ones(8)),
        advice("and no layer's weight: pass the base that the adapter was trained on"),
    ),
    "whole numbers": (
        ("LOHA", {"r": 2}),
        of(first_weight=torch.ones(8, 12).char()),
        advice("which is {} in the base: give the base in a floating-point dtype"),
    ),
    "OFT's blocks": (
        ("OFT", {"oft_block_size": 4, "r": 0}),
        of(first_weight=torch.ones(8, 13)),
        advice("has {} inputs, which are not {} blocks: fetch the adapter again"),
    ),
    "an older OFT": (
        ("OFT", {"oft_block_size": 4, "r": 0}),
        lambda tensors, config, base: [config.pop(key) for key in list(config) if "cayley" in key],
        advice("add use_cayley_neumann (and num_cayley_neumann_terms) as it was in training"),
    ),
    "BOFT's blocks": (
        ("BOFT", {"boft_block_size": 4}),
        of(first_weight=torch.ones(8, 13)),
        advice("has {} inputs, which are not {} blocks: fetch the adapter again"),
    ),
    "C3A": (
        ("C3A", {"block_size": 4}),
        of(first_weight=torch.ones(8, 13)),
        advice(
            "which blocks of {} do not divide: pass the base that the adapter was trained on, or"
        ),
    ),
    "GraLoRA": (
        ("GRALORA", {"r": 4, "gralora_k": 2}),
        of(first_weight=torch.ones(8, 13)),
        advice("parts of rank {} do not divide: pass the base that the adapter was trained on"),
    ),
    "LoKr": (
        ("LOKR", {"r": 1}),
        of(first_weight=torch.ones(7, 13)),
        advice(
            "and its LoKr has blocks of {} x {}: pass the base that the adapter was trained on, or"
        ),
    ),
    "RoAd": (
        ("ROAD", {"group_size": 4}),
        says(group_size=6),
        advice("has {} outputs, which are not groups of {}: correct group_size"),
    ),
    "VB-LoRA's vectors": (
        ("VBLORA", {"r": 2, "vector_length": 4, "num_vectors": 6}),
        of(first_weight=torch.ones(8, 13)),
        advice("which vectors of {} do not divide: pass the base that the adapter was trained on"),
    ),
    "VB-LoRA's bank": (
        ("VBLORA", {"r": 2, "vector_length": 4, "num_vectors": 6}),
        says(topk=9),
        advice("is put together of {} vectors of a bank of {}: correct topk"),
    ),
    "tokens": (
        ("TRAINABLE_TOKENS", {"target_modules": ["table"], "token_indices": [7, 2]}),
        says(token_indices=None),
        advice("does not say which (token_indices, or trainable_token_indices): fetch it again"),
    ),
    "tokens of a resized base": (
        ("TRAINABLE_TOKENS", {"target_modules": ["table"], "token_indices": [7, 2]}),
        of(**{"table.weight": torch.ones(5, 8)}),
        advice("rows: pass the base as it was resized for the training"),
    ),
    "a token twice": (
        ("TRAINABLE_TOKENS", {"target_modules": ["table"], "token_indices": [7, 2]}),
        says(token_indices=[7, 7]),
        advice("one token twice: fetch the adapter again"),
    ),
    "a bias": (
        ("GLORA", {"r": 2}),
        lambda tensors, config, base: base.pop("first.bias"),
        advice("has no bias in the base, and one in the adapter: pass the adapter's own base"),
    ),
    "two tokens": (
        ("LORA", {"r": 2}),
        says(alora_invocation_tokens=[1]),
        advice("and acts after these tokens alone: train LoRA instead. Such an adapter is no"),
    ),
}


@pytest.mark.parametrize(("made", "damage", "said"), ROWS.values(), ids=ROWS)
def test_the_intact_adapter_over_its_own_base(made, damage, said, tmp_path):
    torch.manual_seed(0)
    kind, fields = made
    base = Layers()
    trained(base, config_of(kind, **{"target_modules": LINEAR} | fields), tmp_path)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    right, state = (file.read_bytes(), config.read_bytes()), base.state_dict()
    tensors, fields, other = load_file(file), json.loads(config.read_bytes()), dict(state)
    damage(tensors, fields, other)
    save_file(tensors, file)
    config.write_text(json.dumps(fields))
    with pytest.raises(CovmergeError) as told:
        covmerge.merge(other, {"a": tmp_path}, "average")
    assert re.search(said, str(told.value)), told.value
    file.write_bytes(right[0])
    config.write_bytes(right[1])
    found = covmerge.merge(state, {"a": tmp_path}, "average").tensors
    assert any(not torch.equal(found[name], tensor) for name, tensor in state.items())
