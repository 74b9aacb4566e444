"""What errors advise about LoRA files of diffusion models, and about files beside others: followed."""

import json

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CovmergeError
from covmerge.files.checkpoints.open import open_checkpoint
from tests.advised import advice
from tests.quantised.ggufs import save_llama
from tests.quantised.models import llama

NAME = "down_blocks.0.attentions.1.to_q.weight"
OTHER = NAME.replace("to_q", "to_k")
BASE = {NAME: torch.eye(8, 6), OTHER: torch.ones(8, 6)}
DOWN, UP = (torch.randn(s, generator=torch.manual_seed(0)) for s in ((2, 6), (8, 2)))


def pair(module, down, up):
    return {f"{module}.{down}.weight": DOWN.clone(), f"{module}.{up}.weight": UP.clone()}


FLAT = pair("lora_unet_down_blocks_0_attentions_1_to_q", "lora_down", "lora_up")
EXACT = pair("unet.down_blocks.0.attentions.1.to_q", "lora_A", "lora_B")
TWICE = EXACT | pair("transformer.down_blocks.0.attentions.1.to_q", "lora_A", "lora_B")
WITH_TEXT = FLAT | pair("lora_te_text_model_encoder_layers_0_mlp_fc1", "lora_down", "lora_up")
OTHER_TEXT = BASE | {
    "cond_stage_model.model.transformer.resblocks.0.mlp.c_fc.weight": torch.ones(8, 6)
}
ALIKE = BASE | {NAME.replace("_", "."): torch.eye(8, 6)}
# Base and file that are refused, the advice, and those that follow it.
FILES = {
    "the base that it was trained on": (
        ({OTHER: BASE[OTHER]}, FLAT),
        advice("or is another part of the pipeline: pass the base that the adapter was trained on"),
        (BASE, FLAT),
    ),
    "one part": (
        (BASE, TWICE),
        advice("such as text_encoder_2, or remove one part from the file"),
        (BASE, EXACT),
    ),
    "the names of its modules": (
        (ALIKE, FLAT),
        advice("and nothing says which: save the adapter with the names of its modules"),
        (ALIKE, EXACT),
    ),
    "without the text encoder": (
        (OTHER_TEXT, WITH_TEXT),
        advice("or remove the tensors of this part from a copy of the adapter"),
        (OTHER_TEXT, FLAT),
    ),
}


@pytest.mark.parametrize(("refused", "said", "followed"), FILES.values(), ids=FILES)
def test_files_of_diffusion_models(refused, said, followed, tmp_path):
    file = tmp_path / "style.safetensors"
    save_file(refused[1], file)
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(refused[0], {"a": file}, "average")
    base, factors = followed
    save_file(factors, file)
    found = covmerge.merge(base, {"a": file}, "average").tensors
    for name, tensor in base.items():
        right = tensor + UP @ DOWN if name == NAME else tensor
        torch.testing.assert_close(found[name], right)


def test_a_gguf_file_among_others(tmp_path):
    """As an index lists it beside a second shard."""
    for seed, name in enumerate(("base", "a")):
        (tmp_path / name).mkdir()
        save_llama(llama(seed), tmp_path / name / "one.gguf", "F16")
        save_file({"w": torch.ones(2)}, tmp_path / name / "two.safetensors")
        placed = dict.fromkeys(open_checkpoint(tmp_path / name / "one.gguf").headers, "one.gguf")
        index = json.dumps({"weight_map": placed | {"w": "two.safetensors"}})
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    said = advice("has a GGUF file among {} files of weights: pass the one to merge")
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    base, a = (tmp_path / name / "one.gguf" for name in ("base", "a"))
    covmerge.merge(base, {"a": a}, "average", allow=["not-a-fine-tune"])


def test_an_input_where_the_work_goes_on(tmp_path):
    aside = tmp_path / ".out.covmerge-partial"
    aside.mkdir()
    save_file(BASE | {NAME: 2 * BASE[NAME]}, aside / "a.safetensors")
    said = advice("they overlap, choose an output of another name")
    with pytest.raises(CovmergeError, match=said):
        covmerge.merge(BASE, {"a": aside / "a.safetensors"}, "average", tmp_path / "out")
    covmerge.merge(BASE, {"a": aside / "a.safetensors"}, "average", tmp_path / "other")
    assert covmerge.verify(tmp_path / "other").ok and (aside / "a.safetensors").is_file()
