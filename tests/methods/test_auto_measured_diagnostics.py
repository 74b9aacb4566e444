"""`auto_measured` says in words what it did to each matrix and why."""

from dataclasses import replace
from math import inf

import pytest
import torch

import covmerge
from covmerge.base.diagnostics import TensorDiagnostics, summarise
from covmerge.base.types import LinearGroup, Measured
from covmerge.front.reporting.tables import method_columns
from covmerge.maths.methods.auto_measured_diagnostics import EqualisedMeasured
from covmerge.methods import registry
from tests.report.merges import checkpoints

KNOWN = EqualisedMeasured(0, (0.99, 0.6), (0.5, 1.0), True, 1.8, 0.9, 0.4, 1.2, 0.7)
OTHER = EqualisedMeasured(0, (0.99, 0.99), (1.0, 1.0), False, 2.0, 0.5, 0.5, 1.4, 0.7)
EXPERTS = ("code", "math")


def merged(*norms, shape=(12, 16)):
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator) for _ in norms]
    updates = [norm * update / update.norm() for norm, update in zip(norms, found, strict=True)]
    data = Measured(torch.eye(shape[1]), rows=64, total=float(shape[1]))
    group = LinearGroup(tuple(updates), (1.0,) * len(norms), expert_statistics=(data,) * len(norms))
    return registry.get("auto_measured")(group).diagnostics


def test_the_numbers_of_a_matrix():
    one = merged(1.0, 1.0, 0.05, 0.0)
    # s = ‖Δ‖² over itself and a hundredth of Σ‖Δ‖⁴/Σ‖Δ‖², of norms that are nearly 1, 1 and 0.05.
    long = one.bounds[0]
    assert one.bounds == pytest.approx([long, long, (1 + 2**-4) ** 0.25, 0.0], rel=1e-3)
    small = 0.05 * one.bounds[2] / long
    mean = (2 + small**4) / (2 + small**2)
    expected = [1 / (1 + 0.01 * mean)] * 2 + [small**2 / (small**2 + 0.01 * mean), 0.0]
    assert one.shares == pytest.approx(expected, rel=1e-5)
    # One of seven that is many times as long ends near twice the geometric mean of all.
    for times, most in ((5.0, 2.6), (100.0, 5.5), (1000.0, 15.0)):
        *others, far = merged(*[1.0] * 6, times).bounds
        assert 2.0 < times * far < most and min(others) > 0.99
    assert one.unchanged == 1 and one.lengthening > 1.0
    assert one.length_in_outputs == one.outputs_length


def test_what_the_report_tells_of_a_matrix():
    assert KNOWN.report_columns(EXPERTS) == {
        "experts' inputs": "known",
        "N, unlike experts": 1.8,
        "φ, directions in use, %": 90.0,
        "η, unevenness": None,
        "q, flattening": 0.4,
        "λ, times the length of least squares": 1.2,
        "a, to least squares, %": None,
        "counted less": "math",
        "shortened": "code",
    }
    assert (
        EqualisedMeasured(towards_least_squares=0.25).report_columns(())["a, to least squares, %"]
        == 25.0
    )


def test_rows_and_totals_over_matrices():
    account = summarise(
        [
            TensorDiagnostics("a", {}, EXPERTS, (KNOWN,)),
            TensorDiagnostics("b", {}, EXPERTS, (OTHER,)),
        ]
    )
    rows = dict(account.rows)
    assert rows["experts' inputs"] == "known in 1 of 2 matrices"
    assert rows["N, unlike experts"] == "count as 1.90 (1.80 to 2.00), by their directions"
    assert rows["q, flattening"].startswith("0.45 (0.40 to 0.50), where 0 is least squares")
    assert rows["counted less"].startswith("'math' in 1 tensor (a)")
    assert rows["shortened"].startswith("'code' in 1 tensor (a): long beside the others")
    assert account.totals["inputs_known"] == 1 and account.totals["flattening"] == 0.45
    gone = replace(OTHER, towards_least_squares=0.25, uneven_use=0.4)
    rows = dict(summarise([TensorDiagnostics("b", {}, EXPERTS, (gone,))]).rows)
    assert rows["a, to least squares"].startswith("25% of the way to least squares")
    assert rows["η, unevenness"].startswith("0.40, where 0 is experts that use equally")
    assert not {"counted less", "shortened"} & set(rows)
    # Where nothing was left there is nothing to say.
    nothing = summarise([TensorDiagnostics("a", {}, ("code",), (EqualisedMeasured(unchanged=1),))])
    assert [label for label, _ in nothing.rows] == ["experts' inputs", "unchanged"]
    assert inf not in nothing.totals.values() and nothing.totals["flattening"] is None


def test_a_method_that_tells_nothing_has_no_table(tmp_path):
    base, experts = checkpoints(tmp_path, {"code": 0.02}, blocks=1)
    covmerge.merge(base, experts, "average", tmp_path / "out")
    assert method_columns(covmerge.report(tmp_path / "out", spectra="none")) == []
