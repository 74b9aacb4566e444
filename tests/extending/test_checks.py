"""check_method names the law that a method breaks, with the input and what came out."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.maths.testing.laws import FORMS, LAWS, SHAPES
from covmerge.testing import Broken, check_method, check_step, checks

pytestmark = pytest.mark.usefixtures("forget")


def mean(group):
    return torch.stack(group.updates).mean(0)


def spoils_its_input(group):
    group.updates[0].mul_(2.0)
    return mean(group)


def by_chance(group):
    return mean(group) + 1e-3 * torch.randn(group.updates[0].shape)


def never_the_base(group):
    return mean(group) + 1.0


def ignores_strides(group):
    return torch.stack([update.view(-1).view(update.shape) for update in group.updates]).mean(0)


def needs_float64(group):
    return mean(group) * (1.0 + 1e5 * torch.finfo(group.updates[0].dtype).eps)


def by_rows(group):
    return mean(group) / torch.stack(group.updates).abs().amax().clamp_min(1e-30)


def notes_a_tensor(group):
    return covmerge.Merged(mean(group), {"norm": mean(group).norm()})


def crashes(group):
    raise IndexError("out of range")


def squares(group):
    return mean(group) * mean(group).square().sum()


@pytest.mark.parametrize(
    ("function", "declared", "says"),
    [
        (spoils_its_input, {}, "inputs_are_not_modified.*changed in place what it was given"),
        (by_chance, {}, "the_same_bytes_every_time.*come from a parameter `seed`"),
        (never_the_base, {}, "zero_updates_give_the_base.*updates of zero give 1"),
        (ignores_strides, {}, "strides.*RuntimeError"),
        (needs_float64, {}, "single_precision.*float32 and float64 differ"),
        (by_rows, {"unit": "element"}, "blocks_of_rows.*declare `tensor`"),
        (notes_a_tensor, {}, "diagnostics_are_plain_json"),
        (crashes, {}, "raises IndexError: out of range"),
        (
            lambda group: group.updates[0],
            {"laws": covmerge.Laws(order_invariant=True)},
            "order_of_experts.*`order_invariant` is declared True",
        ),
        (
            squares,
            {"laws": covmerge.Laws(scale_equivariant=True)},
            "scaling_all_updates.*`scale_equivariant` is declared True",
        ),
        (
            mean,
            {"laws": covmerge.Laws(scale_equivariant=False)},
            "`scale_equivariant` is declared False.*declare it",
        ),
        (
            lambda group: mean(group).abs(),
            {"laws": covmerge.Laws(rotation_equivariant=True)},
            "rotating_all_updates",
        ),
        (
            mean,
            {"laws": covmerge.Laws(replicas=lambda given, count: float(count))},
            "replicas_of_one_expert.*4 copies are declared to give 4 times",
        ),
        (lambda group: mean(group).abs(), {"factored": "both"}, "factors.*`factored` is declared"),
        (mean, {"cost": lambda *sizes: covmerge.Cost(0.0, 0)}, "cost_model_is_positive"),
    ],
)
def test_what_a_method_breaks(function, declared, says):
    covmerge.register("bad", **declared)(function)
    with pytest.raises(Broken, match=rf"(?s)method 'bad' breaks .*({says})") as caught:
        check_method("bad")
    assert "Input: covmerge.testing." in str(caught.value)
    assert "seed=" in str(caught.value) or "strange_updates(" in str(caught.value)


def test_the_input_can_be_had_again():
    covmerge.register("bad")(spoils_its_input)
    with pytest.raises(Broken, match=r"Input: covmerge\.testing\.groups\.random_updates") as caught:
        check_method("bad")
    assert len(eval(str(caught.value).rpartition("Input: ")[2])) == 4


def test_nothing_is_promised_and_nothing_is_checked_of_it():
    covmerge.register("good")(lambda group: group.updates[0].clone())
    check_method("good")


def test_what_a_step_breaks():
    covmerge.register_step("grow", when="after", laws=covmerge.Laws(scale_equivariant=True))(
        lambda group, merged: merged.delta * merged.delta.norm()
    )
    with pytest.raises(Broken, match="step 'grow' breaks scaling_all_updates"):
        check_step("grow")
    covmerge.register_step("first", when="before", laws=covmerge.Laws(order_invariant=True))(
        lambda group: replace(group, updates=(2 * group.updates[0], *group.updates[1:]))
    )
    with pytest.raises(Broken, match="step 'first' breaks order_of_experts"):
        check_step("first")


def test_a_step_that_changes_the_merged_update_in_place():
    covmerge.register_step("halve", when="after")(lambda group, merged: merged.delta.mul_(0.5))
    with pytest.raises(Broken, match=r"step 'halve' changed in place what it was given"):
        check_step("halve")


def test_checks_are_for_parametrize():
    named = checks("rescale")
    assert {name.rpartition("-")[0] for name in named} >= {"order_of_experts", "strange_updates"}
    for check in list(named.values())[:4]:
        check()


# All others pass the same checks one by one, in tests/methods/test_laws.py and test_strange_groups.py:
# one without declarations, one with a global pass and a seed, with data, with W₀, of factors.
@pytest.mark.parametrize("name", ["average", "dare_ties", "regmean", "free", "knots"])
def test_ours_pass(name):
    check_method(name)


@pytest.mark.parametrize("name", covmerge.methods.names())
def test_ours_are_checked_as_all_are(name):
    shapes = [f"{rows}x{columns}" for rows, columns in SHAPES]
    expected = [f"{law}-{shape}" for law in {**LAWS, **FORMS} for shape in shapes]
    assert list(checks(name)) == [*expected, *(f"strange_updates-{seed}" for seed in range(20))]


@pytest.mark.parametrize("name", covmerge.steps.names())
def test_our_steps_pass(name):
    check_step(name)
