"""Configs and states of MLX, Model Optimizer, HQQ, quanto and torchao; layers: `test_goldens.py`."""

import json

import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.quantised.view import open_plain
from covmerge.files.quantised.writing.layouts import with_plain
from tests.advised import advice
from tests.quantised.models import llama, metal, save_packed
from tests.quantised.test_goldens import LAYERS, save

ALL = {"bits": 4, "group_size": 32}


def mlx(name, weight):
    parts = metal(name, weight, 64 if "q_proj" in name else 32)
    return {part.replace(".qbiases", ".biases"): tensor for part, tensor in parts.items()}


@pytest.mark.parametrize("keys", [["quantization"], ["quantization", "quantization_config"]])
def test_a_model_is_merged_and_written_plain(tmp_path, keys):
    """mlx-lm says it under one key or two; a layer may have settings of its own."""
    own = {
        **ALL,
        "model.layers.0.self_attn.q_proj": {"bits": 4, "group_size": 64},
        "lm_head": False,
    }
    for seed, name in enumerate(("base", "a")):
        save_packed(llama(seed), tmp_path / name, mlx, {})
        path = tmp_path / name / "config.json"
        config = {**json.loads(path.read_text()), **dict.fromkeys(keys, own)}
        if len(keys) == 1:
            del config["quantization_config"]
        path.write_text(json.dumps(config))
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    merged = open_plain(tmp_path / "out")
    for name, tensor in llama(1).state_dict().items():
        assert (merged.read(name).float() - tensor.float()).norm() < 0.15 * tensor.float().norm()


@pytest.mark.parametrize(
    ("case", "part", "change", "said"),
    [
        ("mlx 4", "fc.scales", lambda t: t[:, 1:], r"where its layer needs \[24, 2\]"),
        ("mlx 4", "fc.biases", lambda t: t.float(), "is torch.float32, not torch.bfloat16"),
        ("mlx 4", "fc.biases", None, "'fc.biases' is missing"),
        ("mlx 4", "fc.weight", lambda t: t[:, 1:], "rows of 120 numbers, where groups of 64"),
        ("mlx 3", "fc.weight", lambda t: t[:, 1:], "where whole words of 3 bits"),
        ("mlx 4", "fc.weight", lambda t: t[0], "where whole words of 4 bits"),
        ("mlx mxfp4", "fc.scales", lambda t: t[1:], "where its layer needs"),
        ("modelopt NVFP4", "fc.weight_scale_2", None, "'fc.weight_scale_2' is missing"),
        ("modelopt NVFP4", "fc.weight_scale", lambda t: t[:, 1:], r"its layer needs \[24, 6\]"),
        ("modelopt MXFP8", "fc.weight", lambda t: t.view(torch.uint8), "rows of 96 bytes|needs"),
        ("hqq 4 1", "fc.W_q", lambda t: t[1:], r"where its layer needs \[24, 32\]"),
        ("hqq 4 1", "fc.zero", lambda t: t.float(), "is torch.float32, not torch.bfloat16"),
        ("hqq 4 1", "fc.nbits", lambda t: t + 3, "has 7 bits"),
        ("hqq 4 1", "fc.nbits", None, "'fc.nbits' is missing"),
        ("hqq 4 1", "fc.group_size", lambda t: t * 0, "groups of 0 along axis 1"),
        ("hqq 4 1", "fc.shape", lambda t: t * -1, r"the shape \[-16, -96\]"),
        ("hqq 4 1", "fc.shape", lambda t: t * 2**40, "the shape"),
        ("hqq 4 1", "fc.shape", lambda t: t * 2, "where its layer needs"),
        ("hqq 4 1", "fc.axis", lambda t: t + 1, "along axis 2"),
        ("hqq 4 1", "fc.view_as_float", lambda t: t + 1, "'fc.view_as_float' is not 0"),
        ("quanto qint8", "fc.weight._scale", lambda t: t[1:], "where its layer needs"),
        (
            "quanto qint8",
            "fc.weight._data._data",
            lambda t: torch.ones(3),
            "shapes of layers are not",
        ),
        ("torchao int8", "fc._weight_scale", lambda t: t[1:], "where its layer needs"),
        ("torchao int8", "fc._weight_zero_point", lambda t: t[1:], "where its layer needs"),
        ("torchao int8", "fc._weight_qdata", lambda t: t.view(torch.uint8), "is torch.uint8, not"),
        ("torchao int8", "fc._weight_act_pre_scale", lambda t: torch.ones(3), "numbers of 8 bits"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, case, part, change, said):
    layer = dict(LAYERS[case])
    if change is None:
        del layer[part]
    else:
        layer[part] = change(layer.get(part)).contiguous()
    with pytest.raises(CheckpointError, match=said):
        open_plain(save(tmp_path, case, layer))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 7}, "'fc.weight' has 7 bits in groups of 64, where 2, 3, 4, 5, 6, 8 bits"),
        ({"bits": True}, "has true bits"),
        ({"group_size": 2**40}, "in groups of 1099511627776"),
        ({"mode": "nf4"}, "the mode of 'fc.weight' is 'nf4', where affine, mxfp4, mxfp8, nvfp4"),
        ({"mode": ["affine"]}, "the mode of 'fc.weight' is"),
        ({"fc": {"bits": 8, "group_size": 64}}, "where its layer needs"),
    ],
)
def test_settings_that_are_not_read_are_refused(tmp_path, changes, said):
    with pytest.raises(CheckpointError, match=said):
        open_plain(save(tmp_path, "mlx 4", **changes))


@pytest.mark.parametrize(
    ("case", "file", "stated"),
    [
        ("modelopt NVFP4", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}),
        ("quanto qint8", "quanto_qmap.json", {"fc": {"weights": "qint8", "activations": "none"}}),
    ],
)
def test_it_may_be_said_in_a_file_of_its_own(tmp_path, case, file, stated):
    """NVIDIA's older models have no `quantization_config`, and quanto's none at all."""
    save(tmp_path, case)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / file).write_text(json.dumps(stated))
    assert torch.equal(open_plain(tmp_path).read("fc.weight"), LAYERS[case]["expected"])


def test_a_pickle_of_hqq_is_refused(tmp_path):
    """`AutoHQQHFModel.save_to_safetensors` is advised in its place."""
    said = advice(
        "load it there by AutoHQQHFModel.from_quantized, and pass the folder of its save_to_safetensors"
    )
    (tmp_path / "qmodel.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=said):
        open_plain(tmp_path)
    (tmp_path / "qmodel.pt").unlink()
    save(tmp_path, "hqq 4 1")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert torch.equal(open_plain(tmp_path).read("fc.weight"), LAYERS["hqq 4 1"]["expected"])


@pytest.mark.parametrize("part", ["pre_quant_scale", "svdquant_lora_a"])
def test_layers_that_are_more_than_their_weights_are_refused(tmp_path, part):
    layer = {**LAYERS["modelopt NVFP4"], f"fc.{part}": torch.ones(96)}
    with pytest.raises(CheckpointError, match=f"'fc.{part}' is there, where layers that are"):
        open_plain(save(tmp_path, "modelopt NVFP4", layer))


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("auto-round 4", {"packing_format": "auto_round:exllamav2"}, "its packing_format is"),
        ("auto-round 4", {"data_type": "int_asym_dq"}, "its data_type is 'int_asym_dq'"),
        ("auto-round 4", {"act_bits": 8}, "its act_bits is 8, where 16, 32, null can be read"),
        ("auto-round 4", {"bits": 5}, "its bits is 5"),
        ("auto-round 4", {"bits": 8}, "where its layer needs"),
        ("auto-round 4", {"packing_format": "auto_round:auto_awq"}, "where its layer needs"),
        ("auto-round mxfp4", {"data_type": "fp"}, "its data_type is 'fp', where 'mx_fp', 'nv_fp'"),
        ("auto-round mxfp4", {"data_type": "nv_fp"}, "its group_size is 32, where 16 can be read"),
        ("auto-round mxfp4", {"group_size": 16}, "its group_size is 16, where 32 can be read"),
    ],
)
def test_what_autoround_says_otherwise_is_refused(tmp_path, case, changes, said):
    with pytest.raises(CheckpointError, match=said):
        open_plain(save(tmp_path, case, **changes))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_autoround_is_written_as_the_base_has_it(tmp_path, bits):
    """Its layout is GPTQ's, and its settings stay those of the output."""
    model = f"auto-round {bits}"
    for folder, own in (("base", LAYERS[model]), ("a", None)):
        (tmp_path / folder).mkdir()
        if own is not None:
            save(tmp_path / folder, model)
    weight = open_plain(tmp_path / "base").read("fc.weight")
    moved = {"fc.weight": weight + weight.abs().max() / 4, "norm.weight": torch.ones(3)}
    save_file(moved, tmp_path / "a" / "model.safetensors")
    how = {"out": tmp_path / "out", "quantise": "same"}
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", **how)
    written = open_plain(tmp_path / "out")
    assert written.quantisation is not None
    assert written.quantisation.settings == open_plain(tmp_path / "base").quantisation.settings
    step = moved["fc.weight"].float().abs().max() / (2 ** (bits - 1) - 1)
    assert (written.read("fc.weight").float() - moved["fc.weight"].float()).abs().max() <= step
    assert covmerge.verify(tmp_path / "out").ok


def test_what_autoround_keeps_plain_is_said_as_it_says_it():
    """AutoRound 0.16.1 loads such a layer plain; what a base says of other layers stays."""
    other = {"a.q_proj": {"bits": 8}, "a.k_proj": {"bits": 8}}
    held = {"quant_method": "auto-round", "extra_config": other}
    said = with_plain(held, ["a.k_proj", "lm_head"])
    expected = {"a.q_proj": {"bits": 8}, "a.k_proj": {"bits": 16}, "lm_head": {"bits": 16}}
    assert said == {"quant_method": "auto-round", "extra_config": expected}
