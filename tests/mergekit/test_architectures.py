"""Models of any architecture, merged by recipes of mergekit: loaded, and summed by hand."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from covmerge.errors import InputError
from covmerge.files.tensors.names import layer_name
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import load_recipe
from tests.tensors.models import EXPERTS, GROUPED, IMAGE, T5, TEXT

TWO = {"num_hidden_layers": 2}
TEXT, IMAGE = {**TEXT, **TWO}, {**IMAGE, **TWO}
_QWEN_VISION = {
    **{"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
    **{"patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1, "in_channels": 3},
}
_QWEN = {**GROUPED, **TWO, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
_WHISPER = {
    **{"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16},
    **{"encoder_layers": 2, "decoder_layers": 2, "max_target_positions": 16},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Case:
    """A model of transformers', and how many of its stacks of layers there are."""

    model: str
    config: str
    values: dict[str, Any]
    stacks: int = 1


CASES = {
    "vit": Case("ViTForImageClassification", "ViTConfig", IMAGE),
    "clip": Case(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        stacks=2,
    ),
    "qwen2_vl": Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": _QWEN, "vision_config": _QWEN_VISION},
        stacks=2,
    ),
    "whisper": Case("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, stacks=2),
    "t5": Case("T5ForConditionalGeneration", "T5Config", {**T5, "num_layers": 2}, stacks=2),
    "mamba": Case("MambaForCausalLM", "MambaConfig", _MAMBA),
    "mixtral": Case(
        "MixtralForCausalLM", "MixtralConfig", {**EXPERTS, **TWO, "num_local_experts": 2}
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**EXPERTS, **TWO, "num_experts": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM", "GptOssConfig", {**EXPERTS, **TWO, "num_local_experts": 2}
    ),
}
CUSTOM = "custom"  # of code that transformers does not know
LINEAR = {
    "merge_method": "linear",
    "models": [
        {"model": "./t0", "parameters": {"weight": 0.75}},
        {"model": "./t1", "parameters": {"weight": 0.25}},
    ],
}
TIES = {
    "merge_method": "ties",
    "base_model": "./base",
    "models": [{"model": "./t0"}, {"model": "./t1"}],
    "parameters": {"weight": 1.0, "density": 0.5},
}


def save_base(name, folder):
    torch.manual_seed(0)
    if name != CUSTOM:
        case = CASES[name]
        config = getattr(transformers, case.config)(**case.values)
        getattr(transformers, case.model)(config).save_pretrained(folder)
        return
    folder.mkdir()
    tensors = {"tok.weight": torch.randn(64, 32), "final.scale": torch.randn(32)}
    for layer in range(2):
        tensors[f"stack.{layer}.mix.kernel"] = torch.randn(3, 32, 16)
        tensors[f"stack.{layer}.gate"] = torch.randn(32, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"}
    config = {"model_type": "nobody_knows", "architectures": ["Model"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    ran = folder.parent / "ran"
    (folder / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders of models, each made when it is asked for."""
    root = tmp_path_factory.mktemp("families")

    def family(name):
        folder = root / name
        if folder.exists():
            return folder
        folder.mkdir()
        save_base(name, folder / "base")
        base = load_file(folder / "base" / "model.safetensors")
        for t in range(2):
            torch.manual_seed(t + 1)
            own = {n: w + 0.005 * torch.randn_like(w) for n, w in base.items()}
            (folder / f"t{t}").mkdir()
            for file in (folder / "base").iterdir():
                (folder / f"t{t}" / file.name).write_bytes(file.read_bytes())
            save_file(own, folder / f"t{t}" / "model.safetensors", metadata={"format": "pt"})
        return folder

    return family


def tensors_of(folder, *names):
    return [load_file(folder / name / "model.safetensors") for name in names]


def linear_by_hand(_, t0, t1):
    return ((0.75 * t0.double() + 0.25 * t1.double()) / 1.0).float()


def ties_by_hand(base, *experts):
    """TIES, entry by entry, trimmed by tensor."""
    kept = []
    for expert in experts:
        delta = (expert - base).flatten()
        order = delta.abs().argsort(descending=True)[: max(1, int(0.5 * delta.numel()))]
        own = torch.zeros_like(delta)
        own[order] = delta[order]
        kept.append(own)
    sign = torch.where(sum(kept) >= 0, 1.0, -1.0)
    agreed = [torch.where(own.sign() == sign, own, 0) for own in kept]
    count = sum((own != 0).float() for own in agreed)
    return base + (sum(agreed) / count.clamp(min=1)).view_as(base)


def load(name, folder):
    """Load a model by transformers, without anything missing."""
    model, told = getattr(transformers, CASES[name].model).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def merged(recipe, folder, out):
    file = folder / "their.yml"
    file.write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(file), out)
    return load_file(out / "model.safetensors")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*CASES, CUSTOM])
@pytest.mark.parametrize(("recipe", "by_hand"), [(LINEAR, linear_by_hand), (TIES, ties_by_hand)])
def test_it_is_merged_and_loads(name, recipe, by_hand, families, tmp_path, monkeypatch):
    folder = families(name)
    monkeypatch.chdir(folder)
    tensors = merged(recipe, folder, tmp_path / "out")
    base, *experts = tensors_of(folder, "base", "t0", "t1")
    assert tensors.keys() == base.keys()
    for tensor, own in tensors.items():
        wanted = by_hand(base[tensor], *(expert[tensor] for expert in experts))
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6, msg=tensor)
    assert not (folder / "ran").exists()
    if name != CUSTOM:
        load(name, tmp_path / "out")


@pytest.mark.parametrize("name", [*CASES, CUSTOM])
def test_its_layers_are_stacked_where_they_are_one_stack(name, families, tmp_path, monkeypatch):
    folder = families(name)
    monkeypatch.chdir(folder)
    slices = [
        {"sources": [{"model": f"./t{t}", "layer_range": [first, 2]}]}
        for t, first in ((0, 0), (1, 1))
    ]
    recipe = {"merge_method": "passthrough", "slices": slices}
    if name != CUSTOM and CASES[name].stacks > 1:
        with pytest.raises(InputError, match="has several stacks of layers"):
            merged(recipe, folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    tensors = merged(recipe, folder, tmp_path / "out")
    first, second = tensors_of(folder, "t0", "t1")
    for tensor, own in tensors.items():
        layer = layer_name(tensor)
        from_second = layer is not None and layer.index == 2
        wanted = second[layer.at(1)] if from_second else first.get(tensor)
        if layer is None and wanted is not None and not torch.equal(own, wanted):
            wanted = second[tensor]  # what lies behind the layers
        assert torch.equal(own, wanted), tensor
    if name != CUSTOM:
        assert load(name, tmp_path / "out").config.num_hidden_layers == 3
