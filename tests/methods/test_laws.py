"""Every registered method, and every step, against what it promises and what all must keep.

The checks are those of `covmerge.testing`; of ours everything is declared, and every page complete.
"""

from dataclasses import replace
from typing import get_args

import pytest

from covmerge.maths.testing.laws import FORMS, LAWS, SHAPES
from covmerge.maths.testing.subject import Subject
from covmerge.methods import registry
from covmerge.methods.registry import Sides, Unit
from covmerge.steps import registry as steps
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.variants import VARIANTS

METHODS = [pytest.param(method, id=method.name) for method in registry]
SUBJECTS = [
    *(pytest.param(Subject(method.name), id=method.name) for method in registry),
    *(pytest.param(Subject("average", **{s.when: [s.name]}), id=s.name) for s in steps),
    pytest.param(Subject("ace", ["norm_balance"], ["rescale"]), id="ace with steps"),
    pytest.param(Subject("ties", ["norm_balance"], ["rescale"]), id="ties with steps"),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("law", [*LAWS.values(), *FORMS.values()], ids=lambda law: law.__name__)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_laws(subject, law, shape):
    law(subject, subject.case(shape))


@pytest.mark.parametrize("method", METHODS)
def test_everything_is_declared(method):
    laws = method.laws
    assert None not in (laws.order_invariant, laws.rotation_equivariant)
    # On weights it may hang on bounds that some layers reach and others do not.
    assert laws.scale_equivariant is not None or method.sees == "weights"
    assert laws.replicas is not None


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=str)
def test_what_follows_from_parameters_is_one_of_what_there_is(name, params):
    method = registry.get(name)
    given = method.resolve(params)
    assert method.unit_for(given) in get_args(Unit)
    assert method.sides_for(given) in get_args(Sides)
    assert method.factored_for(given) == (method.sides_for(given) != "none")


@pytest.mark.parametrize(
    ("name", "params"), [v for v in VARIANTS if registry.get(v[0]).sees == "weights"], ids=str
)
def test_who_does_without_the_base_does_not_look_at_it(name, params):
    method = registry.get(name)
    given = method.resolve(params)
    updates = random_updates(6, 5, min(2, method.experts[1] or 2), 5, 3.0, seed=1)
    updates[0][0] = 0.0  # one expert left a row as it was
    group = group_of(method, updates)
    elsewhere = replace(group, base=group.base.flip(0))
    merged, other = (method(own, **given).weights for own in (group, elsewhere))
    assert method.without_base(given) == (relative(merged, other) < 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_page_is_complete(method):
    assert method.summary.endswith(".")
    assert method.equation.startswith("W̄ =")
    assert "Departs from the paper:" in method.kernel.__doc__
    assert "Example:" in method.kernel.__doc__
    assert all(parameter.description for parameter in method.parameters)


@pytest.mark.parametrize("step", [pytest.param(step, id=step.name) for step in steps])
def test_page_of_a_step_is_complete(step):
    assert step.summary.endswith(".")
    assert "←" in step.equation
    assert "Example:" in step.kernel.__doc__
    assert all(parameter.description for parameter in step.parameters)
    assert None not in (step.laws.order_invariant, step.laws.scale_equivariant)


@pytest.mark.parametrize(
    ("name", "params", "factor"),
    [
        ("aswudi", {"start": "mean", "scale": 0.5}, 0.5),
        ("core_space", {"isotropize": False, "inner": "average", "scale": 0.5}, 0.5),
        ("core_space", {"isotropize": False, "inner": "task_arithmetic", "scale": 0.5}, 1.5),
        ("core_space", {"isotropize": False, "inner": "cart", "scale": 0.5}, 1.0),
        (
            "core_space",
            {"isotropize": False, "inner": "ties", "density": 1.0, "merge": "sum", "scale": 0.5},
            1.5,
        ),
        (
            "core_space",
            {"isotropize": False, "inner": "ties", "density": 1.0, "merge": "mean", "scale": 0.5},
            0.5,
        ),
    ],
)
def test_three_copies_of_an_update_are_it_times_a_number(name, params, factor):
    method = registry.get(name)
    params = method.resolve(params)
    assert method.laws.replicas(params, 3) == factor
    (update,) = random_updates(9, 12, 1, 9, 3.0, seed=1)
    merged = method(group_of(method, [update] * 3), **params).delta
    assert relative(merged, factor * update) < 1e-9
