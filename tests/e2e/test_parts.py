"""Experts that are a part of their base: CLIP's image encoder, the language model of Gemma 3 or LLaVA."""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import covmerge
from covmerge.errors import InputError, TensorError
from covmerge.files.checkpoints.memory import MemoryCheckpoint
from covmerge.files.checkpoints.part import as_part, part_key
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.e2e.following import noted

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIGHT = {**SIZES, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
TEXT = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60}
SPECIAL = {"image_token_index": 59, "boi_token_index": 58, "eoi_token_index": 57}


def clip():
    words = {**SIZES, "num_attention_heads": 4, "vocab_size": 60, "eos_token_id": 59}
    whole = CLIPModel(CLIPConfig(text_config=words, vision_config=SIGHT, projection_dim=16))
    part = CLIPVisionModel(whole.config.vision_config)
    part.load_state_dict(whole.vision_model.state_dict())
    return whole, part


def gemma3():
    sight = {**SIGHT, "model_type": "siglip_vision_model"}
    text = {**TEXT, "head_dim": 8}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4, **SPECIAL)
    whole = Gemma3ForConditionalGeneration(config)
    part = Gemma3ForCausalLM(whole.config.text_config)
    part.model.load_state_dict(whole.model.language_model.state_dict())
    part.tie_weights()
    return whole, part


def llava():
    text, sight = (
        {**TEXT, "model_type": "llama"},
        {**SIGHT, "model_type": "clip_vision_model"},
    )
    whole = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=sight, image_token_index=59)
    )
    part = LlamaForCausalLM(whole.config.text_config)
    part.model.load_state_dict(whole.model.language_model.state_dict())
    part.lm_head.load_state_dict(whole.lm_head.state_dict())
    return whole, part


def tuned(model, seed):
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    return model


MODELS = {
    "clip": (clip, "", "vision_model."),
    "gemma3": (gemma3, "model.", "language_model.model."),
    "llava": (llava, "", "language_model."),
}


@pytest.fixture(scope="module", params=MODELS)
def family(request, tmp_path_factory):
    """A base, a part of it by itself, and two fine-tunes of the part; names there and in the base."""
    make, theirs, ours = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    whole, part = make()
    whole.save_pretrained(folder / "base")
    part.save_pretrained(folder / "part")
    for seed, name in enumerate("ab", start=1):
        tuned(part, seed).save_pretrained(folder / name)
    tuned(whole, 3).save_pretrained(folder / "whole")
    return folder, theirs, ours


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["auto", "ties"])
def test_a_part_is_merged_over_the_whole_as_over_itself(family, method, tmp_path):
    folder, theirs, ours = family
    experts = {name: folder / name for name in "ab"}
    result = covmerge.merge(folder / "base", experts, method, out=tmp_path / "over-whole")
    covmerge.merge(folder / "part", experts, method, out=tmp_path / "over-part")
    noted(re.escape(f"is the part '{ours.rstrip('.')}' of the base"), result.notes)
    found, right = weights(tmp_path / "over-whole"), weights(tmp_path / "over-part")
    base = weights(folder / "base")
    assert found.keys() == base.keys()
    inside = {ours + name.removeprefix(theirs): value for name, value in right.items()}
    assert inside.keys() <= base.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, inside.get(name, base[name]), rtol=1e-5, atol=1e-6)
    command("verify", "--deep", tmp_path / "over-whole")
    AutoModel.from_pretrained(tmp_path / "over-whole")


def test_a_part_beside_a_whole_expert(family):
    folder, theirs, ours = family
    found = covmerge.merge(folder / "base", {"a": folder / "a", "w": folder / "whole"}, "linear")
    base, a, w = (weights(folder / name) for name in ("base", "a", "whole"))
    for name, value in found.tensors.items():
        part = a.get(theirs + name.removeprefix(ours), base[name]) if ours in name else base[name]
        torch.testing.assert_close(value, (part + w[name]) / 2, rtol=1e-5, atol=1e-6)


def test_a_part_that_lacks_a_tensor(family, tmp_path):
    folder, _, ours = family
    tensors = weights(folder / "a")
    lost = next(name for name in sorted(tensors) if "layers.1" in name)
    del tensors[lost]
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "a" / "config.json").write_bytes((folder / "a" / "config.json").read_bytes())
    with pytest.raises(TensorError, match=r"lacks 1 of the base's tensors: '" + re.escape(ours)):
        covmerge.merge(folder / "base", {"a": tmp_path / "a"})


def test_an_inspection_knows_a_part(family):
    folder, _, ours = family
    found = covmerge.inspect(folder / "base", {"a": folder / "a", "w": folder / "whole"})
    for layer in found.layers:
        assert ("a" in layer.absent) == (not layer.name.startswith(ours)), layer.name


def test_an_image_encoder_of_a_model_that_speaks(tmp_path):
    torch.manual_seed(0)
    whole, _ = llava()
    encoder = CLIPVisionModel(whole.config.vision_config)
    encoder.load_state_dict(whole.model.vision_tower.state_dict())
    changed = tuned(encoder, 1)
    found = covmerge.merge(whole, {"a": changed}, out=tmp_path / "out")
    assert found.verification.ok
    merged, base = load_file(tmp_path / "out" / "model.safetensors"), whole.state_dict()
    for name, value in changed.state_dict().items():
        torch.testing.assert_close(merged[f"model.vision_tower.{name}"], value)
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])


def test_a_part_of_other_shapes_is_refused_by_its_tensors():
    """The shapes of a part need not be the base's for it to be known as its part."""
    whole, _ = clip()
    with pytest.raises(
        TensorError, match=r"'vision_model\.embeddings\.position_embedding\.weight' has"
    ):
        config = copy.deepcopy(whole.config.vision_config)
        config.image_size = 24
        covmerge.merge(whole, {"a": CLIPVisionModel(config)})
    config = copy.deepcopy(whole.config.vision_config)
    config.num_hidden_layers = 3
    with pytest.raises(TensorError, match=r"16 tensors that the base"):
        covmerge.merge(whole, {"a": CLIPVisionModel(config)})


def test_a_part_of_a_part():
    """The language model of a thinker, which is itself a part of Qwen2.5-Omni."""
    text = {"model_type": "qwen2_5_omni_text"}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text}
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    torch.manual_seed(0)
    layers = [f"layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qkvo"]
    made = {name: torch.randn(16, 16) for name in layers}
    roots = ("thinker.model.", "talker.model.")
    base = {root + name: tensor.clone() for root in roots for name, tensor in made.items()}
    base["thinker.lm_head.weight"] = torch.randn(60, 16)
    tuned = {f"model.{name}": tensor + 0.01 * torch.randn(16, 16) for name, tensor in made.items()}
    assert part_key(config, text) == "thinker_config.text_config"
    assert part_key(config, thinker) == "thinker_config"
    assert part_key({"model_type": "made_up", "a.b": text}, text) is None  # a stranger's key
    part = as_part(MemoryCheckpoint(tuned, text), MemoryCheckpoint(base, config))
    assert {*part.headers} == {"thinker." + name for name in tuned}
    assert part.config["thinker_config"]["text_config"] == text
    assert not part.gives("talker.model.layers.0.self_attn.q_proj.weight")


def test_places_of_another_number():
    """Rows of a table of places are not tokens; the first ones may be the same places, or not."""
    whole, part = clip()
    other = tuned(part, 1)
    table = "vision_model.embeddings.position_embedding.weight"
    longer = torch.cat([other.embeddings.position_embedding.weight.detach(), torch.ones(5, 32)])
    other.embeddings.position_embedding.weight = torch.nn.Parameter(longer)
    other.config.image_size = 24
    said = advice(
        "as places in a text do, set --tensors vocabulary=base to merge the rows of the base. Places in a "
        "picture do not: pass the base that it was trained from, or leave the table to the base with {}"
    )
    with pytest.raises(TensorError, match="5 rows in the base and 10 .* stand for places.*" + said):
        covmerge.merge(whole, {"a": other}, "average")
    found = covmerge.merge(whole, {"a": other}, "average", tensors={"vocabulary": "base"}).tensors
    torch.testing.assert_close(found[table], longer[:5])
    rules = [{"match": table, "use": "base"}]
    found = covmerge.merge(whole, {"a": other}, "average", rules=rules).tensors
    assert torch.equal(found[table], whole.state_dict()[table])
    text = str(covmerge.inspect(whole, {"a": other}).faults)
    assert "its number of places differs" in text and "vocabulary was" not in text


def test_ties_of_a_part_and_of_its_base(tmp_path):
    whole, part = gemma3()
    untied = copy.deepcopy(part)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(part.lm_head.weight + 0.01)
    found = covmerge.merge(whole, {"a": untied}, "average", out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    heads = [name for name in stored if name.endswith("lm_head.weight")]
    torch.testing.assert_close(stored[heads[0]], untied.lm_head.weight.detach())
    assert found.verification.ok

    whole, part = llava()
    part.config.tie_word_embeddings = True
    part.lm_head.weight = part.model.embed_tokens.weight
    whole.save_pretrained(tmp_path / "base")
    part.save_pretrained(tmp_path / "a")
    with pytest.raises(TensorError, match=r"lacks 1 of the base's tensors: '.*lm_head\.weight'"):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"})


def test_the_base_is_a_part_of_its_experts(family):
    folder, _, ours = family
    said = advice(
        "The base is only a part of such a model ({}): pass the whole '{}' model that it is a part of as "
        "the base; experts may be parts of it"
    )
    with pytest.raises(InputError, match=said):
        covmerge.merge(folder / "part", {"a": folder / "a", "w": folder / "whole"})
    found = covmerge.merge(folder / "base", {"a": folder / "a", "w": folder / "whole"})
    assert any(name.startswith(ours) for name in found.tensors)
