"""Diagnostics are said, with what to do that helps."""

import re
from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.diagnostics import Diagnostics, TensorDiagnostics
from covmerge.maths.methods.auto_measured_diagnostics import EqualisedMeasured
from covmerge.run.output import account_of_lengths
from tests.cli.runs import covmerge as command
from tests.cli.runs import flags, save_plain, words

NAME = "fc.weight"


def drawn(norm, seed, shape=(8, 16)):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return value * (norm / value.norm())


def merged(norms, **params):
    base = {NAME: drawn(3.0, seed=99)}
    experts = {f"e{n}": {NAME: base[NAME] + drawn(norm, n)} for n, norm in enumerate(norms)}
    return covmerge.merge(base, experts, "ace", **params)


def ridges(result):
    return [warning for warning in result.warnings if "ε" in warning]


def test_an_expert_that_epsilon_outweighs_is_a_warning_with_an_epsilon_that_helps():
    (warning,) = ridges(merged([1e-3, 0.5]))
    assert "ε outweighs an expert in 1 tensor (fc.weight)" in warning
    eps = float(re.search(r"\(eps=(\S+?)\)", warning)[1])
    assert eps == pytest.approx(0.1 * 1e-3**2 / 16, rel=0.6)
    again = merged([1e-3, 0.5], eps=eps)
    assert not ridges(again)
    assert again.stats["tensors"][NAME]["matrices"][0]["ridge_share"] <= 0.11


def test_an_epsilon_that_no_float32_solves_is_not_advised():
    (warning,) = ridges(merged([1e-5, 0.5], eps=1e-8))
    assert "eps=" not in warning and 'method="tsv_m"' in warning


def test_an_expert_that_epsilon_drowns_is_averaged_and_said():
    result = merged([1e-5, 0.5])
    assert not ridges(result)
    (note,) = (note for note in result.notes if "averaged" in note)
    assert "nothing of the inputs of 1 updates" in note and "1 tensor (fc.weight)" in note


def test_a_merged_update_longer_than_its_experts_together_is_said():
    def said(texts):
        return [text for text in texts if "longer than the experts' together" in text]

    result = merged([1e-3, 0.5])
    (warning,) = said(result.warnings)
    assert "in 1 tensor (fc.weight), 3.83 times in 'fc.weight'" in warning
    assert not said(result.notes)
    # A little is no blow-up: ACE follows directions that few experts have.
    result = merged([0.4, 0.5], gate="scale_free")
    assert said(result.notes) and not said(result.warnings)
    base = {NAME: drawn(3.0, seed=99)}
    usual = covmerge.merge(base, [{NAME: base[NAME] + drawn(0.4, 0)}] * 2, "average")
    assert not said((*usual.notes, *usual.warnings))


def test_one_that_is_longer_only_where_no_inputs_go_is_a_note_that_says_so():
    diagnostics = EqualisedMeasured(inputs_known=True, outputs_length=0.5)
    entry = {"merged_norm": 12.0, "update_norm": dict.fromkeys("abcd", 1.0)}
    account = account_of_lengths(
        {NAME: entry}, [TensorDiagnostics(NAME, {}, tuple("abcd"), (diagnostics,))]
    )
    (note,) = account.notes
    assert "another method" not in note and not account.warnings
    assert "on the inputs that it looked at that is at most 0.5 times as long" in note
    # By a method that goes by weights, or where nobody knows the inputs, it is what it looks like.
    unknown = replace(diagnostics, inputs_known=False)
    for diagnostics in (unknown, Diagnostics()):
        account = account_of_lengths(
            {NAME: entry}, [TensorDiagnostics(NAME, {}, tuple("abcd"), (diagnostics,))]
        )
        assert "another method" in account.warnings[0] and not account.notes


@pytest.mark.parametrize("low_rank", [False, True])
def test_so_is_one_of_a_single_layer(low_rank):
    updates = [drawn(1.0, seed=n) for n in range(2)]
    if low_rank:
        updates = [covmerge.LowRank(u, torch.eye(16)) for u in updates]
    with pytest.warns(UserWarning, match=r"2\.\d+ times as long as the experts' together"):
        covmerge.merge_layer(updates, "task_arithmetic", scale=3.0)


def test_the_gate_at_its_pole_is_said_where_the_scale_free_one_does_not_fire():
    result = merged([1.05, 0.95])
    assert result.stats["totals"]["gate_fired"] == [NAME]
    (note,) = (note for note in result.notes if "pole" in note)
    assert 'gate="scale_free"' in note
    assert not merged([1.05, 0.95], gate="scale_free").stats["totals"]["gate_fired"]
    # Unlike norms fire either gate; a threshold that was lowered fires by itself.
    for norms, params in ([(0.3, 2.0), {}], [(0.1, 0.11), {"tau": 0.0}]):
        result = merged(norms, **params)
        assert result.stats["totals"]["gate_fired"]
        assert not any("pole" in note for note in result.notes)


def test_the_table_calls_it_a_warning(tmp_path):
    models = save_plain(tmp_path)
    given = ["--method=ace", "--set", "eps=0.1", "--verbose"]
    ran = command("merge", *flags(models), *given, tmp_path / "out")
    shown = words(ran.stdout)
    fired = "fired in 2 of 2" in shown
    assert fired == ("warning ACE's ε outweighs" in shown)
    assert fired
