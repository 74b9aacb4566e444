"""Rounding of the stored weights that experts share, as copies do, is one error."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, Measured, Rounding
from covmerge.maths.measures.rounding import rounding_of
from covmerge.maths.methods.resolution import of_terms, without_rounding
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from tests.methods.groups import relative

OF_MATRICES = [
    pytest.param(m, id=m.name)
    for m in registry
    if not m.takes_any_shape and m.data in ("none", "gram") and m.experts == (1, None)
]


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


@pytest.mark.parametrize("method", OF_MATRICES)
@pytest.mark.parametrize("changed", [False, True], ids=["frozen", "one_changed"])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16",) * 3, ("bfloat16", "float16", "bfloat16")], ids=str
)
def test_a_layer_that_was_frozen_did_not_change(method, dtypes, changed):
    """Half precision of a base in float32 is rounding only. It hid the directions of the other experts."""
    draw = torch.Generator().manual_seed(5)
    base, inputs, update = (
        torch.randn(shape, generator=draw) for shape in ((48, 64), (100, 64), (48, 64))
    )
    stored = [getattr(torch, dtype) for dtype in dtypes]
    updates = [base.to(dtype).float() - base for dtype in stored]
    exact = [torch.zeros_like(base) for _ in stored]
    if changed:
        updates[0] = exact[0] = (base + update).to(stored[0]).float() - base
    data = Measured(inputs.T @ inputs, 100, 100)
    group = LinearGroup(
        tuple(updates),
        (1.0,) * 3,
        rounding=tuple(rounding_of(updates, stored, base)),
        expert_statistics=(data,) * 3 if method.data == "gram" else (),
        base_norm=float(base.norm()) if method.base_norm else None,
    )
    found = method(group).delta
    assert torch.equal(found, method(replace(group, updates=tuple(exact))).delta)
    assert bool(found.any()) == changed


def test_a_frozen_layer_in_files_stays_as_the_base_has_it():
    base = torch.randn(48, 64, generator=torch.Generator().manual_seed(6))
    experts = [{"fc.weight": base.bfloat16()}] * 2
    found = covmerge.merge({"fc.weight": base}, experts, "dc_merge", allow=["unchanged-expert"])
    assert torch.equal(found.tensors["fc.weight"], base)


@pytest.mark.parametrize("method", OF_MATRICES)
def test_a_change_that_is_hardly_more_than_rounding_is_merged_as_by_the_reference(method):
    """Its energy is a third of the rounding's. No direction stands out: the numerical rank is 0."""
    draw = torch.Generator().manual_seed(8)
    base, inputs = torch.randn(48, 64, generator=draw), torch.randn(100, 64, generator=draw)
    steps = [1e-3 * torch.randn(48, 64, generator=draw) for _ in range(3)]
    updates = [(base + step).bfloat16().float() - base for step in steps]
    group = LinearGroup(
        tuple(updates),
        (1.0,) * 3,
        rounding=tuple(rounding_of(updates, [torch.bfloat16] * 3, base)),
        expert_statistics=(Measured(inputs.T @ inputs, 100, 100),) * 3 * (method.data == "gram"),
        base_norm=float(base.norm()) if method.base_norm else None,
    )
    assert without_rounding(group) is group
    found = method(group).delta.double()
    assert found.isfinite().all()
    if method.name != "wudi":  # steps of a gradient
        expected = REFERENCES[method.name](group)
        assert float((found - expected).norm()) <= 1e-4 * max(1e-9, float(expected.norm()))


def test_a_fine_tune_in_the_dtype_of_its_base_is_never_rounding():
    """A share of the weights moved by one last place: as little as a training in bfloat16 can do."""
    draw = torch.Generator().manual_seed(9)
    base = torch.randn(64, 64, generator=draw).bfloat16()
    for share in (0.01, 0.1, 0.5, 1.0):
        moved = (torch.rand(64, 64, generator=draw) < share).to(torch.int16)
        update = (base.view(torch.int16) + moved).view(torch.bfloat16).float() - base.float()
        errors = tuple(rounding_of([update], [torch.bfloat16], base.float()))
        group = LinearGroup((update,), (1.0,), rounding=errors)
        assert without_rounding(group) is group


def test_a_global_threshold_does_not_count_the_rounding_of_frozen_layers():
    """KnOTS keeps a share of all components of an expert. Those of rounding moved its threshold."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"one.weight": (48, 64), "two.weight": (48, 64)}
    base = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    found = []
    for frozen in (torch.bfloat16, torch.float32):
        draw.manual_seed(1)
        experts = [{name: weight.to(frozen) for name, weight in base.items()} for _ in range(2)]
        for place, name in ((0, "one.weight"), (1, "one.weight"), (1, "two.weight")):
            update = 0.02 * torch.randn(48, 64, generator=draw)
            experts[place][name] = (base[name] + update).bfloat16()
        found.append(covmerge.merge(base, experts, "knots").tensors)
    assert all(torch.equal(found[0][name], found[1][name]) for name in base)


def test_an_update_of_zeros_is_not_copied():
    group = LinearGroup(
        (torch.eye(4), torch.zeros(4, 4)), (1.0, 1.0), rounding=(Rounding(), Rounding())
    )
    assert without_rounding(group) is group


def test_a_small_change_of_one_direction_is_more_than_rounding():
    """Its energy is a sixteenth of the rounding's; it is longer than any direction of rounding."""
    draw = torch.Generator().manual_seed(7)
    base, left, right = (
        torch.randn(shape, generator=draw) for shape in ((256, 256), (256, 1), (1, 256))
    )
    frozen = base.bfloat16().float() - base
    step = left @ right / (left.norm() * right.norm())
    update = (base + 0.25 * float(frozen.norm()) * step).bfloat16().float() - base
    group = LinearGroup(
        (update, frozen),
        (1.0, 1.0),
        rounding=tuple(rounding_of([update, frozen], [torch.bfloat16] * 2, base)),
    )
    assert float(update.square().sum()) < 1.1 * group.rounding[0].energy  # length does not tell it
    kept = without_rounding(group).updates
    assert torch.equal(kept[0], update) and not kept[1].any()
