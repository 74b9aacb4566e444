"""Packed weights that no config declares, and plain ones that look a little like them."""

import json

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.errors import CheckpointError
from covmerge.files.quantised.view import open_plain
from tests.quantised.models import FORMATS, build, llama, save_packed
from tests.quantised.test_goldens import EXPECTED, LAYERS, save

ELSEWHERE = {
    "nowhere": lambda stated: {},
    "an empty object": lambda stated: {"quantization_config": {}},
    "an empty list": lambda stated: {"quantization_config": []},
    "nested": lambda stated: {"text_config": {"quantization_config": stated}},
    "another key": lambda stated: {"compression_config": stated},
}


def moved_config(folder, where):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= ELSEWHERE[where](config.pop("quantization_config"))
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_seen_without_its_config(tmp_path, form):
    packed = save_packed(build(form, 1), tmp_path / "q", *FORMATS[form])
    with pytest.raises(CheckpointError, match=r"stores quantised weights \(tensor '.*' beside '"):
        open_plain(moved_config(packed, "nowhere"))


@pytest.mark.parametrize("case", [case for case in LAYERS if case.startswith("hqq")])
def test_names_of_hqq_say_how_a_layer_is_packed(tmp_path, case):
    """The config of its `save_to_safetensors` does not."""
    model = open_plain(moved_config(save(tmp_path, case), "nowhere"))
    assert torch.equal(model.read("fc.weight"), LAYERS[case][EXPECTED])


@pytest.mark.parametrize("case", [case for case in LAYERS if not case.startswith("hqq")])
def test_each_layer_of_a_client_is_seen_without_its_config(tmp_path, case):
    with pytest.raises(CheckpointError, match=r"\(tensor 'fc.* beside 'fc"):
        open_plain(moved_config(save(tmp_path, case), "nowhere"))


@pytest.mark.parametrize("where", ELSEWHERE)
def test_codes_are_not_merged_as_weights(tmp_path, where):
    """Base and expert alike, so that no name or dtype differs."""
    pack, settings = FORMATS["fp8 by block"]
    for seed, name in enumerate(("base", "expert")):
        moved_config(save_packed(llama(seed), tmp_path / name, pack, settings), where)
    with pytest.raises(CheckpointError, match=r"nothing in its config.json says how: if .* state"):
        covmerge.merge(tmp_path / "base", {"a": tmp_path / "expert"}, "average", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_neither_are_those_of_a_file_or_of_memory(tmp_path):
    packed = save_packed(llama(1), tmp_path / "q", *FORMATS["fp8 by block"])
    file = packed / "model.safetensors"
    for source in (file, load_file(file)):
        with pytest.raises(CheckpointError, match=r"and there is no config\.json"):
            open_plain(source)


@pytest.mark.parametrize(
    "stored",
    [
        {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.bias": torch.ones(2)},
        {"a.weight": torch.ones(2, 2), "a.scales": torch.ones(2), "a.scale": torch.ones(2)},
        {"a.index": torch.ones(2, 2).int(), "a.scale": torch.ones(2)},
        {"a.mask": torch.ones(2, 2).to(torch.uint8), "b.weight_scale": torch.ones(2)},
        {"a.weight": torch.ones(2, 2).to(torch.int8)},
        {"x_blocks": torch.ones(2, 2), "x_scales": torch.ones(2)},
    ],
)
def test_a_plain_model_is_not_taken_for_one(stored):
    assert open_plain(stored).headers.keys() == stored.keys()


@pytest.mark.parametrize("shape", [(), (1,), (8,), (8, 1), (2, 4)])
@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        ("weight", "fc.scale_factor"),
        ("weight", "fc.weight_quantizer._scale"),
        ("weight", "fc.wscales"),
        ("weight", "fc.s"),
        ("weight", "fc.inv"),
        ("weight", "fc_scale"),
        ("qdata", "fc.amax"),
        ("values", "fc.amax"),
    ],
)
def test_float8_weights_are_not_merged_beside_a_scale_of_any_name(codes, scale, shape):
    held = {
        f"h.fc.{codes}": torch.randn(8, 8).to(torch.float8_e4m3fn),
        f"h.{scale}": torch.ones(shape),
    }
    with pytest.raises(CheckpointError, match=rf"tensor 'h\.fc\.{codes}' beside 'h\.{scale}'"):
        open_plain(held)


@pytest.mark.parametrize(
    "others",
    [
        {"fc.bias": (8,)},
        {"fc.in_proj_bias": (8,), "fc.bias_k": (1, 1, 8)},
        {"fc.weight_g": (8, 1)},
        {"fc.weight_hh_l0": (8, 4)},
        {"fc.running_mean": (8,), "fc.running_var": (8,)},
        {"fc.other": (5,)},
        {"other.s": (8,), "s": (8,)},
    ],
)
def test_float8_weights_beside_what_is_no_scale_are_plain(others):
    held = {"fc.weight_v": torch.randn(8, 8).to(torch.float8_e4m3fn)}
    held |= {name: torch.ones(shape) for name, shape in others.items()}
    assert set(open_plain(held).headers) == set(held)


def test_float8_weights_beside_scales_of_others_are_plain():
    """A model that was cast to float8, with the scale of its logits and of a norm."""
    held = {
        "fc.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "norm.scale": torch.ones(8).to(torch.float8_e4m3fn),
        "logit_scale": torch.ones(()),
    }
    assert set(open_plain(held).headers) == set(held)
