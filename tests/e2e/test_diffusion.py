"""LoRA files of diffusion models, of Kohya's form and diffusers', beside what diffusers makes of them."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.adapters.parts import diffusers_name, flat_name
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.front.reporting.job import ReportJob
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e import diffusion

diffusers = pytest.importorskip("diffusers")
TEXT_ENCODER = "cond_stage_model.transformer."
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    diffusion.saved(folder)
    return folder


def files(folder, *names):
    return {name: folder / f"{name}.safetensors" for name in names}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_one_file_is_folded_into_its_base_as_diffusers_fuses_it(folder, name, tmp_path):
    ran = command(
        "merge",
        "--base",
        folder / "unet",
        f"--expert={name}={folder / name}.safetensors",
        tmp_path / "out",
    )
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out")
    assert_same(model.state_dict(), diffusion.fused(files(folder, name), [1.0]))
    assert "UNet2DConditionModel.from_pretrained" in ran.stdout
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").is_file()
    command("verify", tmp_path / "out")


def test_several_with_a_weight_each(folder, tmp_path):
    result = covmerge.merge(
        folder / "unet",
        files(folder, "one", "two", "three"),
        "task_arithmetic",
        tmp_path / "out",
        scale=1.0,
        weights=[0.7, 0.4, 1.2],
        shard_size="100kB",
    )
    index = json.loads((result.path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = diffusers.UNet2DConditionModel.from_pretrained(result.path)
    expected = diffusion.fused(files(folder, "one", "two", "three"), [0.7, 0.4, 1.2])
    assert_same(model.state_dict(), expected)
    again = covmerge.merge(result.path, files(folder, "one"), out=tmp_path / "again")
    assert again.tensors is None


BY_BLOCK = """\
base: {folder}/unet
experts:
  one:
    source: {folder}/one.safetensors
    weight:
      by_name:
        - {{match: 'down_blocks.*', value: 0.2}}
        - {{match: 'mid_block.*', value: 0.0}}
        - {{value: 0.9}}
  three:
    source: {folder}/three.safetensors
    weight: {{by_name: [{{match: 'up_blocks.1.*', value: 0.3}}, {{value: 0.5}}]}}
method: task_arithmetic
parameters: {{scale: 1.0}}
"""


def test_weights_by_block_are_those_of_diffusers(folder, tmp_path):
    (tmp_path / "recipe.yml").write_text(BY_BLOCK.format(folder=folder))
    command("merge", tmp_path / "recipe.yml", tmp_path / "out")
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out")
    found = {n: w for n, w in model.state_dict().items() if "attentions" in n}
    scales = [
        {"down": 0.2, "mid": 0.0, "up": 0.9},
        {"down": 0.5, "mid": 0.5, "up": {"block_0": 0.5, "block_1": 0.3}},
    ]
    # diffusers has no scales by block for layers outside of attentions.
    expected = diffusion.fused(files(folder, "one", "three"), scales)
    assert_same(found, {n: w for n, w in expected.items() if n in found})
    base = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    alone = diffusion.fused(files(folder, "one"), [0.2])
    other = diffusion.fused(files(folder, "three"), [0.5])
    for name in (
        "down_blocks.0.resnets.0.conv1.weight",
        "down_blocks.1.resnets.0.time_emb_proj.weight",
    ):
        expected = alone[name] + other[name] - base[name]
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def names():
    return diffusion.single_file_names(diffusion.unet())


def test_names_of_single_files_are_those_that_diffusers_converts(names):
    state = diffusion.unet().state_dict()
    assert state.keys() <= names.keys()
    for name, single in names.items():
        assert diffusers_name(single.removeprefix("model.diffusion_model.")) == name
    for none in ("input_blocks.1.0.in_layers.1.weight", "betas", "output_blocks.x.0.conv.bias"):
        assert diffusers_name(none) is None


def text_encoder(hidden):
    config = transformers.CLIPTextConfig(
        vocab_size=30,
        hidden_size=hidden,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    return transformers.CLIPTextModel(config).state_dict()


def text_layers(state):
    return {
        name.removesuffix(".weight"): weight
        for name, weight in state.items()
        if name.endswith(("q_proj.weight", "fc1.weight"))
    }


def updated(state, file, part):
    """Base and Kohya's factors, name by name."""
    result = dict(state)
    for name in state:
        stem = f"{part}{name.removesuffix('.weight').replace('.', '_')}"
        if f"{stem}.alpha" in file:
            down, up = (file[f"{stem}.lora_{side}.weight"] for side in ("down", "up"))
            result[name] = state[name] + float(file[f"{stem}.alpha"]) / len(down) * up @ down
    return result


@pytest.mark.parametrize("form", ["as diffusers has them", "as single files have them"])
def test_a_single_file_checkpoint_with_its_text_encoder(folder, names, tmp_path, form):
    model = diffusion.unet()
    prefix = "cond_stage_model.transformer."
    text = text_encoder(12)
    single = {names[name]: weight for name, weight in model.state_dict().items()}
    first_stage = {"first_stage_model.decoder.conv_in.weight": torch.ones(3, 3, 3, 3)}
    clip = {f"{prefix}{name}": weight for name, weight in text.items()}
    save_file({**single, **clip, **first_stage}, tmp_path / "base.safetensors")
    weights = diffusion.layers(model)
    if form == "as single files have them":
        inner = {n: names[f"{n}.weight"].removeprefix("model.diffusion_model.") for n in weights}
        weights = {inner[n].removesuffix(".weight"): weight for n, weight in weights.items()}
    file = diffusion.kohya(weights, 1, rank=3, alpha=2.0)
    file |= (of_text := diffusion.kohya(text_layers(text), 5, rank=2, alpha=1.0, part="lora_te_"))
    save_file(file, tmp_path / "style.safetensors")
    command(
        *("merge", "--base", tmp_path / "base.safetensors"),
        *(f"--expert=style={tmp_path}/style.safetensors", tmp_path / "out"),
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = diffusion.fused(files(folder, "one"), [1.0])
    assert_same({n: merged.pop(names[n]) for n in expected}, expected)
    assert_same(
        {n.removeprefix(prefix): merged.pop(n) for n in clip}, updated(text, of_text, "lora_te_")
    )
    assert_same(merged, first_stage)


def test_each_text_encoder_takes_its_own(folder, tmp_path):
    """Both have layers of the same names; those of the other's shape are left aside, and said."""
    small, large = text_encoder(12), text_encoder(16)
    file = diffusion.kohya(text_layers(small), 1, rank=2, alpha=2.0, part="lora_te1_")
    file |= diffusion.kohya(text_layers(large), 2, rank=2, alpha=2.0, part="lora_te2_")
    save_file(file, tmp_path / "style.safetensors")
    adapter = open_checkpoint(tmp_path / "style.safetensors")
    for state, other, count in ((small, "lora_te2_", 4), (large, "lora_te1_", 4)):
        named = adapter.named_as(state)
        assert set(named.low_rank) == {f"{name}.weight" for name in text_layers(state)}
        assert f"{count} updates of {other} are of another base" in named.notes[-1]
    twins = file | diffusion.kohya(text_layers(small), 1, rank=2, alpha=2.0, part="lora_te2_")
    save_file(twins, tmp_path / "twins.safetensors")
    with pytest.raises(CheckpointError, match="are both of the base's"):
        open_checkpoint(tmp_path / "twins.safetensors").named_as(small)


@pytest.mark.parametrize(("of_base", "of_file"), [("", "text_model."), ("text_model.", "")])
def test_text_encoders_of_one_shape_are_told_apart_by_their_folder(of_base, of_file, tmp_path):
    """transformers 4 has `text_model.` before CLIP's names, and transformers 5 has not."""
    state = text_encoder(12)
    layers = {f"{of_file}{name}": weight for name, weight in text_layers(state).items()}
    parts = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    made = {p: diffusion.kohya(layers, seed, 2, 2.0, p) for seed, p in enumerate(parts.values())}
    save_file(made["lora_te1_"] | made["lora_te2_"], tmp_path / "both.safetensors")
    save_file(made["lora_te1_"], tmp_path / "first.safetensors")
    for folder, part in parts.items():
        (tmp_path / folder).mkdir()
        base = {f"{of_base}{name}": weight for name, weight in state.items()}
        save_file(base, tmp_path / folder / "model.safetensors")
        given = (tmp_path / folder, {"a": tmp_path / "both.safetensors"}, "task_arithmetic")
        found = covmerge.merge(*given, scale=1.0).tensors
        expected = updated(state, made[part], f"{part}{flat_name(of_file)}")
        assert_same({n.removeprefix(of_base): w for n, w in found.items()}, expected)
    with pytest.raises(CheckpointError, match="or is another part of the pipeline"):
        covmerge.merge(tmp_path / "text_encoder_2", {"a": tmp_path / "first.safetensors"}, "linear")


def test_a_file_for_another_unet_is_refused(folder, tmp_path):
    weights = {
        n: torch.ones(w.shape[0] + 2, *w.shape[1:])
        for n, w in diffusion.layers(diffusion.unet()).items()
    }
    save_file(diffusion.kohya(weights, 1, rank=2, alpha=1.0), tmp_path / "other.safetensors")
    given = ("merge", "--base", folder / "unet", f"--expert=o={tmp_path}/other.safetensors")
    failed = command(*given, tmp_path / "out", code=2)
    assert "no such tensor, or of another shape" in words(failed.stderr)


def loaded_into_unet(out):
    """The U-Net with a merged LoRA file, loaded and fused by diffusers."""
    return diffusion.fused({"merged": out / "pytorch_lora_weights.safetensors"}, [1.0])


@pytest.mark.parametrize(
    ("experts", "flags", "end"),
    [
        (("one", "two"), [], ".alpha"),
        (("one", "two"), ["--as=diffusers"], ".lora_B.weight"),
        (("three",), [], ".lora_B.weight"),
        (("one", "three"), ["--as=kohya"], ".alpha"),
    ],
    ids=["kohya", "kohya to diffusers", "diffusers", "mixed to kohya"],
)
def test_files_become_one_file_of_their_form(folder, tmp_path, experts, flags, end):
    sources = [f"--expert={name}={folder / name}.safetensors" for name in experts]
    given = ("--method=task_arithmetic", "--set=scale=0.5", *(flags or ["--as=adapter"]))
    out = tmp_path / "out"
    ran = command("merge", "--base", folder / "unet", *sources, *given, out)
    tensors = load_file(out / "pytorch_lora_weights.safetensors")
    assert any(name.endswith(end) for name in tensors)
    assert not (out / "adapter_config.json").exists()
    assert f'pipe.load_lora_weights("{out}")' in ran.stdout
    assert "diffusers loads it" in words(ran.stdout)
    assert_same(
        loaded_into_unet(out), diffusion.fused(files(folder, *experts), [0.5] * len(experts))
    )
    written = load_file(folder / f"{experts[0]}.safetensors")
    if not flags:
        assert tensors.keys() == written.keys()
    command("verify", out)
    # It is an expert again.
    again = covmerge.merge(folder / "unet", {"merged": out}).tensors
    assert_same(again, diffusion.fused(files(folder, *experts), [0.5] * len(experts)))


def test_experts_of_two_forms_need_a_word(folder, tmp_path):
    sources = [f"--expert={name}={folder / name}.safetensors" for name in ("one", "three")]
    command("merge", "--base", folder / "unet", *sources, "--as=adapter", tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()  # PEFT's, as ever
    failed = command(
        *("merge", "--base", folder / "unet", *sources, "--as=kohja", tmp_path / "no"), code=2
    )
    assert "'kohja': it is one of model, adapter, peft, kohya" in failed.stderr


def test_a_full_unet_becomes_a_file(folder, tmp_path):
    covmerge.merge(folder / "unet", files(folder, "one"), out=tmp_path / "tuned")
    for form in ("kohya", "diffusers"):
        out = tmp_path / form
        command("extract", folder / "unet", tmp_path / "tuned", out, "--rank=4", f"--as={form}")
        assert_same(loaded_into_unet(out), diffusion.fused(files(folder, "one"), [1.0]))


def single_file(names, path):
    """The U-Net and a text encoder in one file, as single files name them."""
    text = text_encoder(12)
    unet = {names[name]: weight for name, weight in diffusion.unet().state_dict().items()}
    stored = {**unet, **{f"{TEXT_ENCODER}{name}": weight for name, weight in text.items()}}
    stored["first_stage_model.decoder.conv_in.weight"] = torch.ones(3, 3, 3, 3)
    save_file(stored, path)
    return stored, text


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_a_full_single_file_becomes_a_file_and_is_itself_again(names, folder, tmp_path, form):
    base = tmp_path / "base.safetensors"
    stored, text = single_file(names, base)
    # What was learnt has rank 3: of layers in both parts.
    tuned = dict(stored)
    for name, weight in diffusion.fused(files(folder, "one"), [1.0]).items():
        tuned[names[name]] = weight.clone()
    learnt = diffusion.kohya(text_layers(text), 5, rank=2, alpha=1.0, part="lora_te_")
    for name, weight in updated(text, learnt, "lora_te_").items():
        tuned[f"{TEXT_ENCODER}{name}"] = weight

    lora = tmp_path / form
    tuned["first_stage_model.decoder.conv_in.weight"] = torch.full((3, 3, 3, 3), 2.0)
    save_file(tuned, tmp_path / "tuned.safetensors")
    given = ("extract", base, tmp_path / "tuned.safetensors", lora, "--rank=3", f"--as={form}")
    ran = command(*given, "--json")
    assert any("first_stage_model" in note for note in ran.json["notes"])
    assert ran.json["totals"]["left_out_energy"] > 0
    tuned["first_stage_model.decoder.conv_in.weight"] -= 1
    (written,) = lora.glob("*.safetensors")
    keys = load_file(written).keys()
    parts = ("lora_unet_", "lora_te_") if form == "kohya" else ("unet.", "text_encoder.")
    assert all(any(key.startswith(part) for key in keys) for part in parts)
    assert all(key.startswith(parts) for key in keys)
    assert_same(loaded_into_unet(lora), diffusion.fused(files(folder, "one"), [1.0]))

    out = tmp_path / "again"
    command("merge", "--base", base, f"--expert=own={written}", out)
    assert_same(load_file(out / "model.safetensors"), tuned)


def test_weights_by_block_of_a_single_file(names, folder, tmp_path):
    """By the block names that single files have, it is what diffusers makes by its own."""
    single_file(names, tmp_path / "base.safetensors")
    blocks = {"model.diffusion_model.input_blocks.*": 0.2, "*.middle_block.*": 0.0}
    by_name = [{"match": match, "value": value} for match, value in blocks.items()]
    given = {
        "base": str(tmp_path / "base.safetensors"),
        "experts": {
            "one": {
                "source": str(folder / "one.safetensors"),
                "weight": {"by_name": [*by_name, {"value": 0.9}]},
            }
        },
        "method": "task_arithmetic",
        "parameters": {"scale": 1.0},
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(given))
    command("merge", tmp_path / "recipe.yml", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    scale = {"down": 0.2, "mid": 0.0, "up": 0.9}
    whole = {part: diffusion.fused(files(folder, "one"), [scale[part]]) for part in scale}
    for name in diffusion.layers(diffusion.unet()):
        part = name.partition("_")[0]
        key = f"{name}.weight"
        torch.testing.assert_close(found[names[key]], whole[part][key], rtol=1e-5, atol=1e-6)


def test_a_single_file_base_has_files_of_both_parts(names, tmp_path):
    model, text = diffusion.unet(), text_encoder(12)
    single = {names[name]: weight for name, weight in model.state_dict().items()}
    single |= {f"cond_stage_model.transformer.{name}": weight for name, weight in text.items()}
    save_file(single, tmp_path / "base.safetensors")
    for seed, name in enumerate("ab"):
        file = diffusion.kohya(diffusion.layers(model), seed, rank=2, alpha=1.0)
        file |= diffusion.kohya(text_layers(text), seed, rank=2, alpha=1.0, part="lora_te_")
        save_file(file, tmp_path / f"{name}.safetensors")
    given = [f"--expert={name}={tmp_path}/{name}.safetensors" for name in "ab"]
    command(
        "merge", "--base", tmp_path / "base.safetensors", *given, "--as=adapter", tmp_path / "out"
    )
    merged = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    assert merged.keys() == load_file(tmp_path / "a.safetensors").keys()
    assert {float(value) for name, value in merged.items() if name.endswith(".alpha")} <= {
        2.0,
        3.0,
        4.0,
    }


def test_an_output_of_this_form_is_reported_on(folder, tmp_path):
    sources = {name: folder / f"{name}.safetensors" for name in ("one", "two")}
    covmerge.merge(folder / "unet", sources, out=tmp_path / "out", form="kohya")
    report = ReportJob(tmp_path / "out", spectra="none").run()
    assert report.verification.ok
    assert "diffusers" in (tmp_path / "out" / "README.md").read_text()


def test_a_scale_in_the_metadata_is_the_one_that_diffusers_loads(folder, tmp_path):
    """It was refused; the fused model is diffusers' own, and the unmerged one its outputs."""
    tensors = load_file(folder / "three.safetensors")
    file = tmp_path / "pytorch_lora_weights.safetensors"
    fields = {"unet.r": 4, "unet.lora_alpha": 8, "unet.target_modules": list(diffusion.TARGETS)}
    save_file(tensors, file, {"lora_adapter_metadata": json.dumps(fields), "format": "pt"})
    merged = covmerge.merge(folder / "unet", {"a": file}, "average").tensors
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    loader = diffusers.loaders.StableDiffusionLoraLoaderMixin
    found, alphas, metadata = loader.lora_state_dict(
        str(file), unet_config=model.config, return_lora_metadata=True
    )
    loader.load_lora_into_unet(found, alphas, model, adapter_name="a", metadata=metadata)
    model.fuse_lora()
    model.unload_lora()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)


# Layers of the authors of Flux, SD3 and Wan, and what diffusers makes of each.
OF_AUTHORS = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
    "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
    "single_blocks.1.linear1": [
        *(f"single_transformer_blocks.1.attn.to_{x}" for x in "qkv"),
        "single_transformer_blocks.1.proj_mlp",
    ],
    "joint_blocks.0.context_block.attn.qkv": [
        f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"
    ],
    "joint_blocks.0.context_block.adaLN_modulation.1": [
        "transformer_blocks.0.norm1_context.linear"
    ],
    "blocks.0.self_attn.o": ["blocks.0.attn1.to_out.0"],
    "blocks.0.cross_attn.k_img": ["blocks.0.attn2.add_k_proj"],
    "blocks.0.ffn.2": ["blocks.0.ffn.net.2"],
}


@pytest.mark.parametrize("first", ["double|single", "joint", "blocks"])
@pytest.mark.parametrize("flat", [True, False])
def test_names_of_a_transformers_authors(tmp_path, first, flat):
    torch.manual_seed(0)
    base, file, right = {"transformer_blocks.1.norm1.linear.weight": torch.randn(4, 8)}, {}, {}
    for layer, parts in OF_AUTHORS.items():
        if re.match(first, layer):
            rows = [4 + 2 * part.endswith("mlp") for part in parts]
            down, up = torch.randn(3, 8), torch.randn(sum(rows), 3)
            updates = (up @ down / 3).split(rows)
            for part, update in zip(parts, updates, strict=True):
                base[f"{part}.weight"] = torch.randn(update.shape)
                right[f"{part}.weight"] = base[f"{part}.weight"] + update
            stem = f"lora_unet_{layer.replace('.', '_')}" if flat else f"diffusion_model.{layer}"
            file |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
            file[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(file, tmp_path / "lora.safetensors")
    experts = {"a": tmp_path / "lora.safetensors"}
    result = covmerge.merge(base, experts, "average", allow=["not-a-fine-tune"])
    assert any("are under the names of the model's authors" in note for note in result.notes)
    for name, tensor in right.items():
        torch.testing.assert_close(result.tensors[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_layer_that_a_file_has_under_two_of_the_authors_names_is_refused(tmp_path):
    base = {f"transformer_blocks.0.attn.to_{x}.weight": torch.zeros(4, 8) for x in "qkv"}
    stems = "lora_unet_double_blocks_0_img_attn_qkv", "diffusion_model.double_blocks.0.img_attn.qkv"
    file = {f"{stem}.lora_down.weight": torch.ones(1, 8) for stem in stems}
    file |= {f"{stem}.lora_up.weight": torch.ones(12, 1) for stem in stems}
    save_file(file, tmp_path / "lora.safetensors")
    said = advice("'{}' and '{}' are both of '{}': remove one")
    with pytest.raises(CheckpointError, match=said):
        covmerge.merge(base, [tmp_path / "lora.safetensors"])
    kept = {name: tensor for name, tensor in file.items() if not name.startswith("lora_unet_")}
    save_file(kept, tmp_path / "lora.safetensors")
    result = covmerge.merge(base, [tmp_path / "lora.safetensors"], allow=["not-a-fine-tune"])
    assert torch.equal(result.tensors["transformer_blocks.0.attn.to_v.weight"], torch.ones(4, 8))
