"""Experts whose tensors are the base's in other pieces: each library reads both as one model."""

import inspect
import json
from copy import deepcopy

import pytest
import torch
import transformers
from diffusers.loaders import FluxLoraLoaderMixin, single_file_utils
from safetensors.torch import save_file
from torch.nn import utils
from torch.nn.utils import prune
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    conversion_mapping,
)

import covmerge
from covmerge.errors import TensorError
from tests.advised import advice
from tests.conversions_of_transformers import TABLE, rules_of

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIGHT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=3)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TEXT, head_dim=8, num_experts=3, moe_intermediate_size=12)
    ),
    "granitemoe": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**TEXT, num_local_experts=3)),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(**SIGHT, num_attention_heads=2, image_size=8, patch_size=4)
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("packed_base", [False, True])
def test_as_transformers_has_it_in_memory(kind, packed_base, tmp_path):
    torch.manual_seed(0)
    base = MODELS[kind]()
    expert = deepcopy(base)
    for parameter in expert.parameters():
        parameter.data += 1e-3 * torch.randn_like(parameter)
    for model, packed, name in ((base, packed_base, "base"), (expert, not packed_base, "a")):
        model.save_pretrained(tmp_path / name)
        if packed:
            own = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            save_file(own, tmp_path / name / "model.safetensors", {"format": "pt"})
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    found, right = type(base).from_pretrained(tmp_path / "out").state_dict(), expert.state_dict()
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-6, atol=1e-6)


def test_the_table_is_the_registry_of_this_transformers():
    table = json.loads(TABLE.read_text())
    registry = conversion_mapping._build_checkpoint_conversion_mapping()
    assert table["transformers"] == transformers.__version__
    assert table["rules"] == {
        key: json.loads(json.dumps([rules_of(t) for t in given]))
        for key, given in registry.items()
        if key != "legacy"
    }


@pytest.mark.parametrize("norm", [utils.weight_norm, utils.parametrizations.weight_norm])
@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weight_norm_over_the_plain_weight(norm, dim):
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3))
    expert = deepcopy(base)
    layer = norm(expert[0], dim=dim)
    for parameter in expert.parameters():
        parameter.data += 0.01 * torch.rand_like(parameter)
    expert(torch.randn(1, 4, 5))  # torch computes the weight
    right = {"0.weight": layer.weight.detach(), "0.bias": layer.bias.detach()}
    given = {name: tensor.clone() for name, tensor in expert.state_dict().items()}
    found = covmerge.merge(base.state_dict(), {"a": given}, "average").tensors
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    said = advice(
        "plain weights, as torch.nn.utils' remove_parametrizations or remove_weight_norm leaves"
    )
    with pytest.raises(TensorError, match=said):
        covmerge.merge(given, {"a": base.state_dict()}, "average")
    if norm is utils.weight_norm:
        utils.remove_weight_norm(layer)
    else:
        utils.parametrize.remove_parametrizations(layer, "weight")
    plain = covmerge.merge(expert.state_dict(), {"a": base.state_dict()}, "average").tensors
    for name, tensor in base.state_dict().items():
        torch.testing.assert_close(plain[name], tensor)


PARAMETRIZED = {
    "orthogonal": (
        lambda layer: utils.parametrizations.orthogonal(layer),
        lambda layer: utils.parametrize.remove_parametrizations(layer, "weight"),
    ),
    "spectral_norm": (
        lambda layer: utils.parametrizations.spectral_norm(layer),
        lambda layer: utils.parametrize.remove_parametrizations(layer, "weight"),
    ),
    "older spectral_norm": (utils.spectral_norm, utils.remove_spectral_norm),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.parametrize("tensors", [{}, {"missing": "base", "extra": "ignore"}])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
def test_a_weight_that_is_computed_is_never_left_to_the_base(name, tensors):
    """Whatever is allowed: the layer would be lost, and the rest merged as if nothing were."""
    torch.manual_seed(0)
    make, undo = PARAMETRIZED[name]
    base = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 30))
    utils.parametrizations.orthogonal(base[0])
    utils.parametrize.remove_parametrizations(base[0], "weight")
    base[0].weight.data = base[0].weight.data.contiguous()
    expert = deepcopy(base)
    make(expert[0])
    with torch.no_grad():
        expert[1].weight += 0.01
    said = advice("pass the expert with plain weights, as remove_parametrizations or")
    with pytest.raises(TensorError, match=said):
        covmerge.merge(base, {"a": expert}, "average", tensors=tensors)
    undo(expert[0])
    found = covmerge.merge(base, {"a": expert}, "average", allow=["not-a-fine-tune"]).tensors
    for key, tensor in expert.state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
def test_weights_that_are_computed_on_both_sides_are_merged_plain(name):
    """A mean of what they are computed of is another weight: of spectral norms, one of any norm."""
    torch.manual_seed(0)
    make, undo = PARAMETRIZED[name]
    models = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 30)) for _ in range(3)]
    for model in models:
        make(model[0])
        model.load_state_dict(models[0].state_dict())
    base, experts = models[0], dict(zip("ab", models[1:], strict=True))
    for expert in experts.values():
        for parameter in expert.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        expert(torch.randn(1, 6))
    said = advice("as remove_parametrizations or remove_spectral_norm of torch.nn.utils leave them")
    with pytest.raises(TensorError, match=said):
        covmerge.merge(base, experts, "average")
    for model in models:
        undo(model[0])
    found = covmerge.merge(base, experts, "average", allow=["not-a-fine-tune"]).tensors["0.weight"]
    right = (experts["a"][0].weight + experts["b"][0].weight).detach() / 2
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base_is_pruned", [False, True])
def test_masks_of_pruning_are_applied(base_is_pruned):
    """The mean of masks times the mean of what they mask is no weight of any model."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 30)) for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    for model in models[not base_is_pruned :]:
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        prune.random_unstructured(model[0], "weight", 0.3)
        prune.random_unstructured(model[1], "bias", 0.1)
    base, experts = models[0].state_dict(), dict(zip("ab", models[1:], strict=True))
    result = covmerge.merge(base, experts, "average", allow=["not-a-fine-tune"])
    assert any("2 masks of pruning, such as '" in note for note in result.notes)
    for model in models[not base_is_pruned :]:
        prune.remove(model[0], "weight")
        prune.remove(model[1], "bias")
    a, b = (model.state_dict() for model in models[1:])
    assert result.tensors.keys() == a.keys()
    for name, tensor in result.tensors.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2, rtol=1e-6, atol=1e-6)


D = 8


def layers(**shapes):
    """Weights and biases by name."""
    return {
        f"{name}.{part}": torch.randn(*(shape if part == "weight" else shape[:1]))
        for name, shape in shapes.items()
        for part in ("weight", "bias")
    }


def scales(*names, leaf):
    return {f"{name}.{leaf}": torch.randn(4) for name in names}


def flux():
    embedders = ("time_in", "vector_in", "guidance_in")
    tensors = layers(
        **{f"{name}.{part}_layer": (D, D) for name in embedders for part in ("in", "out")},
        **{"txt_in": (D, 6), "img_in": (D, 5), "final_layer.linear": (5, D)},
        **{"final_layer.adaLN_modulation.1": (2 * D, D)},
    )
    for side in ("img", "txt"):
        at = f"double_blocks.0.{side}"
        tensors |= layers(**{f"{at}_mod.lin": (6 * D, D), f"{at}_attn.qkv": (3 * D, D)})
        tensors |= layers(**{f"{at}_attn.proj": (D, D), f"{at}_mlp.0": (32, D)})
        tensors |= layers(**{f"{at}_mlp.2": (D, 32)})
        norms = (f"{at}_attn.norm.query_norm", f"{at}_attn.norm.key_norm")
        tensors |= scales(*norms, leaf="scale")
    at = "single_blocks.0"
    tensors |= layers(**{f"{at}.modulation.lin": (3 * D, D), f"{at}.linear1": (7 * D, D)})
    tensors |= layers(**{f"{at}.linear2": (D, 5 * D)})
    return tensors | scales(f"{at}.norm.query_norm", f"{at}.norm.key_norm", leaf="scale")


def sd3():
    tensors = {"pos_embed": torch.randn(1, 9, D), "x_embedder.proj.weight": torch.randn(D, 4, 1, 1)}
    tensors |= {"x_embedder.proj.bias": torch.randn(D)}
    tensors |= layers(
        **{f"{name}_embedder.mlp.{n}": (D, D) for name in "ty" for n in (0, 2)},
        **{"context_embedder": (D, 6), "final_layer.linear": (4, D)},
        **{"final_layer.adaLN_modulation.1": (2 * D, D)},
    )
    for block in (0, 1):
        for side in ("x", "context"):
            at = f"joint_blocks.{block}.{side}_block"
            gives = side == "x" or block == 0  # the last block gives no text
            rows = 6 if gives else 2
            tensors |= layers(**{f"{at}.adaLN_modulation.1": (rows * D, D)})
            tensors |= layers(**{f"{at}.attn.qkv": (3 * D, D)})
            tensors |= scales(f"{at}.attn.ln_q", f"{at}.attn.ln_k", leaf="weight")
            if gives:
                tensors |= layers(**{f"{at}.attn.proj": (D, D), f"{at}.mlp.fc1": (32, D)})
                tensors |= layers(**{f"{at}.mlp.fc2": (D, 32)})
    at = "joint_blocks.0.x_block.attn2"
    tensors |= layers(**{f"{at}.qkv": (3 * D, D), f"{at}.proj": (D, D)})
    return tensors | scales(f"{at}.ln_q", f"{at}.ln_k", leaf="weight")


def wan():
    tensors = {"head.modulation": torch.randn(1, 2, D), "blocks.0.modulation": torch.randn(1, 6, D)}
    tensors |= layers(**{f"{n}.{i}": (D, D) for n in ("time_embedding",) for i in (0, 2)})
    tensors |= layers(**{"text_embedding.0": (D, 6), "text_embedding.2": (D, D)})
    tensors |= layers(**{"time_projection.1": (6 * D, D), "head.head": (16, D)})
    tensors |= layers(**{"img_emb.proj.1": (D, D), "img_emb.proj.3": (D, D)})
    tensors |= layers(**{"blocks.0.ffn.0": (32, D), "blocks.0.ffn.2": (D, 32)})
    for attention in ("self_attn", "cross_attn"):
        at = f"blocks.0.{attention}"
        tensors |= layers(**{f"{at}.{part}": (D, D) for part in "qkvo"})
        tensors |= scales(f"{at}.norm_q", f"{at}.norm_k", leaf="weight")
    norms = ("blocks.0.norm3", "img_emb.proj.0", "img_emb.proj.4")
    tensors |= scales(*norms, leaf="weight") | scales(*norms, leaf="bias")
    tensors |= layers(**{f"blocks.0.cross_attn.{part}_img": (D, D) for part in "kv"})
    return tensors | scales("blocks.0.cross_attn.norm_k_img", leaf="weight")


def qwen_image():
    at = "transformer_blocks.0"
    tensors = layers(**{"img_in": (D, 6), "proj_out": (4, D), f"{at}.img_mod.1": (6 * D, D)})
    tensors |= layers(**{f"{at}.attn.to_{part}": (D, D) for part in "qkv"})
    return tensors | {f"{at}.img_mlp.down.weight": torch.randn(D, 16)}


def qwen_image_21():
    return qwen_image() | {"transformer_blocks.0.img_mlp.gate_up.weight": torch.randn(32, D)}


AUTHORS = {
    "qwen-image": (qwen_image, None),
    "qwen-image 2.1": (
        qwen_image_21,
        "convert_qwen_image21_transformer_checkpoint_to_diffusers",
    ),
    "flux": (flux, "convert_flux_transformer_checkpoint_to_diffusers"),
    "sd3": (sd3, "convert_sd3_transformer_checkpoint_to_diffusers"),
    "wan": (wan, "convert_wan_transformer_to_diffusers"),
}


def of_diffusers(kind):
    """Make tensors in the authors' layout, and the function by which diffusers reads them."""
    make, name = AUTHORS[kind]
    scope = dict(vars(single_file_utils))
    if name is not None:  # the width of Flux is written there as a number
        exec(inspect.getsource(scope[name]).replace("inner_dim = 3072", f"inner_dim = {D}"), scope)

    def diffusers(tensors):
        if name is None:
            return tensors
        return {n: t.contiguous() for n, t in scope[name](dict(tensors)).items()}

    torch.manual_seed(0)
    return make(), diffusers


@pytest.mark.parametrize("kind", AUTHORS)
def test_as_the_authors_of_a_diffusion_transformer_store_it(kind):
    base, diffusers = of_diffusers(kind)
    expert = {name: t + 1e-3 * torch.randn_like(t) for name, t in base.items()}
    if "pos_embed" in base:
        expert["pos_embed"] = base["pos_embed"]
    theirs = [diffusers(tensors) for tensors in (base, expert)]
    for prefix in ("", "diffusion_model.", "model.diffusion_model."):
        comfy = [{prefix + name: t for name, t in tensors.items()} for tensors in (base, expert)]
        for ours, others in ((theirs, comfy), (comfy, theirs)):
            found = covmerge.merge(ours[0], {"a": others[1]}, "average").tensors
            assert found.keys() == ours[1].keys()
            for key, tensor in ours[1].items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6)


def matrices(tensors):
    return {n.removesuffix(".weight"): w for n, w in tensors.items() if w.dim() == 2}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", [kind for kind, (_, name) in AUTHORS.items() if name])
def test_a_lora_file_of_diffusers_over_the_authors_file(kind, prefix, tmp_path):
    base, diffusers = of_diffusers(kind)
    right, factors = diffusers(base), {}
    for layer, weight in matrices(right).items():
        down, up = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        factors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        right[f"{layer}.weight"] = weight + up @ down
    FluxLoraLoaderMixin.save_lora_weights(tmp_path, transformer_lora_layers=factors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "all-linear"}
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text(json.dumps(config))
    of_peft = {f"base_model.model.{name}": factor for name, factor in factors.items()}
    save_file(of_peft, peft / "adapter_model.safetensors")
    comfy = {prefix + name: tensor for name, tensor in base.items()}
    for expert in (tmp_path / "pytorch_lora_weights.safetensors", peft):
        found = covmerge.merge(comfy, {"a": expert}, "average", allow=["not-a-fine-tune"]).tensors
        assert found.keys() == comfy.keys()
        found = diffusers({name.removeprefix(prefix): tensor for name, tensor in found.items()})
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("magnitudes", [False, True])
@pytest.mark.parametrize("kind", ["flux", "sd3"])
def test_lokr_and_dora_of_the_authors_layers_over_a_folder_of_diffusers(kind, magnitudes, tmp_path):
    base, diffusers = of_diffusers(kind)
    new, file = dict(base), {}
    for layer, weight in matrices(base).items():
        stem, (rows, columns) = f"lycoris_{layer.replace('.', '_')}", weight.shape
        if magnitudes:
            down, up, lengths = torch.randn(2, columns), torch.randn(rows, 2), torch.rand(rows, 1)
            file |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
            file |= {f"{stem}.alpha": torch.tensor(2.0), f"{stem}.dora_scale": lengths + 1}
            updated = (weight + up @ down).double()
            lengths = (lengths + 1) / updated.norm(dim=1, keepdim=True)
            new[f"{layer}.weight"] = (updated * lengths).float()
        elif rows % 2 == 0:
            one, other = torch.randn(2, 1), torch.randn(rows // 2, columns)
            file |= {f"{stem}.lokr_w1": one, f"{stem}.lokr_w2": other}
            new[f"{layer}.weight"] = weight + torch.kron(one, other)
    save_file(file, tmp_path / "file.safetensors")
    experts = {"a": tmp_path / "file.safetensors"}
    result = covmerge.merge(diffusers(base), experts, "average", allow=["not-a-fine-tune"])
    assert any("under other names or in parts" in note for note in result.notes)
    for name, tensor in diffusers(new).items():
        torch.testing.assert_close(result.tensors[name], tensor, rtol=1e-6, atol=1e-6)
