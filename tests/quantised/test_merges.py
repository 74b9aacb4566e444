"""A quantised expert, or base, merged beside its unquantised twin: the same bytes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckpointError, InputError
from covmerge.files.quantised.view import open_plain
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import Recipe
from covmerge.plan.statistics.model import load_model
from covmerge.run.recompute import recompute
from tests.quantised.models import BY_TRANSFORMERS, FORMATS, GPTQ, build, gptq, llama, save_packed


@pytest.fixture(scope="module", params=FORMATS)
def models(request, tmp_path_factory):
    """A base, an expert, and both as one format stores them, with their plain twins."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    pack, settings = FORMATS[request.param]
    for seed, name in enumerate(("base", "expert", "other")):
        model = build(request.param, seed)
        model.save_pretrained(folder / name)
        packed = save_packed(model, folder / f"{name}-packed", pack, settings)
        twin(packed, folder / name, folder / f"{name}-twin")
    return folder


def twin(packed, plain, out):
    """What a format makes of a model, stored plainly: what is not packed is as it was."""
    checkpoint = open_plain(packed)
    stored = {name: checkpoint.read(name) for name in checkpoint.headers}
    before = load_file(plain / "model.safetensors")
    assert stored.keys() == before.keys()
    changed = {name for name in stored if not torch.equal(stored[name], before[name])}
    assert changed
    for name in changed:
        error = (stored[name].float() - before[name].float()).norm() / before[name].float().norm()
        assert error < 0.25  # of 3 bits the most
    out.mkdir()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((plain / "config.json").read_text())


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["ties", "actmat"])
def test_a_quantised_expert_is_merged_as_its_twin(models, tmp_path, method):
    """A global pass over rows first, and whole matrices."""
    for kind in ("packed", "twin"):
        experts = {"a": models / f"expert-{kind}", "b": models / "other"}
        covmerge.merge(models / "base", experts, method, tmp_path / kind)
    assert_same(weights(tmp_path / "packed"), weights(tmp_path / "twin"))
    assert recompute(tmp_path / "packed", tensors=3).ok


def test_a_quantised_base_gives_a_plain_model_that_loads(models, tmp_path):
    for kind in ("packed", "twin"):
        experts = {"a": models / f"expert-{kind}", "b": models / f"other-{kind}"}
        result = covmerge.merge(
            models / f"base-{kind}", experts, "task_arithmetic", tmp_path / kind
        )
        said = [note for note in result.notes if "is stored quantised" in note]
        assert len(said) == (3 if kind == "packed" else 0)
    assert_same(weights(tmp_path / "packed"), weights(tmp_path / "twin"))
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert "quantization_config" not in config
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    assert covmerge.verify(tmp_path / "packed").ok


def test_a_quantised_base_is_run_as_its_twin(models):
    """By a method that looks at what its layers see."""
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    packed, plain = (
        load_model(open_plain(models / f"base-{kind}"), "cpu", head=True).run(inputs, head=True)
        for kind in ("packed", "twin")
    )
    assert torch.equal(packed.logits, plain.logits)


def test_the_base_may_be_none(models, tmp_path):
    for kind in ("packed", "twin"):
        experts = {"a": str(models / f"expert-{kind}"), "b": str(models / f"other-{kind}")}
        recipe = Recipe.model_validate({"base": None, "method": "linear", "experts": experts})
        run_recipe(recipe, tmp_path / kind)
    assert_same(weights(tmp_path / "packed"), weights(tmp_path / "twin"))
    assert "quantization_config" not in (tmp_path / "packed" / "config.json").read_text()


def test_layers_that_transformers_stores_transposed_are_refused(tmp_path):
    """GPT-2's: their clients pack what a linear layer would have, which may be square."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=64, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    pack, settings = FORMATS["bitsandbytes"]
    with pytest.raises(CheckpointError, match=r"'transformer.h.0.*_proj.*' is of a Conv1D layer"):
        open_plain(save_packed(model, tmp_path / "q", pack_conv1d(pack), settings))


def pack_conv1d(pack):
    return lambda name, weight: pack(name, weight) if name.endswith(".weight") else {name: weight}


def test_a_format_that_is_not_known_is_refused_with_what_to_do(tmp_path):
    model = llama(0)
    model.save_pretrained(tmp_path / "plain")
    pack, settings = FORMATS["gptq"]
    packed = save_packed(model, tmp_path / "q", pack, {**settings, "quant_method": "quip#"})
    with pytest.raises(InputError, match=r"quip#.*can be read.*pass the model as it was"):
        covmerge.merge(packed, {"a": tmp_path / "plain"}, "average", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_scale_that_is_not_finite_is_named(tmp_path):
    pack, settings = FORMATS["fp8 by block"]
    packed = save_packed(llama(1), tmp_path / "q", pack, settings)
    stored = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[f"{name}_scale_inv"][1, 1] = float("nan")
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    llama(0).save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match=rf"'{name}' of expert 'a' holds 1024 NaN or Inf values"):
        covmerge.merge(tmp_path / "base", {"a": packed}, "task_arithmetic", tmp_path / "out")


@pytest.mark.parametrize("form", BY_TRANSFORMERS)
def test_transformers_reads_the_same_of_the_same_file(tmp_path, form):
    """Really loaded; it dequantises on a CPU. Its other formats need packages: `test_goldens.py`."""
    packed = save_packed(build(form, 1), tmp_path, *BY_TRANSFORMERS[form])
    where = {"device_map": "cpu"} if form == "metal" else {}  # which it looks for a GPU for
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.bfloat16, **where
    )
    ours = open_plain(packed)
    expected = theirs.state_dict()
    for name in ours.headers:
        assert torch.equal(ours.read(name), expected[name]), name


@pytest.mark.parametrize("group", [32, 64])
def test_layers_of_gptq_with_bits_of_their_own(tmp_path, group):
    """As GPTQModel's `dynamic` has them; what they are is read off their sizes."""

    def pack(name, weight):
        own = next((bits for leaf, bits in of_their_own.items() if leaf in name), None)
        return gptq(name, weight) if own is None else gptq(name, weight, group, own)

    model = llama(1)
    of_their_own = {"o_proj": 8, "q_proj": 3}
    dynamic = {
        rf"+:.*{leaf}$": {"bits": bits, "group_size": group} for leaf, bits in of_their_own.items()
    }
    stated = {**GPTQ, "dynamic": {**dynamic, r"-:.*x$": {}}}
    save_packed(model, tmp_path / "packed", pack, stated)
    found = open_plain(tmp_path / "packed")
    assert "other sizes by layer" in found.notes[-1]
    for name, weight in model.state_dict().items():
        off = float((found.read(name).float() - weight.float()).norm() / weight.float().norm())
        assert off < (0.01 if "o_proj" in name else 0.3 if "q_proj" in name else 0.13), name


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"bits": 5}, "no layer.s of 2, 3, 4, 8 bits"),
        ({"bits": 8, "pack_dtype": "int16"}, "layers of another pack_dtype"),
    ],
)
def test_layers_of_gptq_that_are_not_read_are_named(tmp_path, own, said):
    def pack(name, weight):
        packed = gptq(name, weight)
        if "o_proj" in name and own == {"bits": 5}:
            zeros = f"{name.removesuffix('.weight')}.qzeros"
            packed[zeros] = packed[zeros][:, : weight.shape[0] * 5 // 64].contiguous()
        return packed

    save_packed(llama(1), tmp_path / "packed", pack, {**GPTQ, "dynamic": {"o_proj": own}})
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path / "packed")
