"""A method's diagnostics are its own type: no other module knows its facts."""

import ast
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import covmerge
from covmerge.base.diagnostics import Diagnostics, MergeSummary, TensorDiagnostics, summarise
from covmerge.base.types import LinearGroup
from covmerge.maths.methods.ace_diagnostics import AceDiagnostics
from covmerge.maths.methods.summaries import DEPENDENT
from covmerge.methods import COMMON_SUMMARIES, registry
from tests.methods.groups import group_of, random_updates

SOURCE = Path(covmerge.__file__).parent
KINDS = {registry.get(name).diagnostics for name in registry.names()} - {Diagnostics}
# The methods' own files, where the same word may be a parameter, or a fact of another.
AT_HOME = {"methods", "reference"}
# Words of the field that name other things too: ranks of adapters, the γ of an inspection, a parameter.
COMMON = {"bounds", "gamma", "k", "rank", "route", "sigma", "size", "solver"}


def constants():
    """Every text of the source that is an expression, with the part of its floor that has it."""
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[1:2]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield part, path, node


def test_no_module_knows_the_facts_of_a_method():
    facts = {each.name for kind in KINDS for each in fields(kind)}
    totals = {key for summary in COMMON_SUMMARIES for key in summary.totals([])}
    assert {"gate_fired", "ridge_share", "kept_mass", "jitter"} < facts
    assert totals == {"gate_fired", "ridge_dominates", "largest_jitter", "unchanged_updates"}
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.value}"
        for part, path, node in constants()
        if not AT_HOME.intersection(part) and node.value in (facts | totals) - COMMON
    ]
    assert not found


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_an_older_output_may_lack_facts_and_have_others(kind):
    assert kind.from_json({"of another": 1}) == kind()
    assert kind.from_json(kind().as_json()) == kind()


def test_the_pole_of_gamma_is_null():
    diagnostics = AceDiagnostics(gamma=inf, gate_fired=True, spread=0.1)
    assert diagnostics.at_pole
    assert diagnostics.as_json()["gamma"] is None
    assert AceDiagnostics.from_json(diagnostics.as_json()) == diagnostics


def test_words_see_their_own_types_only():
    @dataclass(frozen=True)
    class Other(Diagnostics):
        jitter: float | None = None  # not ACE's: it lists no words

    seen = [
        TensorDiagnostics(
            "fc", {"eps": 1e-5}, ("a", "b"), (AceDiagnostics(unchanged=1, jitter=0.0),)
        ),
        TensorDiagnostics("head", {}, ("a", "b"), (Other(jitter=3.0),)),
    ]
    account = summarise(seen, always=COMMON_SUMMARIES)
    assert account.totals["largest_jitter"] == 0.0 and account.totals["unchanged_updates"] == 1
    assert dict(account.rows)["γ gate"] == "fired in 0 of 1 matrices"
    assert summarise([], always=COMMON_SUMMARIES).rows == ()
    assert summarise(seen[1:]) == MergeSummary()


def test_words_of_jitter_and_of_many_tensors():
    @dataclass(frozen=True)
    class Near(Diagnostics):
        summaries: ClassVar = (DEPENDENT,)
        dependent: int = 2

    fired = AceDiagnostics(gamma=inf, gate_fired=True, spread=0.1, jitter=1e-8)
    seen = [
        TensorDiagnostics(name, {"eps": 1e-5}, ("a", "b"), (fired,)) for name in ("q", "k", "v")
    ]
    account = summarise(
        [*seen, *(TensorDiagnostics(one, {}, ("a",), (Near(),)) for one in ("x", "y", "z"))]
    )
    assert dict(account.rows)["jitter"] == "1.0e-08 at most"
    gate, dependent = account.notes
    assert gate.startswith("ACE's gate fired in 3 tensors (q, k and 1 more) whose")
    assert "decide 6 directions" in dependent and dependent.endswith("3 tensors (x, y and 1 more)")


def test_facts_of_a_matrix():
    updates = random_updates(12, 9, 3, 4, 3.0, seed=1)
    group = LinearGroup(tuple(update.float() for update in updates), (1.0,) * 3)

    method = registry.get("ace")
    ace = method(group, **method.resolve({"eps": 1e-4})).stats
    centred = [float((update - update.mean(0)).square().sum()) for update in updates]
    assert ace["ridge_share"] == pytest.approx(9 * 1e-4 / min(centred), rel=1e-4)
    logs = torch.stack([update.norm().square().log() for update in updates])
    assert ace["spread"] == pytest.approx(float(logs.var()), rel=1e-4)
    assert ace["precision"] == "float32"
    ssr = registry.get("ssr")
    assert ssr(group_of(ssr, updates)).stats["rank"] == 9


def test_a_length_of_huge_updates_is_in_their_units():
    updates = [torch.eye(3) * 1e30, torch.eye(3) * 1e30]
    merged = covmerge.methods.get("iso_c")(covmerge.LinearGroup(tuple(updates), (1.0, 1.0)))
    assert merged.stats["sigma"] == pytest.approx(2e30, rel=1e-6)
