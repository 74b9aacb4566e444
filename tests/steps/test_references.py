"""Every step against its naive float64 reference implementation, over shapes, ranks, weights and dtypes."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covmerge.maths.reference import STEP_REFERENCES
from covmerge.methods import registry
from covmerge.steps import registry as steps
from covmerge.steps import resolve_steps, with_steps
from tests.methods.groups import group_of, random_updates, relative
from tests.steps.variants import VARIANTS


def both(name, params, updates, weights=None):
    """What the step gives around a mean, and what its reference gives: updates, or the merged update."""
    step = steps.get(name)
    average = registry.get("average")
    (use,) = resolve_steps([{name: params}], step.when)
    needs = with_steps(average, *(([use], []) if step.when == "before" else ([], [use])))
    group = group_of(needs, updates, weights)
    if step.when == "before":
        made = step.prepare(group, use.parameters).updates
        return torch.stack(made), torch.stack(STEP_REFERENCES[name](group, **params))
    merged = average(group)
    made = step.finish(group, merged, use.parameters).delta
    return made, STEP_REFERENCES[name](group, merged.delta, **params)


def test_every_step_has_a_reference_and_variants():
    assert set(STEP_REFERENCES) == set(steps.names())
    assert {name for name, _ in VARIANTS} == set(steps.names())


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    d_out=st.integers(2, 24),
    d_in=st.integers(2, 24),
    count=st.integers(1, 5),
    spread=st.sampled_from([1.0, 2.0, 30.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 10_000),
)
@example(d_out=24, d_in=24, count=1, spread=1.0, weighted=False, seed=2)  # one expert
def test_float64_agrees_with_the_reference(
    name, params, d_out, d_in, count, spread, weighted, seed
):
    updates = random_updates(d_out, d_in, count, min(d_out, d_in), spread, seed)
    weights = [1.0 + 0.5 * t if weighted else 1.0 for t in range(count)]
    made, reference = both(name, params, updates, weights)
    assert made.dtype == torch.float64
    assert relative(made, reference) < 1e-7


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_low_rank_updates_agree_with_the_reference(name, params, rank):
    made, reference = both(name, params, random_updates(20, 16, 4, rank, 30.0, seed=7))
    assert relative(made, reference) < 1e-6


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [(48, 32), (32, 96), (8, 96), (64, 64), (1, 9), (9, 1)])
def test_float32_is_near_the_reference(name, params, shape):
    updates = random_updates(*shape, 4, min(shape), 30.0, seed=11, dtype=torch.float32)
    made, reference = both(name, params, updates)
    assert made.dtype == torch.float32
    assert relative(made, reference) < 1e-3


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_an_expert_without_a_change(name, params):
    updates = [torch.zeros(6, 5, dtype=torch.float64), *random_updates(6, 5, 2, 5, 3.0, seed=3)]
    assert relative(*both(name, params, updates)) < 1e-9
    nothing, reference = both(name, params, [torch.zeros(6, 5, dtype=torch.float64)] * 3)
    assert not nothing.any() and not reference.any()
