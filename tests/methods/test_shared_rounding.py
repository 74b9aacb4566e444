"""Rounding of the stored weights that experts share, as copies do, is one error."""

import pytest
import torch

import covmerge
from covmerge.base.types import Rounding
from covmerge.maths.methods.resolution import of_terms
from tests.methods.groups import relative


@pytest.mark.parametrize("method", ["iso_c", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_that_copies_share_is_no_direction(method, dtype):
    """Errors of three copies add up to three times one, and were made as long as the adapter."""
    generator = torch.Generator().manual_seed(4)
    base, left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((48, 64), (48, 4), (4, 64))
    )
    base, update = (10.0 * base / base.norm()).to(dtype), left @ right
    update /= update.norm()
    experts = [{"fc.weight": (base.double() + update).to(dtype)}] * 3
    found = covmerge.merge({"fc.weight": base}, experts, method, out_dtype="float64")
    change = found.tensors["fc.weight"] - base.double()
    assert relative(change, covmerge.merge_layer([update] * 3, method)) < 0.05


def test_errors_add_up_by_what_updates_have_in_common():
    one, other = torch.randn(2, 200, 200, generator=torch.Generator().manual_seed(0)).double()
    each = [Rounding(edge=28.0, energy=float(e.square().sum())) for e in (one, one, one)]
    found = of_terms([one, one, one], each, each)
    assert found.energy == pytest.approx(float((3 * one).square().sum()), rel=0.02)
    independent = [Rounding(edge=28.0, energy=float(e.square().sum())) for e in (one, other)]
    apart = of_terms([one, other], independent, independent)
    assert apart.energy == pytest.approx(float((one + other).square().sum()), rel=0.02)
    assert apart.edge == pytest.approx(28.0 * 2**0.5, rel=0.02)
