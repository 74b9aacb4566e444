"""What of an adapter the method does not see is named, and merged by what the note advises."""

import re

import peft
import pytest
import torch

import covmerge
from tests.advised import advice
from tests.e2e.models import build

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def test_a_lora_of_the_output_head_is_named_and_merged_where_asked(tmp_path):
    build("llama").save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(build("llama"), config)
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    experts = {name: tmp_path / name for name in ("a", "b")}
    said = advice("the updates are averaged over all {} experts. By --tensors {}=method it does")
    default = covmerge.merge(tmp_path / "base", experts, "iso_c")
    (note,) = (note for note in default.notes if "is changed by" in note)
    assert note.startswith("'lm_head.weight' is changed by 'a'") and re.search(said, note)
    told = covmerge.merge(tmp_path / "base", experts, "iso_c", tensors={"output_head": "method"})
    assert not any("is changed by" in note for note in told.notes)
    name = "lm_head.weight"
    assert told.stats["tensors"][name]["rule"].startswith("iso_c (output_head")
    assert not torch.allclose(told.tensors[name], default.tensors[name])
