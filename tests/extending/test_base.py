"""Methods and steps that need W₀ see it oriented like their updates, whatever it is stored in."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import TensorError
from tests.e2e.models import build
from tests.e2e.test_adapter_output import merge_adapters
from tests.e2e.test_adapters import experts, family, saved_family  # noqa: F401 - fixtures

pytestmark = [
    pytest.mark.usefixtures("forget"),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore:fan_in_fan_out", "ignore:Setting `save_embedding_layers`"
    ),
]


def register_spy(**declared):
    """A method that sees whether Δ = 2 W₀, as experts of 3 W₀ have it, and counts its groups."""
    seen = []

    @covmerge.register("spy", needs_base=True, **declared)
    def spy(group):
        seen.append(group.base.shape)
        assert group.base.dtype == group.updates[0].dtype
        torch.testing.assert_close(2 * group.base, group.updates[0], rtol=1e-5, atol=1e-5)
        return group.updates[0].clone()

    return seen


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("gpt2", {}),  # Conv1D is stored transposed
        ("gpt2", {"conv1d": "stored"}),
        ("gpt2", {"fused": "split"}),
        ("mixtral", {}),  # stacks of experts
        ("gpt_oss", {}),  # transposed stacks
        ("vit", {"convolutions": "method"}),
    ],
)
@pytest.mark.parametrize("unit", ["matrix", "element", "row", "tensor"])
def test_every_layout(name, tensors, unit, tmp_path):
    seen = register_spy(unit=unit)
    base = build(name)
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(3.0)
    base.save_pretrained(tmp_path / "tripled")
    allow = ("not-a-fine-tune", "swapped-tensors", "unchanged-expert")
    covmerge.merge(
        tmp_path / "base", {"e": tmp_path / "tripled"}, "spy", tensors=tensors, allow=allow
    )
    assert seen


def test_by_blocks_of_rows(tmp_path):
    seen = register_spy(unit="element")
    base = {"fc.weight": torch.randn(3000, 1000)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({"fc.weight": 3 * base["fc.weight"]}, tmp_path / "e.safetensors")
    covmerge.merge(
        tmp_path / "base.safetensors",
        {"e": tmp_path / "e.safetensors"},
        "spy",
        allow=("not-a-fine-tune",),
        out=tmp_path / "out",
    )
    assert len(seen) > 2


def off_the_base(group):
    """The mean, without what lies along W₀."""
    mean, base = torch.stack(group.updates).mean(0), group.base
    return mean - (mean * base).sum() / base.square().sum() * base


def test_adapters_beside_the_models_they_become(family):  # noqa: F811
    """Of adapters alone the base is read because the method asks for it."""
    covmerge.register("off", needs_base=True)(off_the_base)
    merged = covmerge.merge(family / "base", experts(family, "adapter"), "off").tensors
    full = covmerge.merge(family / "base", experts(family, "full"), "off").tensors
    base = load_file(family / "base" / "model.safetensors")
    for name, expected in full.items():
        change = (expected - base[name]).norm()
        assert (merged[name] - expected).norm() <= 1e-4 * change + 1e-5, name


def test_an_adapter_as_the_output(family):  # noqa: F811
    covmerge.register("off", needs_base=True)(off_the_base)
    with pytest.raises(AssertionError, match="Say with --rank"):
        merge_adapters(family, family / "exact", method="off")
    whole = merge_adapters(family, family / "whole", method="off", rank=64)
    merged = covmerge.merge(family / "base", experts(family, "adapter"), "off").tensors
    base = load_file(family / "base" / "model.safetensors")
    adapted = {n for n in merged if (merged[n] - base[n]).norm() > 1e-3 and merged[n].ndim > 1}
    assert whole["totals"]["discarded_energy"] < 1e-6
    assert whole["totals"]["merged_norm"] == pytest.approx(
        sum(float((merged[n] - base[n]).norm()) ** 2 for n in adapted) ** 0.5, rel=0.2
    )


def test_a_step_that_needs_it():
    @covmerge.register_step("off_base", when="before", needs_base=True)
    def off_base(group):
        return replace(group, updates=tuple(u - 0.5 * group.base for u in group.updates))

    base = torch.randn(4, 3)
    merged = covmerge.merge_layer([base, 2 * base], "average", before=["off_base"], base=base)
    torch.testing.assert_close(merged, base)
    adapter = covmerge.LowRank(torch.ones(4, 1), torch.ones(1, 3))
    dense = covmerge.merge_layer([adapter], "average", before=["off_base"], base=base)
    torch.testing.assert_close(dense, torch.ones(4, 3) - 0.5 * base)  # no basis of low rank


def test_merge_layer_takes_it_or_says_what_is_missing():
    covmerge.register("off", needs_base=True)(off_the_base)
    update, base = torch.eye(3), torch.full((3, 3), 100.0)
    torch.testing.assert_close(
        covmerge.merge_layer([update], "off", base=base), update - 1 / 3, rtol=0, atol=1e-5
    )
    half = covmerge.merge_layer([update.bfloat16()], "off", base=base.bfloat16())
    assert half.dtype == torch.bfloat16
    with pytest.raises(TensorError, match="method 'off' needs the base's weights"):
        covmerge.merge_layer([update], "off")
    with pytest.raises(TensorError, match="method 'average' does not look at the base"):
        covmerge.merge_layer([update], "average", base=base)
    with pytest.raises(TensorError, match=r"the base is \[2, 3\], the updates are \[3, 3\]"):
        covmerge.merge_layer([update], "off", base=base[:2])


def test_it_is_none_for_the_others():
    covmerge.register("plain")(lambda group: group.updates[0] * (group.base is None))
    assert covmerge.merge_layer([torch.eye(2)], "plain").any()


def test_it_is_not_factored():
    with pytest.raises(ValueError, match="method 'both' needs the base and is `factored`"):
        covmerge.register("both", needs_base=True, factored="both")(off_the_base)
