"""What is packed by a layout's name: near the weights, the same again, and as clients pack it."""

import json

import pytest
import torch

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.view import open_plain
from covmerge.files.quantised.writing.layouts import LAYOUTS
from covmerge.files.quantised.writing.like import as_stored
from tests.quantised.make_goldens import EXPECTED, weight
from tests.quantised.test_goldens import LAYERS, save

SHAPES = dict.fromkeys(LAYOUTS, (136, 256)) | {"mxfp4": (3, 64, 40)}
# Half of the widest gap between two numbers, for a largest weight of 1.
HALF_A_STEP = {
    **dict.fromkeys(("fp8-block", "fp8-channel", "fp8-tensor"), 16 / 448),
    **dict.fromkeys(("int8-channel", "int8"), 0.5 / 127),
    **{"int4-group": 0.5 / 7, "nf4": 0.152, "gptq": 0.5 / 7, "awq": 1 / 15},
    "mxfp4": 2 / 8,  # OCP's exponent leaves the largest weight at 8 at most, which becomes 6
}


def made(name, dtype=torch.float32, scale=1.0):
    shape = SHAPES[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).clamp_(-1, 1) * scale
    return LAYOUTS[name].packing(TensorHeader("fc.weight", shape, dtype)), values.to(dtype)


def read_back(packing, parts):
    rows = range(packing.packed.header.shape[0])
    return torch.cat([read for _, read in packing.unpacked(parts, rows)])


def assert_equal(parts, others):
    for one, other in zip(parts, others, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        bytes_of = (own.reshape(-1).contiguous().view(torch.uint8) for own in (one, other))
        assert torch.equal(*bytes_of)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_off_by_half_a_step_at_most(name, scale):
    packing, values = made(name, scale=scale)
    parts = packing.quantise(values)
    headers = [part.header for part in packing.parts]
    assert [(tuple(p.shape), p.dtype) for p in parts] == [(h.shape, h.dtype) for h in headers]
    lost = (read_back(packing, parts) - values).abs().max() / scale
    room = 1.01 if name in ("gptq", "awq") else 1.0  # scales in half precision
    assert lost <= room * HALF_A_STEP[name] + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_read_is_packed_to_the_same(name, dtype):
    packing, values = made(name, dtype)
    parts = packing.quantise(values.float())
    read = read_back(packing, parts)
    again = packing.quantise(read.float())
    if name in ("gptq", "awq"):  # a scale in half precision may be off by its last bit
        assert_equal(parts[:2], again[:2])
        assert torch.allclose(parts[2], again[2], rtol=2**-9)
    else:
        assert_equal(parts, again)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if made(name)[0].step is not None])
def test_rows_are_packed_as_they_are_in_the_whole(name):
    packing, values = made(name, torch.bfloat16)
    values[::3] = 0.0  # whose scale is 0 or -0 by where a row lies, if nothing is done
    whole = packing.quantise(values.float())
    read, count = read_back(packing, whole), len(values)
    cut = max(packing.step, count // 2 // packing.step * packing.step)
    for rows in (range(cut), range(cut, count)):
        parts = packing.quantise(values[rows.start : rows.stop].float())
        held = [own for own in packing.held(rows) if own is not None]
        names = [part.header.name for part in packing.parts]
        expected = [
            whole[names.index(part.header.name)]
            if own is None
            else whole[names.index(part.header.name)][own.start : own.stop]
            for part, own in held
        ]
        assert_equal(packing.placed(parts, rows), expected)
        again = torch.cat([few for _, few in packing.unpacked(parts, rows)])
        assert torch.equal(again, read[rows.start : rows.stop])


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_change_nothing(name, monkeypatch):
    packing, values = made(name)
    expected = packing.quantise(values)
    for module in ("packed", "writing.bitsandbytes"):
        monkeypatch.setattr(f"covmerge.files.quantised.{module}.PIECE", 1000)
    assert_equal(packing.quantise(values), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zeros_stay_zeros(name):
    packing, values = made(name)
    assert not read_back(packing, packing.quantise(torch.zeros_like(values))).any()


@pytest.mark.parametrize("case", [case for case in LAYERS if case.startswith("bitsandbytes")])
def test_a_layer_is_packed_as_bitsandbytes_packs_it(tmp_path, case):
    """The goldens are what it packed of these weights."""
    stored = LAYERS[case]
    model = open_plain(save(tmp_path, case))
    header = model.headers["fc.weight"]
    packing = as_stored(model.quantisation, header)
    own = weight(*header.shape).to(torch.float16 if case == "bitsandbytes 8" else torch.bfloat16)
    parts = packing.quantise(own.float())
    assert {part.header.name for part in packing.parts} == stored.keys() - {EXPECTED}
    for part, made in zip(packing.parts, parts, strict=True):
        theirs = stored[part.header.name]
        if "quant_state" in part.header.name:
            ours, other = (json.loads(bytes(text.tolist())) for text in (made, theirs))
            offsets = [state.pop("nested_offset", 0.0) for state in (ours, other)]
            assert ours == other
            assert offsets[0] == pytest.approx(offsets[1])
        elif made.dtype.is_floating_point:
            assert torch.allclose(made, theirs)
        elif part.header.name.endswith("absmax"):
            # Nested scales are taken from their mean, a sum: at a limit it decides between two codes.
            assert (made.int() - theirs.int()).abs().max() <= 1
        else:
            assert torch.equal(made, theirs)
