"""Models that compressed-tensors itself compressed, against what it decompresses of them."""

import json

import pytest
import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import covmerge
from covmerge.errors import CheckpointError, InputError
from covmerge.files.quantised.view import open_plain
from tests.advised import advice
from tests.quantised.models import llama

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 |= {"scale_dtype": "torch.float8_e4m3fn"}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
WORDS = {"type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
# By what is written: the format, and the weights of groups of layers by their targets.
WRITTEN = {
    "NVFP4": ("nvfp4-pack-quantized", {("Linear",): NVFP4}),
    "MXFP4": ("mxfp4-pack-quantized", {("Linear",): {**MX, "num_bits": 4}}),
    "MXFP6": ("mxfp6-pack-quantized", {("Linear",): {**MX, "num_bits": 6}}),
    "MXFP8": ("mxfp8-quantized", {("Linear",): {**MX, "num_bits": 8}}),
    **{
        f"INT{bits}": ("pack-quantized", {("Linear",): {**WORDS, "num_bits": bits}})
        for bits in (2, 3, 5, 6, 7)
    },
    **{
        f"INT{bits}, zeros": (
            "pack-quantized",
            {("Linear",): {**WORDS, "num_bits": bits, "symmetric": False}},
        )
        for bits in (3, 4, 8)
    },
    # Every layer matches two targets or three: a name goes before a pattern, patterns by the alphabet,
    # and a class comes last.
    "mixed": (
        "mixed-precision",
        {
            ("Linear",): NVFP4,
            ("re:.*proj", "model.layers.0.mlp.down_proj"): {**WORDS, "num_bits": 4},
            ("re:.*mlp.*",): {**ROWS},
            ("re:.*[kv]_proj$", "model.layers.0.self_attn.o_proj"): {
                **WORDS,
                "num_bits": 8,
                "symmetric": False,
            },
        },
    ),
    "integers": (
        "mixed-precision",
        {
            ("re:.*gate.*",): {**INT8, "strategy": "group", "group_size": 32},
            ("re:.*mlp.*",): {**WORDS, "num_bits": 4},
            ("Linear",): {**WORDS, "num_bits": 4, "group_size": 16},
        },
    ),
}


def compressed(folder, form, seed=0):
    """Save a model as the library compresses it; return what it decompresses of that, by name."""
    model = llama(seed).eval()
    kind, groups = WRITTEN[form]
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {
            f"group_{place}": {"targets": list(targets), "weights": weights}
            for place, (targets, weights) in enumerate(groups.items())
        },
        "ignore": ["lm_head"],
    }
    model.save_pretrained(folder)
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            _calibrate(module, scheme.weights)
            compress_module(module)
    stored = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    stated = {**config, "quantization_status": "compressed"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stated}))
    for module in model.modules():
        decompress_module(module)
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("weight")}


def _calibrate(module, args):
    weight = module.weight.data.float()
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data = whole.view(1)
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args, whole)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if not args.symmetric:
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)


@pytest.mark.parametrize("form", WRITTEN)
def test_a_model_is_what_the_library_decompresses(tmp_path, form):
    expected = compressed(tmp_path, form)
    model = open_plain(tmp_path)
    plain = llama(0).state_dict()
    assert set(model.headers) == set(plain)
    for name, tensor in plain.items():
        read = model.read(name)
        assert torch.equal(read, expected[name].to(read.dtype)), name
        assert torch.equal(model.read(name, range(5, 9)), read[5:9])
        off = (read.float() - tensor.float()).norm() / tensor.float().norm()
        assert off < (0.6 if "INT2" in form else 0.3), name


@pytest.mark.parametrize("form", ["NVFP4", "mixed"])
def test_bases_and_experts_are_merged_as_their_twins(tmp_path, form):
    for seed, name in enumerate(("base", "expert")):
        compressed(tmp_path / name, form, seed)
        packed = open_plain(tmp_path / name)
        twin = llama(0)
        twin.load_state_dict({name: packed.read(name) for name in packed.headers})
        twin.save_pretrained(tmp_path / f"{name}-twin")
    for kind in ("", "-twin"):
        covmerge.merge(
            tmp_path / f"base{kind}",
            {"a": tmp_path / f"expert{kind}"},
            "ties",
            tmp_path / f"out{kind}",
        )
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in ("out", "out-twin"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("form", "part", "change", "said"),
    [
        ("NVFP4", "_global_scale", None, "_global_scale' is missing"),
        ("NVFP4", "_global_scale", lambda t: t.repeat(2), r"is \[2\], where its layer needs \[1\]"),
        ("NVFP4", "_global_scale", lambda t: t.bfloat16(), "is torch.bfloat16, not torch.float32"),
        ("NVFP4", "_scale", lambda t: t[:, 1:], r"where its layer needs \[96, 4\]"),
        ("NVFP4", "_scale", lambda t: t.float(), "is torch.float32, not torch.float8_e4m3fn"),
        ("NVFP4", "_packed", lambda t: t[:, 1:], "rows of 31 bytes, where whole blocks of 16"),
        ("NVFP4", "_packed", lambda t: t[0], "where a matrix can be read"),
        ("MXFP6", "_packed", lambda t: t[:, 1:], "rows of 47 bytes, where whole blocks of 32"),
        ("MXFP8", "_scale", lambda t: t[1:], "where its layer needs"),
        ("INT4, zeros", "_zero_point", lambda t: t[1:], r"where its layer needs \[12, 2\]"),
        ("INT4, zeros", "_zero_point", None, "asymmetric, and '.*_zero_point' is missing"),
        ("INT3", "_shape", lambda t: t + 2**40, "no layer of 3 bits, a scale for 32 weights"),
        ("MXFP4", "_zero_point", lambda t: torch.ones(96, 2), "where symmetric numbers of 4 bits"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, form, part, change, said):
    compressed(tmp_path, form)
    path, name = tmp_path / "model.safetensors", f"{NAME}{part}"
    stored = load_file(path)
    if change is None:
        del stored[name]
    else:
        stored[name] = change(stored.get(name)).contiguous()
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("NVFP4", {"group_size": 64}, "float of 4 bits in groups of 64, where 4 bits by 16"),
        ("NVFP4", {"num_bits": 5}, "float of 5 bits in groups of 16"),
        ("NVFP4", {"type": "int"}, "no group of layers has such weights"),
        ("INT3", {"num_bits": 9}, "int of 9 bits, not 1 to 8"),
        (
            "INT3",
            {"type": "float", "group_size": 16, "num_bits": 4},
            "no group of layers has integers",
        ),
    ],
)
def test_groups_that_are_not_read_are_refused(tmp_path, form, changes, said):
    compressed(tmp_path, form)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_mxfp8_is_written_as_its_base_has_it(tmp_path):
    """The library decompresses what was written to what is read here."""
    for seed, name in enumerate(("base", "a")):
        compressed(tmp_path / name, "MXFP8", seed)
    out = tmp_path / "out"
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", out, quantise="same")
    written, expert = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "a"))
    assert written[f"{NAME}_scale"].dtype is torch.uint8
    merged, there = open_plain(out), open_plain(tmp_path / "a")
    layer = AutoModelForCausalLM.from_pretrained(
        out, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).get_parameter(NAME)
    assert torch.equal(layer, merged.read(NAME))
    assert written.keys() == expert.keys()
    off = merged.read(NAME).float() - there.read(NAME).float()
    assert off.norm() < 0.05 * there.read(NAME).float().norm()


def test_what_is_not_written_is_refused_with_what_is(tmp_path):
    for seed, name in enumerate(("base", "a")):
        compressed(tmp_path / name, "NVFP4", seed)
    said = advice("a format that is, such as fp8-channel, or leave `quantise` out")
    with pytest.raises(InputError, match=said):
        _merge(tmp_path, quantise="same")
    for how in ({}, {"quantise": "fp8-channel"}):
        _merge(tmp_path, tmp_path / f"out{len(how)}", **how)
        merged, expert = open_plain(tmp_path / f"out{len(how)}"), open_plain(tmp_path / "a")
        own, other = (model.read(NAME).float() for model in (merged, expert))
        assert (own - other).norm() < 0.05 * other.norm()


def _merge(folder, out=None, **how):
    out = folder / "never" if out is None else out
    return covmerge.merge(folder / "base", {"a": folder / "a"}, "average", out, **how)


def test_pairs_of_numbers_may_have_a_dtype_of_their_own(tmp_path):
    """safetensors' F4, which alone is no weight."""
    expected = compressed(tmp_path, "NVFP4")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    pairs = {
        name: tensor.view(torch.float4_e2m1fn_x2)
        for name, tensor in stored.items()
        if name.endswith("_packed")
    }
    save_file({**stored, **pairs}, path)
    model = open_plain(tmp_path)
    assert torch.equal(model.read(NAME), expected[NAME])
    save_file({"fc.weight": pairs[f"{NAME}_packed"]}, tmp_path / "alone.safetensors")
    said = advice("no scale with which anything can be computed: dequantise the checkpoint first")
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path / "alone.safetensors")
