"""`auto` says in words what it did to each matrix and why."""

from dataclasses import replace
from math import inf, log1p
from statistics import fmean, pvariance

import pytest
import torch

import covmerge
from covmerge.base.noticed import Seen, account_of
from covmerge.base.types import LinearGroup
from covmerge.front.reporting.tables import told
from covmerge.maths.methods.auto_noticed import Equalised
from covmerge.maths.testing.groups import random_updates
from covmerge.methods import registry
from tests.report.merges import checkpoints, report
from tests.report.pages import parse, rows_of

page = pytest.importorskip("covmerge.front.reporting.html")


def merged(updates, inputs=None):
    return registry.get("auto")(
        LinearGroup(tuple(updates), (1.0,) * len(updates), base_inputs=inputs)
    ).noticed


def drawn(*norms, seed=0, shape=(12, 16)):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for _ in norms]
    return [norm * update / update.norm() for norm, update in zip(norms, found, strict=True)]


def test_the_numbers_of_a_matrix():
    one = merged(drawn(1.0, 1.0, 0.05, 0.0))
    # s = ‖Δ‖² over itself and a hundredth of Σ‖Δ‖⁴/Σ‖Δ‖², of norms that are nearly 1, 1 and 0.05.
    long = one.bounds[0]
    assert one.bounds == pytest.approx([long, long, (1 + 2**-4) ** 0.25, 0.0], rel=1e-3)
    assert 0.95 < long < 1.0
    small = 0.05 * one.bounds[2] / long
    mean = (2 + small**4) / (2 + small**2)
    assert one.shares == pytest.approx(
        [1 / (1 + 0.01 * mean)] * 2 + [small**2 / (small**2 + 0.01 * mean), 0.0], rel=1e-5
    )
    assert merged(drawn(1.0, 1.0, 1.0)).bounds == pytest.approx([1.0] * 3)
    # One of seven that is many times as long ends near twice the geometric mean of all.
    for times, most in ((5.0, 2.6), (100.0, 5.5), (1000.0, 15.0)):
        *others, far = merged(drawn(*[1.0] * 6, times)).bounds
        assert 2.0 < times * far < most
        assert min(others) > 0.99
    assert one.unchanged == 1 and one.lengthening > 1.0 and 0.0 < one.outputs_length < 1.0
    assert one.length_in_outputs is None  # by I, a length of outputs is one of weights
    assert merged(drawn(1.0, 1.0), torch.eye(16)).length_in_outputs is not None
    alike = drawn(1.0) * 3
    assert merged(alike).unlike_experts == pytest.approx(1.0)
    assert merged(alike).flattening == pytest.approx(0.0, abs=1e-6)
    assert merged(alike).outputs_length == pytest.approx(1 / 3, rel=1e-5)


def test_experts_that_use_unequally_many_directions_are_equalised_less():
    dense = drawn(1.0, 1.0, shape=(32, 40))
    few = [(u / u.norm()).float() for u in random_updates(32, 40, 2, 2, 1.0, seed=1)]
    assert merged(dense).uneven_use == pytest.approx(0.0, abs=1e-3)
    assert merged(few).uneven_use == pytest.approx(0.0, abs=1e-3)
    both = merged(dense + few)
    # ω is the mean of log(1 + 10⁴e) / log(1 + 10⁴) over the eigenvalues e of ΔᵀΔ, of mean 1.
    values = [torch.linalg.svdvals(u.double()).square() for u in dense + few]
    wide = [float((1e4 * 32 * v / v.sum()).log1p().sum()) / 32 / log1p(1e4) for v in values]
    mean = fmean(wide)
    assert both.uneven_use == pytest.approx(pvariance(wide) / mean / (1 - mean), rel=1e-3)
    assert 0.5 < both.uneven_use < 0.9
    phi, unlike = both.directions_in_use, 1 - both.unlike_experts**-2
    expected = (0.75 - phi / 4) * unlike * (1 - both.uneven_use)
    assert both.flattening == pytest.approx(expected, rel=1e-6)
    # An update that vanishes leaves this too.
    faint = merged([*dense, 1e-6 * few[0]])
    assert faint.uneven_use == pytest.approx(merged(dense).uneven_use, abs=1e-6)


def test_what_the_report_tells_of_a_matrix():
    one = Equalised(0, (0.99, 0.6), (0.5, 1.0), True, 1.8, 0.9, 0.4, 1.2, 0.7).told(
        ("code", "math")
    )
    assert one == {
        "base's inputs": "known",
        "N, unlike experts": 1.8,
        "φ, directions in use, %": 90.0,
        "η, unevenness": None,
        "q, flattening": 0.4,
        "λ, times the length of least squares": 1.2,
        "a, to the average, %": None,
        "counted less": "math",
        "shortened": "code",
    }
    assert Equalised(unchanged=1).told(())["φ, directions in use, %"] is None
    assert Equalised(towards_average=0.25).told(())["a, to the average, %"] == 25.0
    assert Equalised(inputs_told=0.77).told(())["base's inputs"] == "not known, 77% told"


def test_rows_and_totals_over_matrices():
    known = Equalised(0, (0.99, 0.6), (0.5, 1.0), True, 1.8, 0.9, 0.4, 1.2, 0.7)
    other = Equalised(0, (0.99, 0.99), (1.0, 1.0), False, 2.0, 0.5, 0.5, 1.4, 0.7)
    seen = [Seen("a", {}, ("code", "math"), (known,)), Seen("b", {}, ("code", "math"), (other,))]
    account = account_of(seen)
    rows = dict(account.rows)
    assert rows["base's inputs"] == "known in 1 of 2 matrices"
    assert rows["N, unlike experts"] == "count as 1.90 (1.80 to 2.00), by their directions"
    assert rows["φ, directions"].startswith("70% (50% to 90%) of those that the layers have")
    assert rows["q, flattening"].startswith("0.45 (0.40 to 0.50), where 0 is least squares")
    assert rows["λ, length"] == "1.30 (1.20 to 1.40) times that of least squares"
    assert rows["counted less"].startswith("'math' in 1 tensor (a)")
    assert account.totals["inputs_known"] == 1 and account.totals["flattening"] == 0.45
    assert account.totals["counted_less"] == {"math": ["a"]}
    assert rows["shortened"].startswith("'code' in 1 tensor (a): long beside the others")
    assert account.totals["shortened"] == {"code": ["a"]}
    assert "C₀, inputs" not in rows and "a, to the average" not in rows
    gone = dict(
        account_of([Seen("b", {}, ("code",), (replace(other, towards_average=0.25),))]).rows
    )
    assert gone["a, to the average"].startswith("25% of the way to the average")
    told_of = replace(other, inputs_told=0.77)
    own = dict(account_of([Seen("b", {}, ("code", "math"), (told_of,))]).rows)
    assert own["C₀, inputs"].startswith("77% of it is what the updates tell")
    assert "η, unevenness" not in rows and "η, unevenness" not in own
    uneven = (replace(known, uneven_use=0.02), replace(other, uneven_use=0.4))
    own = dict(account_of([Seen("b", {}, ("code", "math"), uneven)]).rows)
    assert own["η, unevenness"].startswith(
        "0.21 (0.02 to 0.40), where 0 is experts that use equally"
    )
    alone = dict(account_of(seen[1:]).rows)
    assert alone["base's inputs"] == "not known: by the weights alone"
    assert not {"counted less", "shortened"} & set(alone) and alone["q, flattening"].startswith(
        "0.50, where"
    )
    # Where nothing was left, and in what an older version wrote, there is nothing to say.
    nothing = account_of([Seen("a", {}, ("code",), (Equalised(unchanged=1),))])
    assert [label for label, _ in nothing.rows] == ["base's inputs", "unchanged"]
    assert inf not in nothing.totals.values() and nothing.totals["flattening"] is None


def test_covmerge_json_and_the_report_tell_it_of_every_layer(tmp_path):
    made = report(tmp_path, {"code": 0.02, "math": 0.03, "faint": 0.001}, "auto", blocks=1)
    entry = made.manifest["tensors"]["layers.0.mlp.up_proj.weight"]["matrices"][0]
    assert (
        entry["inputs_known"] is False
        and 0.5 < entry["inputs_told"] < 1.0
        and len(entry["shares"]) == 3
    )
    assert 0.0 < entry["towards_average"] < 0.1
    totals = made.manifest["totals"]
    assert totals["flattening"] and list(totals["counted_less"]) == ["faint"]
    root = parse(page.render(made))
    tables = [rows_of(table) for table in root.all("table")]
    (layers,) = (rows for rows in tables if "q, flattening" in rows[0])
    assert [row[0] for row in layers[1:]] == list(made.noticed)
    assert layers[1][1] == f"not known, {entry['inputs_told']:.0%} told" and layers[1][-2:] == [
        "faint",
        "nobody",
    ]
    assert "not known: by the weights alone" in root.text


def test_a_method_that_tells_nothing_has_no_table(tmp_path):
    base, experts = checkpoints(tmp_path, {"code": 0.02}, blocks=1)
    covmerge.merge(base, experts, "average", tmp_path / "out")
    assert told(covmerge.report(tmp_path / "out", spectra="none")) == []
