"""Rounding to a stored dtype: an overflow is an error, also where torch's cast saturates."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import TensorError
from covmerge.maths.linalg.stored import stored_as

# The largest number and the end of what rounds to it, from the formats' definitions: IEEE 754's (a number
# with an odd last bit loses the tie), and the OCP's FP8, whose 480 is NaN.
ENDS = {
    torch.float16: (65504.0, 65519.5, 65520.0),
    torch.bfloat16: (
        2.0**127 * (2 - 2**-7),
        2.0**127 * (2 - 2**-8 - 2**-20),
        2.0**127 * (2 - 2**-8),
    ),
    torch.float8_e5m2: (57344.0, 61439.0, 61440.0),
    torch.float8_e4m3fn: (448.0, 464.0, 464.01),
    torch.float32: (2.0**128 - 2.0**104, 2.0**128 - 2.0**103 - 2.0**80, 2.0**128 - 2.0**103),
}


@pytest.mark.parametrize("dtype", ENDS, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_rounds_to_the_largest_number_is_no_overflow(dtype, sign):
    most, last, first = (sign * end for end in ENDS[dtype])
    source = (
        torch.float64 if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    )
    kept = stored_as(torch.tensor([most, last, 0.0], dtype=source), dtype)
    assert kept.double().tolist() == [most, most, 0.0]
    with pytest.raises(OverflowError, match="the largest number is"):
        stored_as(torch.tensor([0.0, first], dtype=source), dtype)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_a_merge_that_overflows_float8_is_refused(method, tmp_path):
    """Updates of 128, times 4 and on weights of 256, give 768 or more; float8_e4m3fn ends at 448."""
    base = torch.full((8, 8), 256.0)
    for name, value in {"base": base, **{n: base + 128 for n in "abcd"}}.items():
        (tmp_path / name).mkdir()
        save_file(
            {"h.0.fc.weight": value.to(torch.float8_e4m3fn)}, tmp_path / name / "model.safetensors"
        )
    given = (tmp_path / "base", {n: tmp_path / n for n in "abcd"}, method, tmp_path / "out")
    with pytest.raises(TensorError, match=r"float8_e4m3fn.*448.*out_dtype"):
        covmerge.merge(*given, scale=4.0)
    assert not (tmp_path / "out").exists()
    covmerge.merge(*given, scale=4.0, out_dtype="float32")
    merged = load_file(tmp_path / "out" / "model.safetensors")["h.0.fc.weight"]
    assert merged.min() > 448


def test_a_copy_that_overflows_the_output_is_refused(tmp_path):
    base = {"h.0.fc.weight": torch.randn(8, 8), "h.1.fc.weight": torch.full((8, 8), 1e5)}
    expert = {**base, "h.0.fc.weight": base["h.0.fc.weight"] + 0.01 * torch.randn(8, 8)}
    rules = [{"match": "h.1.*", "use": "base"}]
    with pytest.raises(TensorError, match=r"h\.1\.fc\.weight.*base's weights overflow.*65504"):
        covmerge.merge(base, {"a": expert}, "average", out_dtype="float16", rules=rules)
