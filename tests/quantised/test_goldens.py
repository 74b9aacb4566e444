"""Each format against what its own client reads of the same file, bit for bit (`make_goldens.py`)."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from covmerge.errors import CheckpointError
from covmerge.files.quantised.view import Dequantised, open_plain
from covmerge.files.quantised.writing.like import is_written
from tests.quantised import (
    make_autoround_goldens,
    make_goldens,
    make_library_goldens,
    make_mlx_goldens,
)
from tests.quantised.make_goldens import EXPECTED

LAYERS: dict[str, dict[str, torch.Tensor]] = {}
for module in (make_goldens, make_library_goldens, make_mlx_goldens, make_autoround_goldens):
    for key, tensor in load_file(module.GOLDEN).items():
        case, _, name = key.partition("/")
        LAYERS.setdefault(case, {})[name] = tensor

BLOCKS = {"group_0": {"weights": {"block_structure": [32, 32]}}}


def packed(bits, **more):
    scheme = {"num_bits": bits, "type": "int", "group_size": 32 if bits == 4 else None, **more}
    return {"format": "pack-quantized", "config_groups": {"group_0": {"weights": scheme}}}


SETTINGS = {
    "bitsandbytes": {},
    "gptq 4 gptq_v2": {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "gptq 4 gptq": {"bits": 4, "group_size": 32, "desc_act": True},
    "gptq 8 gptq": {"bits": 8, "group_size": 32},
    "gptq 3 gptq_v2": {"bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "gptq 3 gptq": {"bits": 3, "group_size": 32, "desc_act": True},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm"},
    "compressed-tensors float": {"format": "float-quantized", "config_groups": BLOCKS},
    **{f"compressed-tensors packed {bits}": packed(bits) for bits in (4, 8)},
    "compressed-tensors int": {"format": "int-quantized"},
    "compressed-tensors mixed packed zeros": packed(4, actorder="group", symmetric=False),
    "compressed-tensors mixed packed": packed(4, actorder="group"),
    "compressed-tensors mixed naive": {
        **packed(8, actorder="group", symmetric=False, group_size=32),
        "format": "int-quantized",
    },
    "modelopt NVFP4": {"quant_algo": "NVFP4"},
    "modelopt MXFP8": {"quant_algo": "MXFP8"},
    "hqq": {"quant_config": {}},
    "quanto": {"weights": "int8"},
    "torchao": {"quant_type": {}},
    "mlx half": {"bits": 4, "group_size": 32},
    "mlx stack": {"bits": 8, "group_size": 32},
    "mlx mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mlx mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "mlx nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    **{f"mlx {bits}": {"bits": bits, "group_size": 64} for bits in (2, 3, 4, 5, 6, 8)},
}


with safe_open(make_autoround_goldens.GOLDEN, "pt") as file:
    SETTINGS |= {case: json.loads(said) for case, said in file.metadata().items()}


def settings(case):
    found = next(values for start, values in SETTINGS.items() if case.startswith(start))
    method = case.partition(" ")[0]
    return found if method == "mlx" else {"quant_method": method, **found}


def save(folder, case, layer=None, **changes):
    """A checkpoint of one packed layer and one plain tensor."""
    layer = LAYERS[case] if layer is None else layer
    stored = {name: tensor for name, tensor in layer.items() if name != EXPECTED}
    stored["norm.weight"] = torch.ones(3)
    save_file(stored, folder / "model.safetensors")
    half = case.startswith(("gptq", "awq", "mlx half", "auto-round")) and case != "auto-round fp8"
    dtype = "float16" if half else "bfloat16"
    config = {"dtype": dtype, "quantization_config": {**settings(case), **changes}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_what_its_client_reads(tmp_path, case):
    expected = LAYERS[case][EXPECTED]
    model = open_plain(save(tmp_path, case))
    assert isinstance(model, Dequantised)
    assert set(model.headers) == {"fc.weight", "norm.weight"}
    header = model.headers["fc.weight"]
    assert (header.shape, header.dtype) == (expected.shape, expected.dtype)
    assert model.config == {"dtype": str(expected.dtype).removeprefix("torch.")}
    assert torch.equal(model.read("fc.weight"), expected)
    assert torch.equal(model.read("norm.weight"), torch.ones(3))


@pytest.mark.parametrize("piece", [1, 100, 1000])
@pytest.mark.parametrize("case", LAYERS)
def test_rows_are_rows_of_the_whole(tmp_path, case, piece, monkeypatch):
    """Whatever is asked for, and in whatever pieces it is unpacked."""
    monkeypatch.setattr("covmerge.files.quantised.packed.PIECE", piece)
    expected = LAYERS[case][EXPECTED]
    model = open_plain(save(tmp_path, case))
    count = len(expected)
    for rows in (range(0, 1), range(3, 11), range(17, 24), range(5, 5), range(count)):
        rows = range(min(rows.start, count), min(rows.stop, count))
        assert torch.equal(model.read("fc.weight", rows), expected[rows.start : rows.stop])


@pytest.mark.parametrize(
    ("case", "part", "change", "said"),
    [
        ("bitsandbytes 8", "fc.SCB", lambda t: t[:-1], "needs .24."),
        ("bitsandbytes 8", "fc.weight_format", lambda t: t + 1, "is not 0"),
        ("bitsandbytes nf4 24", "fc.weight", lambda t: t[:-1], "where its layer needs"),
        ("bitsandbytes nf4 24", "fc.weight.absmax", lambda t: t[:-1], "where its layer needs"),
        ("bitsandbytes nf4 24", "fc.weight.absmax", None, "is missing"),
        ("bitsandbytes fp4 25", "fc.weight.quant_map", lambda t: t * 1.001, "than those of fp4"),
        ("bitsandbytes nf4 24", "fc.weight.quant_map", lambda t: t * torch.nan, "of nf4"),
        (
            "bitsandbytes nf4 nested 24",
            "fc.weight.nested_absmax",
            lambda t: t.repeat(2),
            "needs .1.",
        ),
        (
            "bitsandbytes nf4 nested 24",
            "fc.weight.nested_quant_map",
            lambda t: t[1:],
            "needs .256.",
        ),
        (
            "compressed-tensors float block True",
            "fc.weight_scale",
            lambda t: t.mT.contiguous(),
            "2, 3",
        ),
        (
            "compressed-tensors float tensor True",
            "fc.weight_scale",
            None,
            "stored as nothing|packed",
        ),
        ("compressed-tensors int channel False", "fc.weight_zero_point", lambda t: t[1:], "40, 1"),
        ("compressed-tensors packed 4", "fc.weight_packed", lambda t: t[:, 1:], "says .24, 96."),
        (
            "compressed-tensors packed 4",
            "fc.weight_scale",
            lambda t: t[1:],
            "no layer of 4 bits, a scale for 32 weights is stored so",
        ),
        ("compressed-tensors packed 4", "fc.weight_shape", lambda t: t + 1, "says .25, 97."),
        ("gptq 4 gptq", "fc.qzeros", lambda t: t[1:], "where its layer needs"),
        ("gptq 4 gptq", "fc.scales", lambda t: t.float()[:, 1:], "where its layer needs"),
        ("gptq 4 gptq", "fc.g_idx", lambda t: t[1:], "where its layer needs"),
        ("gptq 4 gptq", "fc.qweight", lambda t: t.float(), "float32, not torch.int32"),
        *(
            (f"compressed-tensors mixed {kind}", "fc.weight_g_idx", lambda t: t[1:], "layer needs")
            for kind in ("packed", "naive")
        ),
        ("awq", "fc.qzeros", lambda t: t[:, 1:], "where its layer needs"),
        ("awq", "fc.scales", None, "is missing"),
        *(
            (case, part, lambda t: t[0], "where a matrix can be read")
            for case, part in (
                ("bitsandbytes 8", "fc.weight"),
                ("compressed-tensors packed 4", "fc.weight_packed"),
                ("compressed-tensors float block True", "fc.weight"),
                ("gptq 4 gptq", "fc.qweight"),
                ("awq", "fc.qweight"),
            )
        ),
        (
            "compressed-tensors packed 4",
            "fc.weight_scale",
            lambda t: t[:, 1:],
            r"beside scales of \[24, 2\]",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_before_a_weight_is_read(
    tmp_path, case, part, change, said
):
    layer = dict(LAYERS[case])
    if change is None:
        del layer[part]
    else:
        layer[part] = change(layer[part]).contiguous()
    with pytest.raises(CheckpointError, match=said) as error:
        open_plain(save(tmp_path, case, layer))
    assert "quantization_config" in str(error.value)
    assert "pass the model as it was before" in str(error.value)


def test_a_part_that_is_not_read_is_refused(tmp_path):
    case = "compressed-tensors float block True"
    layer = {**LAYERS[case], "fc.weight_g_idx": torch.zeros(72, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"nothing that can be read: 'fc.weight_g_idx'"):
        open_plain(save(tmp_path, case, layer))


@pytest.mark.parametrize("dtype", ["float016", "float64", ["bfloat16"], 16])
def test_a_dtype_that_weights_are_not_read_as_is_refused(tmp_path, dtype):
    """They were read as bfloat16 without a word."""
    config = json.loads((save(tmp_path, "awq") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    with pytest.raises(CheckpointError, match=r"its dtype is .*, where bfloat16, float16, float32"):
        open_plain(tmp_path)


@pytest.mark.parametrize(
    ("case", "scheme", "said"),
    [
        (
            "compressed-tensors int channel True",
            {"symmetric": False},
            "fc.weight_zero_point' is miss",
        ),
        ("compressed-tensors packed 4", {"symmetric": False}, "fc.weight_zero_point' is missing"),
        ("compressed-tensors int channel True", {"symmetric": 2}, "symmetric of its weights is 2"),
        ("compressed-tensors float channel True", {"num_bits": [8]}, "num_bits of its weights is"),
        ("compressed-tensors float channel True", {"strategy": "ensor"}, "strategy of its weights"),
        ("compressed-tensors float channel True", "channel", "config_groups are 'channel'"),
        ("compressed-tensors float channel True", {"symmetric": None}, "symmetric of its weights"),
        ("compressed-tensors float channel True", {"type": "int"}, "is torch.float8_e4m3fn, not t"),
        ("compressed-tensors float channel True", {"strategy": "tensor"}, "where its layer needs"),
        (
            "compressed-tensors float channel True",
            {"group_size": 32, "strategy": "channel"},
            "group_size 32",
        ),
        ("compressed-tensors float channel True", {"strategy": "group"}, "their group_size null"),
        ("compressed-tensors packed 4", {"strategy": "block"}, "'block', and their group_size 32"),
        (
            "compressed-tensors packed 4",
            {"group_size": -1},
            "no layer of 4 bits, a scale for each row",
        ),
        ("compressed-tensors packed 8", {"strategy": "block"}, "their block_structure null"),
        (
            "compressed-tensors packed 8",
            {"strategy": "block", "block_structure": [1, 128]},
            "'block', where tensor, channel or group can be read",
        ),
    ],
)
def test_what_a_config_says_of_weights_must_be_theirs(tmp_path, case, scheme, said):
    """All of these were read without a word, by the shapes of what is stored alone."""
    bits = int(case[-1]) if "packed" in case else None
    kept = packed(bits)["config_groups"]["group_0"]["weights"] if bits else {}
    weights = {**kept, **scheme} if isinstance(scheme, dict) else scheme
    groups = {"config_groups": {"group_0": {"weights": weights}}}
    with pytest.raises(CheckpointError, match=said):
        open_plain(save(tmp_path, case, **groups))


@pytest.mark.parametrize("targets", ["Linear", [7], [["Linear"]], None])
def test_targets_are_names(tmp_path, targets):
    case = "compressed-tensors float channel True"
    groups = {"group_0": {"targets": targets, "weights": {"strategy": "channel"}}}
    with pytest.raises(CheckpointError, match="the targets of its config_groups are"):
        open_plain(save(tmp_path, case, config_groups=groups))


def test_a_grid_of_scales_that_fits_two_blocks_is_refused(tmp_path):
    """The blocks of the last group of layers were taken, whichever layer it was of."""
    case = "compressed-tensors float block True"
    weights = [{"strategy": "block", "block_structure": [high, 32]} for high in (32, 24)]
    groups = {"config_groups": {str(n): {"weights": own} for n, own in enumerate(weights)}}
    with pytest.raises(CheckpointError, match=r"which fits blocks of .32, 32. and of .24, 32."):
        open_plain(save(tmp_path, case, **groups))


@pytest.mark.parametrize("zero", [0, 1])
def test_symmetric_weights_have_zero_points_of_0(tmp_path, zero):
    """compressed-tensors takes no notice of others, which were subtracted here."""
    case = "compressed-tensors int channel True"
    layer = {**LAYERS[case]}
    scale = layer["fc.weight_scale"]
    layer["fc.weight_zero_point"] = torch.full(scale.shape, zero, dtype=torch.int8)
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
    model = open_plain(save(tmp_path, case, layer, config_groups=groups))
    if not zero:
        assert torch.equal(model.read("fc.weight"), LAYERS[case][EXPECTED])
        return
    with pytest.raises(CheckpointError, match=r"are symmetric, and 'fc.weight_zero_point'"):
        model.read("fc.weight")


@pytest.mark.parametrize("name", ["fc.weight.0", "fc.weight.absmax.weight", "fc.weight.weight"])
def test_nothing_lies_below_a_packed_tensor_but_its_parts(tmp_path, name):
    """It became a head of the expert's, or was left out as a buffer; bitsandbytes refuses it."""
    case = "bitsandbytes nf4 24"
    layer = {**LAYERS[case], name: torch.ones(2)}
    with pytest.raises(CheckpointError, match=f"nothing that can be read: '{name}'"):
        open_plain(save(tmp_path, case, layer))


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        *(("gptq 4 gptq", groups) for groups in ([-1, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2**30, 2])),
        *(("compressed-tensors mixed packed", groups) for groups in ([0, 1, 2, 3], [0, 2])),
    ],
)
def test_a_group_of_inputs_that_is_not_there_is_refused(tmp_path, case, groups):
    """compressed-tensors 0.17.1 takes another group's scale where a group has no inputs."""
    name = "fc.g_idx" if case.startswith("gptq") else "fc.weight_g_idx"
    layer = {**LAYERS[case], name: torch.tensor(groups, dtype=torch.int32).repeat(96)[:96]}
    model = open_plain(save(tmp_path, case, layer))
    said = rf"'{name}' has inputs in groups {min(groups)} to {max(groups)}, where each of 3 groups"
    with pytest.raises(CheckpointError, match=said) as error:
        model.read("fc.weight")
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize("case", ["gptq 4 gptq", "gptq 4 gptq_v2"])
def test_format_is_another_name_of_checkpoint_format(tmp_path, case):
    changes = {"checkpoint_format": None, "format": case.rpartition(" ")[2]}
    model = open_plain(save(tmp_path, case, **changes))
    assert torch.equal(model.read("fc.weight"), LAYERS[case][EXPECTED])


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("gptq 4 gptq", {"quant_method": "quip"}, "formats that can be read are fp8, "),
        ("gptq 4 gptq", {"bits": 5}, "its bits is 5, where 2, 3, 4, 8 can be read"),
        ("gptq 8 gptq", {"bits": 3}, r"'fc.qweight' is \[24, 24\], where layers of 3 bits"),
        ("gptq 4 gptq", {"bits": True}, "its bits is true"),
        ("gptq 4 gptq", {"bits": 8}, "where its layer needs"),
        ("gptq 4 gptq", {"group_size": 0}, "its group_size is 0, where -1, or 16"),
        ("gptq 4 gptq", {"group_size": 1}, "its group_size is 1, where -1, or 16 or more"),
        (
            "compressed-tensors float block True",
            {"config_groups": {"a": {"weights": {"block_structure": [1, 8]}}}},
            "its block is .1, 8., where 16 weights or more",
        ),
        ("gptq 4 gptq", {"group_size": "32"}, "its group_size is '32', where -1"),
        ("gptq 4 gptq", {"checkpoint_format": "marlin"}, "its checkpoint_format is 'marlin'"),
        ("awq", {"version": "gemv"}, "its version is 'gemv'"),
        ("awq", {"checkpoint_format": "gemv"}, "its checkpoint_format is 'gemv'"),
        ("awq", {"format": "gemv_fast"}, "its format is 'gemv_fast'"),
        ("gptq 4 gptq", {"format": "marlin"}, "its format is 'marlin'"),
        (
            "gptq 4 gptq",
            {"checkpoint_format": "gptq_v2", "format": "gptq"},
            "its checkpoint_format is 'gptq_v2', and its format 'gptq'",
        ),
        ("awq", {"quant_method": "x" * 9999}, r"\('x{199}\.\.\.; quantization_config"),
        ("awq", {"group_size": "x" * 9999}, r"its group_size is 'x{199}\.\.\., where"),
        ("compressed-tensors float block True", {"format": "marlin-24"}, "its format"),
        ("compressed-tensors float block True", {"config_groups": {}}, "where its layer needs"),
        (
            "compressed-tensors float block True",
            {"config_groups": {"a": {"weights": {"block_structure": [0, 32]}}}},
            "its block is .0, 32., not rows and columns",
        ),
        *(
            ("compressed-tensors packed 4", {"config_groups": groups}, said)
            for groups, said in (
                ({}, "no group of layers has integers"),
                ({"a": {"weights": {"num_bits": 3}}}, "no layer of 3 bits"),
                ({"a": {"weights": {"num_bits": 4, "group_size": 1}}}, "its group_size is 1"),
            )
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, case, changes, said):
    with pytest.raises(CheckpointError, match=said):
        open_plain(save(tmp_path, case, **changes))


def test_a_layer_that_is_there_twice_is_refused(tmp_path):
    layer = {**LAYERS["awq"], "fc.weight": torch.ones(24, 96)}
    with pytest.raises(CheckpointError, match=r"'fc.weight' is there both packed and plain"):
        open_plain(save(tmp_path, "awq", layer))


def test_a_state_of_bitsandbytes_is_not_trusted(tmp_path):
    name = "fc.weight.quant_state.bitsandbytes__nf4"
    for text, said in (
        (b"\x00" * 78, "not valid JSON"),
        (b'{"shape": [24, 96]}', "says shape"),
        (b'{"shape": [-1, 96], "blocksize": 128, "dtype": "bfloat16"}', "says shape"),
        (b'{"shape": [2147483647, 2147483647], "blocksize": 128, "dtype": "float16"}', "needs"),
        (b'{"shape": [24, 96], "blocksize": 0, "dtype": "bfloat16"}', "blocks of 0"),
        (b'{"shape": [24, 96], "blocksize": 128, "dtype": ["bfloat16"]}', "dtype ."),
        (b'{"shape": [24, 96], "blocksize": [128], "dtype": "bfloat16"}', "blocks of ."),
        (b'{"shape": [24, 96, 1, 1, 1], "blocksize": 128, "dtype": "bfloat16"}', "says shape"),
        (
            b'{"shape": [24, 96], "blocksize": 128, "dtype": "bfloat16", "quant_type": "fp4"}',
            "says quant_type",
        ),
        (b"{" + b" " * 2**16 + b"}", "at most 65536 bytes"),
    ):
        state = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        layer = {**LAYERS["bitsandbytes nf4 24"], name: state}
        with pytest.raises(CheckpointError, match=said):
            open_plain(save(tmp_path, "bitsandbytes nf4 24", layer))


@pytest.mark.parametrize("offset", ["1" + "0" * 400, "1e300", "1e999", "NaN", "null", "[1]"])
def test_an_offset_that_float32_cannot_hold_is_refused(tmp_path, offset):
    layer = dict(LAYERS["bitsandbytes nf4 nested 24"])
    (name,) = (name for name in layer if ".quant_state." in name)
    state = json.loads(layer[name].numpy().tobytes())
    text = json.dumps({**state, "nested_offset": 0}).replace(
        '"nested_offset": 0', f'"nested_offset": {offset}'
    )
    layer[name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"'fc.weight' has scales in blocks|valid"):
        open_plain(save(tmp_path, "bitsandbytes nf4 nested 24", layer))


@pytest.mark.parametrize("kind", ["packed", "naive"])
def test_groups_that_are_mixed_are_not_written(tmp_path, kind):
    """Neither is what compressed-tensors since 0.19 loads."""
    model = open_plain(save(tmp_path, f"compressed-tensors mixed {kind}"))
    assert model.quantisation is not None
    assert not is_written(model.quantisation.packed["fc.weight"])
