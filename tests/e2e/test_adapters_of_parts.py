"""Adapters made on a part of their base: CLIP's image encoder, the language model of Gemma 3, a thinker."""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionModel,
)

import covmerge
from covmerge.errors import TensorError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.quantised.view import dequantised
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.e2e.following import noted
from tests.e2e.test_parts import TEXT, clip, gemma3, llava
from tests.quantised.models import FORMATS, save_packed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def clip_text():
    whole, _ = clip()
    part = CLIPTextModel(whole.config.text_config)
    part.load_state_dict(whole.text_model.state_dict())
    return whole, part


def siglip():
    whole, _ = gemma3()
    part = SiglipVisionModel(whole.config.vision_config)
    part.load_state_dict(whole.model.vision_tower.state_dict())
    return whole, part


def qwen2_vl():
    """Its vision model is of a class that transformers does not export."""
    sight = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=TEXT, vision_config=sight)
    whole = Qwen2VLForConditionalGeneration(config)
    return whole, whole.model.visual


# The model and a part of it, the part's path in the model, and what that is in the part by itself.
MADE = {
    "clip-vision": (clip, "vision_model.", ""),
    "clip-text": (clip_text, "text_model.", ""),
    "gemma3-text": (gemma3, "model.language_model.", "model."),
    "gemma3-vision": (siglip, "model.vision_tower.", ""),
    "qwen2-vl-vision": (qwen2_vl, "model.visual.", ""),
    "llava-text": (llava, "model.language_model.", "model."),
}


def adapted(model, folder, seed, base, **settings):
    """Save an adapter of a model; return the updates of its layers."""
    model = copy.deepcopy(model)
    model.name_or_path = str(base)
    targets = ["q_proj", "fc1", "up_proj"]
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": targets} | settings)
    made = get_peft_model(model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return updates(made)


def updates(model):
    """The update of each layer with factors, by the layer's name, in float64."""
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A")}
    return {n: layer.double().get_delta_weight("default").detach() for n, layer in layers.items()}


def loaded(model, folder):
    """The updates of an adapter that PEFT loads, without a warning, over a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return updates(PeftModel.from_pretrained(copy.deepcopy(model), folder))


def moved(base, found):
    """How much each weight that differs differs from the base's, by the module's name."""
    pairs = zip(base.named_parameters(), found.named_parameters(), strict=True)
    moves = {n.removesuffix(".weight"): b.double() - a.double() for (n, a), (_, b) in pairs}
    return {name: move for name, move in moves.items() if move.abs().max() > 0}


def check(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


class Case:
    def __init__(self, kind, folder):
        make, self.path, self.prefix = MADE[kind]
        self.folder = folder
        torch.manual_seed(0)
        self.whole, self.part = make()
        self.whole.save_pretrained(folder / "base")
        self.part.save_pretrained(folder / "part")
        self.added = {
            name: adapted(self.part, folder / name, seed, folder / "part")
            for seed, name in enumerate("ab")
        }
        self.mean = {n: (m + self.added["b"][n]) / 2 for n, m in self.added["a"].items()}

    def of_whole(self, updates):
        return {self.path + name.removeprefix(self.prefix): m for name, m in updates.items()}

    def merge(self, names="ab", **options):
        experts = {name: self.folder / name for name in names}
        return covmerge.merge(self.folder / "base", experts, "average", **options)


@pytest.fixture(scope="module", params=list(MADE)[:5])
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_over_the_whole(case, tmp_path):
    done = case.merge(out=tmp_path / "out")
    noted("was made on a part of the base, '", done.notes)
    merged = type(case.whole).from_pretrained(tmp_path / "out")
    check(moved(case.whole, merged), case.of_whole(case.mean))
    command("verify", "--deep", tmp_path / "out")


def test_as_one_adapter_of_the_part(case, tmp_path):
    case.merge(out=tmp_path / "out", form="adapter")
    check(loaded(case.part, tmp_path / "out"), case.mean)


def test_beside_an_adapter_of_the_whole(case, tmp_path):
    """Their merged adapter is of the whole."""
    both = adapted(case.whole, case.folder / "w", 5, case.folder / "base")
    right = {n: (m + case.of_whole(case.added["a"]).get(n, 0)) / 2 for n, m in both.items()}
    case.merge("aw", out=tmp_path / "out")
    merged = type(case.whole).from_pretrained(tmp_path / "out")
    check(moved(case.whole, merged), right)
    case.merge("aw", out=tmp_path / "adapter", form="adapter")
    check(loaded(case.whole, tmp_path / "adapter"), right)


def test_where_no_file_says_which_part(tmp_path):
    """A task leaves `auto_mapping` away; the folder that an adapter names is not opened."""
    case = Case("clip-vision", tmp_path)
    right = adapted(case.part, tmp_path / "a", 0, tmp_path / "part", task_type="FEATURE_EXTRACTION")
    said = advice("If the adapter was made on such a part, name its class in adapter_config.json")
    with pytest.raises(TensorError, match=r"its parts 'text_model', 'vision_model'.*" + said):
        case.merge("a")
    file = tmp_path / "a" / "adapter_config.json"
    named = {"auto_mapping": {"base_model_class": "CLIPVisionModel"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    case.merge("a", out=tmp_path / "out")
    merged = type(case.whole).from_pretrained(tmp_path / "out")
    check(moved(case.whole, merged), case.of_whole(right))


def test_a_head_beside_a_part(tmp_path):
    case = Case("llava-text", tmp_path)
    for seed, name in enumerate("ab"):
        settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        adapted(case.part, tmp_path / name, seed, "", **settings)
    done = case.merge(out=tmp_path / "out", form="adapter")
    noted("and changes that and 'lm_head.weight'", done.notes)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {n.removeprefix("base_model.model.").partition(".")[0] for n in stored}
    assert names == {"model", "lm_head"}
    assert loaded(case.part, tmp_path / "out").keys() == loaded(case.part, tmp_path / "a").keys()


def test_two_layers_of_one_name_in_the_part_are_not_one(tmp_path):
    """Of a model with two encoders, say. One of the two updates was lost."""
    case = Case("clip-vision", tmp_path)
    file = tmp_path / "a" / "adapter_model.safetensors"
    held = load_file(file)
    names = {n: n.removeprefix("base_model.model.") for n in held}
    twice = {
        f"base_model.model.{e}.{own}": held[n].clone() for n, own in names.items() for e in "xy"
    }
    save_file(twice, file)
    with pytest.raises(
        TensorError, match=r"expert 'a' .* updates 8 tensors that the base .* lacks"
    ):
        case.merge("a")


@pytest.mark.parametrize("kind", ["fp8 by tensor", "gptq"])
def test_over_a_quantised_base(kind, tmp_path):
    torch.manual_seed(0)
    whole, part = clip()
    right = adapted(part, tmp_path / "a", 1, "")
    pack, settings = FORMATS[kind]
    base = save_packed(whole, tmp_path / "base", pack, settings)
    plain = dequantised(open_checkpoint(base))
    found = covmerge.merge(base, {"a": tmp_path / "a"}, "average", out_dtype="float32").tensors
    for name, tensor in found.items():
        module = name.removeprefix("vision_model.").removesuffix(".weight")
        update = right.get(module, 0) if name.startswith("vision_model.") else 0
        torch.testing.assert_close(tensor, (plain.read(name).double() + update).float())
    covmerge.merge(base, {"a": tmp_path / "a"}, "average", tmp_path / "out", form="adapter")
    check(loaded(part, tmp_path / "out"), right)
