"""Sources as training scripts and other libraries leave them."""

import copy
import json
import re

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import covmerge
from covmerge.errors import CheckpointError, InputError, RecipeError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.checkpoints.unwrapped import unwrapped
from tests.adapters.models import llama, mixtral
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.e2e.test_adapters import save_two_adapters

GENERATOR = torch.Generator().manual_seed(0)


def timm():
    """A block of a vision transformer, as timm and open_clip name it."""
    shapes = {
        **{"pos_embed": (1, 5, 8), "patch_embed.proj.weight": (8, 3, 2, 2), "norm.weight": (8,)},
        **{"blocks.0.attn.qkv.weight": (24, 8), "blocks.0.attn.qkv.bias": (24,)},
        **{"blocks.0.attn.proj.weight": (8, 8), "blocks.0.mlp.fc1.weight": (16, 8)},
    }
    return {name: torch.randn(shape, generator=GENERATOR) for name, shape in shapes.items()}


def moved(tensors):
    return {n: w + 0.01 * torch.randn(w.shape, generator=GENERATOR) for n, w in tensors.items()}


BASE = timm()
ONE, TWO = moved(BASE), moved(BASE)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def plain():
    return covmerge.merge(BASE, {"a": ONE, "b": TWO}, "actmat")


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "module.model."]
)
def test_a_wrappers_prefix_changes_nothing_and_is_told(plain, prefix):
    wrapped = {prefix + name: tensor for name, tensor in ONE.items()}
    result = covmerge.merge(BASE, {"a": wrapped, "b": TWO}, "actmat")
    assert equal(result.tensors, plain.tensors)
    (note,) = [note for note in result.notes if "left out of the names" in note]
    assert "expert 'a'" in note and all(f"'{part}.'" in note for part in prefix[:-1].split("."))


def test_blocks_that_were_compiled_one_by_one(plain):
    wrapped = {n.replace("blocks.0.", "blocks.0._orig_mod."): t for n, t in ONE.items()}
    assert equal(covmerge.merge(BASE, {"a": wrapped, "b": TWO}, "actmat").tensors, plain.tensors)


def test_a_wrapped_base_gives_a_model_under_its_own_names(plain):
    base = {f"module.{name}": tensor for name, tensor in BASE.items()}
    assert equal(covmerge.merge(base, {"a": ONE, "b": TWO}, "actmat").tensors, plain.tensors)


@pytest.mark.parametrize(
    "names",
    [
        ("module.fc.weight", "fc.bias"),  # not all of them
        (
            "model.fc.weight",
            "model.fc.bias",
        ),  # a backbone's own name, without a base to hold it against
        ("fc._orig_mod.weight", "fc.weight"),  # two that would become one
        ("module.",),
        ("my_orig_mod.weight",),
    ],
)
def test_other_names_stay(names):
    checkpoint = open_checkpoint({name: torch.ones(1) for name in names})
    assert unwrapped(checkpoint) is checkpoint


def test_a_lightning_file(tmp_path, plain):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {f"model.{n}": t for n, t in ONE.items()}, "epoch": 3}, path)
    assert equal(covmerge.merge(BASE, {"a": path, "b": TWO}, "actmat").tensors, plain.tensors)


def test_wrapped_files_are_merged_to_disk_verified_and_computed_again(tmp_path, plain):
    for name, tensors in (("base", BASE), ("a", ONE)):
        wrapped = {f"module.{n}": t for n, t in tensors.items()}
        save_file(wrapped, tmp_path / f"{name}.safetensors")
    save_file(TWO, tmp_path / "b.safetensors")
    base, one, two = (tmp_path / f"{name}.safetensors" for name in ("base", "a", "b"))
    covmerge.merge(base, {"a": one, "b": two}, "actmat", tmp_path / "out")
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), plain.tensors)
    assert covmerge.verify(tmp_path / "out").ok
    command("verify", tmp_path / "out", "--deep")


def test_fused_projections_by_name_are_told(plain):
    (note,) = [note for note in plain.notes if "q, k and v" in note]
    assert note.startswith("1 matrix is known") and "blocks.0.attn.qkv.weight" in note
    apart = covmerge.merge(BASE, [ONE, TWO], "actmat", tensors={"fused": "split"}).tensors
    base, one, two, merged = (
        own["blocks.0.attn.qkv.weight"].chunk(3) for own in (BASE, ONE, TWO, apart)
    )
    for place in range(3):
        updates = [one[place] - base[place], two[place] - base[place]]
        alone = covmerge.merge_layer(updates, method="actmat")
        torch.testing.assert_close(merged[place] - base[place], alone)


def test_modules_are_their_tensors():
    base, one, two = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(3))
    for module in (one, two):
        module.load_state_dict(moved(base.state_dict()))
    kept, a, b = (module.state_dict() for module in (base, one, two))
    result = covmerge.merge(base, {"a": nn.DataParallel(one), "b": two}, "average")
    assert equal(result.tensors, covmerge.merge(kept, {"a": a, "b": b}, "average").tensors)
    assert result.recipe.base == "<state dict>"


def test_a_module_of_transformers_is_known_by_its_config(tmp_path):
    models = {name: llama() for name in ("base", "a", "b")}
    start = models["base"].state_dict()
    for name, model in models.items():
        if name != "base":
            model.load_state_dict(moved(start))
        model.save_pretrained(tmp_path / name)
    held = covmerge.merge(models["base"], [models["a"], models["b"]], "ace")
    saved = covmerge.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], "ace")
    assert equal({n: held.tensors[n] for n in saved.tensors}, saved.tensors)
    assert not [note for note in held.notes if "name rules" in note]


def test_a_mixture_in_memory_is_merged_as_its_folder_or_says_so(tmp_path):
    """transformers packs the experts as it loads them, and gate and up with each other."""
    models = {name: mixtral() for name in ("base", "a", "b")}
    start = models["base"].state_dict()
    for name, model in models.items():
        if name != "base":
            model.load_state_dict(moved(start))
        model.save_pretrained(tmp_path / name)
    experts = [models["a"], models["b"]]
    covmerge.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], out=tmp_path / "out")
    folder = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    said = advice(
        "the folder of this model has them apart, and its merge is another: to have the same, pass"
    )
    (warned,) = covmerge.merge(models["base"], experts).warnings
    assert re.search(said, warned)
    as_folder = covmerge.merge(models["base"], experts, tensors={"fused": "split"})
    assert as_folder.warnings == ()
    for name, tensor in as_folder.tensors.items():
        torch.testing.assert_close(tensor, folder[name], rtol=1e-5, atol=1e-6)
    assert not covmerge.merge(models["base"], experts, "average").warnings


def test_a_module_with_an_adapter_inside_is_refused():
    module = nn.ModuleDict({"fc": nn.ModuleDict({"lora_A": nn.Linear(2, 1)})})
    with pytest.raises(CheckpointError, match="holds an adapter beside its weights"):
        covmerge.merge({"fc.weight": torch.ones(1, 2)}, {"a": module}, "average")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, about transformers
def test_adapters_in_memory(tmp_path):
    """PEFT's models, its state dicts with their configurations, and a model of transformers."""
    start, experts = save_two_adapters(tmp_path)
    one, two = experts.values()
    base = AutoModelForCausalLM.from_pretrained(start)
    both = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), one, "one")
    loaded = AutoModelForCausalLM.from_pretrained(start)
    loaded.load_adapter(str(two))
    held = PeftModel.from_pretrained(copy.deepcopy(base), one)
    folders = covmerge.merge(start, [one, two])
    assert equal(covmerge.merge(start, [held, loaded]).tensors, folders.tensors)
    assert equal(covmerge.merge(base, [held, two]).tensors, folders.tensors)
    both.load_adapter(two, "two")
    with pytest.raises(
        CheckpointError, match=advice("holds the adapters {}: pass each as the pair")
    ):
        covmerge.merge(start, [both])
    pairs = {
        name: (get_peft_model_state_dict(both, adapter_name=name), both.peft_config[name])
        for name in ("one", "two")
    }
    assert equal(covmerge.merge(start, pairs).tensors, folders.tensors)
    adapters = [
        covmerge.merge(start, own, out=tmp_path / out, form="adapter").path
        / "adapter_model.safetensors"
        for out, own in (("held", pairs), ("saved", {"one": one, "two": two}))
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    with pytest.raises(CheckpointError, match="pass the PeftModel, its folder or the pair"):
        covmerge.merge(held.get_base_model(), [one, two])
    with pytest.raises(RecipeError, match="experts: one alone is given"):
        covmerge.merge(start, pairs["one"])
    with pytest.raises(InputError, match="is an adapter, and the base is a whole model"):
        covmerge.merge(one, [held])


def test_tied_tensors_in_memory_are_one(tmp_path):
    """Of state dicts too, which have no config: by the memory that they share."""
    models = [llama(tie_word_embeddings=True) for _ in range(3)]
    for number, model in enumerate(models):
        model.load_state_dict(moved(models[0].state_dict()) if number else model.state_dict())
        model.tie_weights()
        model.save_pretrained(tmp_path / str(number))
    base, *experts = models
    start, *folders = (tmp_path / str(number) for number in range(3))
    told = "tied tensors are one, which is merged and written once: lm_head.weight"
    for method in ("ties", "ace"):
        written = covmerge.merge(start, folders, method).tensors
        for own in (
            covmerge.merge(base, experts, method),
            covmerge.merge(base.state_dict(), [one.state_dict() for one in experts], method),
        ):
            assert own.tensors["lm_head.weight"] is own.tensors["model.embed_tokens.weight"]
            assert own.tensors.keys() - written.keys() == {"lm_head.weight"}
            assert equal({name: own.tensors[name] for name in written}, written)
            assert told in own.notes
            base_again = copy.deepcopy(base)
            base_again.load_state_dict(own.tensors)
    # What shares memory in the base and not in an expert is tied no more.
    apart = {name: tensor.clone() for name, tensor in experts[0].state_dict().items()}
    apart["lm_head.weight"] += 1
    untied = covmerge.merge(base.state_dict(), [apart], "average").tensors
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(untied[name], apart[name])


def test_a_home_folder_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    base = {"fc.weight": torch.zeros(2, 2)}
    written = covmerge.merge(base, [{"fc.weight": torch.eye(2)}], out="~/merged")
    assert written.path == tmp_path / "merged"
    covmerge.merge(base, [{"fc.weight": torch.eye(2)}]).save("~/saved")
    assert (tmp_path / "saved" / "covmerge.json").is_file()


def test_a_result_in_memory_is_saved_as_a_merge_to_disk_writes_it(tmp_path):
    models = {name: llama() for name in ("base", "a", "b")}
    start = models["base"].state_dict()
    for name, model in models.items():
        if name != "base":
            model.load_state_dict(moved(start))
        model.save_pretrained(tmp_path / name)
    experts = {name: tmp_path / name for name in ("a", "b")}
    more = {"shard_size": "20KB", "out_dtype": torch.bfloat16}
    result = covmerge.merge(tmp_path / "base", experts, "ace", **more)
    written = covmerge.merge(tmp_path / "base", experts, "ace", tmp_path / "written", **more)
    saved = result.save(tmp_path / "saved")
    assert saved.verification.ok and saved.notes == written.notes
    files = {path.name: path.read_bytes() for path in written.path.iterdir()}
    assert files == {path.name: path.read_bytes() for path in saved.path.iterdir()}
    assert len(files) > 4

    held = covmerge.merge(models["base"], {n: models[n] for n in experts}, "ace")
    held.save(tmp_path / "held")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "held").state_dict()
    assert equal(loaded, held.tensors)
    assert covmerge.verify(tmp_path / "held").ok
    masked = covmerge.merge(models["base"], {n: models[n] for n in experts}, "emr")
    with pytest.raises(
        InputError, match=advice("and the base was in memory: merge with out=FOLDER")
    ):
        masked.save(tmp_path / "masked")
    with pytest.raises(InputError, match=advice("which knows no sources: merge with out=FOLDER")):
        copy.deepcopy(result).save(tmp_path / "copied")
    held.tensors["model.norm.weight"].mul_(2)
    with pytest.raises(InputError, match=advice("merge again, or write the tensors yourself")):
        held.save(tmp_path / "changed")
    weights = tmp_path / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        result.save(tmp_path / "late")
    covmerge.merge(tmp_path / "base", experts, "ace").save(tmp_path / "late")


def test_a_pipeline_names_its_models(tmp_path):
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / part / "diffusion_pytorch_model.safetensors")
    (tmp_path / "model_index.json").write_text(
        json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]})
    )
    with pytest.raises(CheckpointError, match=r"several models \(unet, vae\).*/unet$"):
        open_checkpoint(tmp_path)


def test_a_run_names_its_last_checkpoint(tmp_path):
    for step in (90, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(CheckpointError, match=r"with 2 checkpoints .*/checkpoint-100, .*--last 2"):
        open_checkpoint(tmp_path)
