"""Experts that call the base's tensors otherwise: one model, as transformers reads both, or a refusal."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import covmerge
from covmerge.base.settings import rules_for
from covmerge.errors import CheckpointError, RecipeError, TensorError
from tests.advised import advice
from tests.cli.runs import covmerge as command

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert():
    sizes = {"intermediate_size": 24, "vocab_size": 30, "max_position_embeddings": 12}
    return BertModel(BertConfig(**SIZES, **sizes))


def wav2vec2():
    convolutions = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 2)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2Model(
        Wav2Vec2Config(
            **SIZES,
            intermediate_size=24,
            num_feat_extract_layers=2,
            **convolutions,
            **positions,
        )
    )


def llava():
    text = LlamaConfig(**SIZES, intermediate_size=24, vocab_size=40, num_key_value_heads=2)
    sight = CLIPVisionConfig(**SIZES, intermediate_size=24, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=sight, text_config=text, image_token_id=39)
    )


def older_bert(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def older_norm(name):
    return name.replace("parametrizations.weight.original0", "weight_g").replace(
        "parametrizations.weight.original1", "weight_v"
    )


def older_llava(name):
    for new, old in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(new):
            return name.replace(new, old, 1)
    return name


def newer_llava(name):
    for new, old in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def rename(folder, spelled):
    file = folder / "model.safetensors"
    save_file({spelled(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def vit():
    return ViTModel(ViTConfig(**SIZES, intermediate_size=24, image_size=8, patch_size=4))


def clip_vision():
    return CLIPVisionModel(
        CLIPVisionConfig(**SIZES, intermediate_size=24, image_size=8, patch_size=4)
    )


@pytest.mark.parametrize(
    ("made", "now", "older"),
    [
        (vit, "layers.1.attention.q_proj", "encoder.layer.1.attention.attention.query"),
        (clip_vision, "encoder.layers.1.mlp.fc1", "vision_model.encoder.layers.1.mlp.fc1"),
    ],
)
def test_an_adapter_of_transformers_4_over_a_model_in_memory(made, now, older):
    torch.manual_seed(0)
    base = made()
    right = base.state_dict()[f"{now}.weight"].clone()
    a, b = torch.randn(2, right.shape[1]), torch.randn(right.shape[0], 2)
    names = (f"base_model.model.{older}.lora_{side}.weight" for side in "AB")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": [older.rpartition(".")[2]],
    }
    adapter = (dict(zip(names, (a, b), strict=True)), config)
    found = covmerge.merge(base, {"a": adapter}, "average").tensors[f"{now}.weight"]
    torch.testing.assert_close(found, right + b @ a, rtol=1e-6, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("made", "spelled"),
    [
        (bert, older_bert),
        (wav2vec2, older_norm),
        (llava, older_llava),
        (llava, newer_llava),
    ],
)
@pytest.mark.parametrize("which", ["base", "a"])
def test_both_spellings_are_one_model(tmp_path, made, spelled, which):
    torch.manual_seed(0)
    base = made()
    for name in ("base", "a"):
        model = made()
        moved = 0.0 if name == "base" else 0.01
        model.load_state_dict(
            {
                n: t + moved * torch.randn(t.shape) if t.is_floating_point() else t
                for n, t in base.state_dict().items()
            }
        )
        model.save_pretrained(tmp_path / name)
    plain = covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average").tensors
    before = set(load_file(tmp_path / which / "model.safetensors"))
    rename(tmp_path / which, spelled)
    result = covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    if before != set(load_file(tmp_path / which / "model.safetensors")):
        assert any(
            "in the names of its tensors" in n or "left out of the names" in n for n in result.notes
        )
    names = spelled if which == "base" else str
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == {names(name) for name in plain}
    for name, tensor in plain.items():
        torch.testing.assert_close(stored[names(name)], tensor)
    loaded = AutoModel.from_pretrained(tmp_path / "out")
    wanted = AutoModel.from_pretrained(tmp_path / "a")
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


BASE = {f"layers.{n}.fc.weight": torch.eye(4) * (n + 1) for n in range(3)} | {
    "norm.weight": torch.ones(4)
}
EXPERT = {name: tensor + 0.1 for name, tensor in BASE.items()}


def merged(expert):
    return covmerge.merge(BASE, {"a": expert}, "average")


@pytest.mark.parametrize(
    "part",
    ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"],
)
def test_wrappers_of_single_modules(part):
    result = merged({n.replace("fc", f"{part}.fc"): t for n, t in EXPERT.items()})
    assert any(f"'{part}.'" in note for note in result.notes)
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(result.tensors[name], tensor)


@pytest.mark.parametrize(
    ("prefix", "by"), [("_forward_module.", "Lightning"), ("base_model.model.", "PEFT")]
)
def test_wrappers_of_the_whole_model(prefix, by):
    result = merged({f"{prefix}{name}": tensor for name, tensor in EXPERT.items()})
    assert any(f"'{prefix}' ({by}) was left out" in note for note in result.notes)
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(result.tensors[name], tensor)


def test_a_model_whose_names_begin_as_peft_names_a_model():
    base, expert = (
        {f"base_model.model.{name}": tensor for name, tensor in state.items()}
        for state in (BASE, EXPERT)
    )
    assert covmerge.merge(base, {"a": expert}, "average").tensors.keys() == base.keys()


def test_an_averaged_model():
    model = nn.Linear(3, 2)
    average = AveragedModel(model)
    average.update_parameters(model)
    base = {name: tensor - 1 for name, tensor in model.state_dict().items()}
    result = covmerge.merge(base, {"a": average.state_dict()}, "average")
    assert result.tensors.keys() == base.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.tensors[name], tensor)
    assert any("'n_averaged' (AveragedModel)" in note for note in result.notes)


FLAGS = [
    {},
    {"extra": "ignore"},
    {"extra": "ignore", "missing": "base"},
    {"extra": "ignore", "missing": "present"},
]
STRANGE = {
    "all of them": {f"net.{name}": tensor for name, tensor in EXPERT.items()},
    "all layers": {n.replace("layers", "blocks"): t for n, t in EXPERT.items()},
    "a layer": {n.replace("layers.1.fc", "layers.1.dense"): t for n, t in EXPERT.items()},
    "the norm": {n.replace("norm.weight", "norm.scale"): t for n, t in EXPERT.items()},
    "more than half is left over": EXPERT | {"own.weight": torch.ones(20, 20)},
}


@pytest.mark.parametrize("what", STRANGE)
def test_no_flags_lead_to_a_merge_that_is_nearly_the_base(what):
    for flags in FLAGS:
        for rules in ([], [{"match": "*blocks*", "use": "head"}]):
            with pytest.raises(TensorError, match=r"^lost-update: .*no setting allows it"):
                covmerge.merge(BASE, {"a": STRANGE[what]}, "average", tensors=flags, rules=rules)
    with pytest.raises(TensorError, match=r"^lost-update: "):
        covmerge.compare(BASE, {"a": STRANGE[what]}, ["average"], tensors=flags)
    (finding,) = covmerge.inspect(BASE, {"a": STRANGE[what]}, tensors=flags).faults
    assert finding.text.startswith("lost-update: ")


def test_the_fault_cannot_be_allowed():
    with pytest.raises(RecipeError, match="no fault that may be allowed"):
        covmerge.merge(BASE, {"a": EXPERT}, "average", allow=["lost-update"])


def test_renamed_as_the_message_says_it_is_merged():
    strange = STRANGE["all layers"]
    result = merged({n.replace("blocks", "layers"): t for n, t in strange.items()})
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(result.tensors[name], tensor)


def test_what_a_rule_leaves_out_by_name_is_meant():
    rules = [{"match": "own.*", "use": "base"}]
    result = covmerge.merge(
        BASE, {"a": STRANGE["more than half is left over"]}, "average", rules=rules
    )
    torch.testing.assert_close(result.tensors["norm.weight"], EXPERT["norm.weight"])


def test_an_expert_with_a_larger_part_that_the_base_lacks():
    tower = {f"model.visual.{n}.fc.weight": torch.ones(20, 20) for n in range(3)}
    said = rf"All that the base has would be merged.*{re.escape(rules_for('model.visual.0.fc.weight'))}"
    with pytest.raises(TensorError, match=said):
        covmerge.merge(BASE, {"a": EXPERT | tower}, "average", tensors={"extra": "ignore"})
    # As it says.
    rules = [{"match": "model.visual.*", "use": "base"}]
    result = covmerge.merge(BASE, {"a": EXPERT | tower}, "average", rules=rules)
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(result.tensors[name], tensor)


LACKS_THE_NORM = {name: tensor for name, tensor in EXPERT.items() if name != "norm.weight"}
BOTH_FLAGS = {"extra": "ignore", "missing": "base"}


def test_an_unrelated_tensor_of_the_shape_of_one_that_is_lacking():
    expert = LACKS_THE_NORM | {"adaptor.scale": torch.ones(4)}
    result = covmerge.merge(BASE, {"a": expert}, "average", tensors=BOTH_FLAGS)
    assert torch.equal(result.tensors["norm.weight"], BASE["norm.weight"])
    for name in LACKS_THE_NORM:
        torch.testing.assert_close(result.tensors[name], EXPERT[name])


def test_what_could_be_a_renaming_is_said_to_be_one_that_could_be():
    expert = LACKS_THE_NORM | {"own.weight": torch.ones(4)}
    rules = [{"match": "own.weight", "use": "base"}]
    said = rf"lacks 'norm\.weight'.*could be.*except one .*{re.escape(rules_for('own.weight'))}"
    with pytest.raises(TensorError, match=said):
        covmerge.merge(BASE, {"a": expert}, "average", tensors=BOTH_FLAGS)
    # As it says, where it is another tensor.
    result = covmerge.merge(BASE, {"a": expert}, "average", tensors=BOTH_FLAGS, rules=rules)
    torch.testing.assert_close(result.tensors["layers.2.fc.weight"], EXPERT["layers.2.fc.weight"])


def test_the_share_of_the_base_counts_too():
    """What is lost may be small, as codes and factors are, and yet all that was trained."""
    base = {f"layers.{n}.fc.weight": torch.eye(40) * (n + 1) for n in range(3)}
    base["head.weight"] = torch.ones(4, 40)
    factors = {f"layers.{n}.fc.factor": torch.ones(1, 8) for n in range(3)}
    expert = {"head.weight": base["head.weight"] + 0.1, **factors}
    with pytest.raises(TensorError, match=r"3 % of the base's parameters.*no setting allows it"):
        covmerge.merge(base, {"a": expert}, "average", tensors=BOTH_FLAGS)


def test_an_adapter_that_trained_whole_tensors_of_another_model(tmp_path):
    name = "base_model.model.layers.0.fc.lora_"
    adapter = {
        f"{name}A.weight": torch.ones(1, 4),
        f"{name}B.weight": torch.ones(4, 1),
        "base_model.model.other.embed.weight": torch.ones(50, 4),
    }
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["fc"]}'
    )
    with pytest.raises(TensorError, match=r"^lost-update: "):
        merged(tmp_path)


def test_an_adapter_under_another_prefix(tmp_path):
    name = "base_model.model.model.language_model.layers.0.fc.lora_"
    adapter = {f"{name}A.weight": torch.ones(1, 4), f"{name}B.weight": torch.ones(4, 1)}
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["fc"]}'
    )
    torch.testing.assert_close(
        merged(tmp_path).tensors["layers.0.fc.weight"], BASE["layers.0.fc.weight"] + 1
    )


@pytest.mark.parametrize("file", ["mm_projector.bin", "vision.safetensors"])
def test_a_part_of_the_model_in_another_file_is_refused(tmp_path, file):
    part = {"layers.9.fc.weight": torch.eye(4)}
    for folder, tensors, own in (
        ("base", BASE, part),
        ("a", EXPERT, {n: 2 * t for n, t in part.items()}),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        save = torch.save if file.endswith(".bin") else save_file
        save(own, tmp_path / folder / file)
    said = advice(
        "Merge that file by itself (pass the files in place of the folders), and the rest after"
    )
    with pytest.raises(CheckpointError, match=f"base: {file} holds 1 tensor .*{said}"):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    # As it says: each by itself.
    covmerge.merge(
        tmp_path / "base" / file, {"a": tmp_path / "a" / file}, "average", tmp_path / "part"
    )
    torch.testing.assert_close(
        load_file(tmp_path / "part" / "model.safetensors")["layers.9.fc.weight"], 2 * torch.eye(4)
    )
    for folder in ("base", "a"):
        (tmp_path / folder / file).rename(tmp_path / f"{folder}-{file}")
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")


@pytest.mark.parametrize(
    "names",
    [
        ["layers.0.fc.lora_A.weight", "layers.0.fc.lora_B.weight"],
        ["layers.0.fc", "layers.1.fc"],  # scales of its inputs, or a direction of its outputs
        ["layers.0", "layers.1"],  # directions of blocks
    ],
)
def test_files_about_the_modules_are_no_part_of_the_model(tmp_path, names):
    for folder, tensors in (("base", BASE), ("a", EXPERT)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        save_file({name: torch.ones(4) for name in names}, tmp_path / folder / "own.safetensors")
    result = covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average")
    assert any("model.safetensors was read, and not own.safetensors" in n for n in result.notes)
    for name, tensor in EXPERT.items():
        torch.testing.assert_close(result.tensors[name], tensor)


@pytest.mark.parametrize("named", ["layers.{}", "layers.{}.fc", "direction.{}"])
def test_a_control_vector_is_no_expert(tmp_path, named):
    """It is added to activations; several are averaged among themselves, as the error says."""
    vectors = [{named.format(n): torch.full((4,), value) for n in range(3)} for value in (1.0, 2.0)]
    with pytest.raises(
        TensorError,
        match=advice(
            "such files are averaged with one another by a recipe with `base: null` and `method: linear`"
        ),
    ):
        covmerge.merge(BASE, {"a": vectors[0]}, "average")
    for name, vector in zip("ab", vectors, strict=True):
        save_file(vector, tmp_path / f"{name}.safetensors")
    recipe = tmp_path / "recipe.yml"
    experts = f"{{a: {tmp_path / 'a.safetensors'}, b: {tmp_path / 'b.safetensors'}}}"
    recipe.write_text(f"base: null\nmethod: linear\nexperts: {experts}\n")
    command("merge", recipe, tmp_path / "out")
    for tensor in load_file(tmp_path / "out" / "model.safetensors").values():
        torch.testing.assert_close(tensor, torch.full((4,), 1.5))


def test_what_no_output_needs_is_told(tmp_path):
    for folder, tensors in (("base", BASE), ("a", EXPERT)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        torch.save(tensors, tmp_path / folder / "pytorch_model.bin")
        torch.save({"state": {}}, tmp_path / folder / "optimizer.pt")
    notes = covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average").notes
    # The same model in an older format is no news (test_read_sources.py).
    told = [note for note in notes if "was read, and not" in note]
    assert len(told) == 2
    assert all(note.endswith("model.safetensors was read, and not optimizer.pt") for note in told)
