"""Every registered method, and every step, against what it promises and what all must keep.

The checks are those of `covmerge.testing`; of ours everything is declared, and every page complete.
"""

import pytest

from covmerge.methods import registry
from covmerge.steps import registry as steps
from covmerge.testing.forms import FORMS
from covmerge.testing.laws import LAWS, SHAPES
from covmerge.testing.subject import Subject

METHODS = [pytest.param(method, id=method.name) for method in registry]
SUBJECTS = [
    *(pytest.param(Subject(method.name), id=method.name) for method in registry),
    *(pytest.param(Subject("average", **{s.when: [s.name]}), id=s.name) for s in steps),
    pytest.param(Subject("ace", ["norm_balance"], ["rescale"]), id="ace with steps"),
    pytest.param(Subject("ties", ["norm_balance"], ["rescale"]), id="ties with steps"),
]


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
