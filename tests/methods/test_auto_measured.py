"""`auto` where the experts' inputs were measured."""

from dataclasses import replace
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import covmerge
from covmerge import Generated
from covmerge.base.types import LinearGroup, Measured
from covmerge.maths.reference import REFERENCES
from covmerge.maths.testing.groups import random_updates
from covmerge.methods import registry
from tests.e2e.models import build, fine_tuned
from tests.statistics.models import save
from tests.tolerance import relative_error

METHOD, REGMEAN = registry.get("auto_measured"), registry.get("regmean")


def data_of(update, seed, rows=300, seen=None):
    """Inputs that use some directions more than others."""
    generator = torch.Generator().manual_seed(seed)
    d_in = update.shape[1]
    z = torch.randn(rows, d_in, generator=generator, dtype=torch.float64)
    z = z * (0.9 ** torch.randperm(d_in, generator=generator))
    if seen is not None:
        z[:, ~seen] = 0.0
    gram = (z.mT @ z / rows).to(update)
    return Measured(gram, rows, float(gram.norm()))


def group_of(updates, weights=None, base_norm=None, **how):
    measured = tuple(data_of(update, seed, **how) for seed, update in enumerate(updates))
    weights = tuple(weights or [1.0] * len(updates))
    return LinearGroup(tuple(updates), weights, expert_statistics=measured, base_norm=base_norm)


def covariance(update, measured, share):
    """What was measured, and as far as the update uses all inputs as much of what it tells."""
    d_in = len(measured)
    shrunk = 0.9 * measured + 0.1 * torch.diag(measured.diagonal())
    own = update.mT @ update / update.norm() ** 2
    used = torch.logdet(torch.eye(d_in, dtype=own.dtype) + 1e4 * d_in * own) / d_in / log(10001)
    return shrunk + share * used * shrunk.trace() * own


@settings(max_examples=50)
@given(
    shape=st.sampled_from([(24, 40), (40, 24), (32, 32)]),
    rank=st.sampled_from([None, 4]),
    low=st.sampled_from([0, 2]),
    count=st.integers(1, 5),
    spread=st.sampled_from([1.0, 30.0]),
    still=st.booleans(),
    weighted=st.booleans(),
    base_norm=st.sampled_from([None, 0.3, 30.0]),
    seed=st.integers(0, 1000),
)
def test_kernel_and_reference_agree(
    shape, rank, low, count, spread, still, weighted, base_norm, seed
):
    few = random_updates(*shape, count, 2, spread, seed=seed)
    updates = few[:low] + random_updates(*shape, count, rank or min(shape), spread, seed=seed)[low:]
    updates = [update.double() for update in updates]
    if still and count > 1:
        updates[0] = torch.zeros_like(updates[0])
    group = group_of(updates, [1.0 + t for t in range(count)] if weighted else None, base_norm)
    assert relative_error(METHOD(group).delta, REFERENCES["auto_measured"](group)) < 1e-6


def test_one_expert_and_copies_of_one_come_back_whatever_their_inputs():
    (update,) = random_updates(24, 40, 1, 24, 1.0, seed=0)
    for count in (1, 3):
        found = METHOD(group_of([update] * count)).delta
        assert relative_error(found, update) < 1e-5


def test_it_keeps_what_regmean_finds_and_its_spectrum_is_flatter():
    group = group_of([update.double() for update in random_updates(32, 32, 4, 4, 1.0, seed=1)])
    seen = sum(
        0.9 * m.value + 0.1 * torch.diag(m.value.diagonal()) for m in group.expert_statistics
    ).double()
    factor = torch.linalg.cholesky(seen)
    before, after = (
        torch.linalg.svd(method(group, **method.resolve({})).delta @ factor)
        for method in (REGMEAN, METHOD)
    )
    rank = 16
    assert torch.allclose(  # the same directions
        before.U[:, :rank] @ before.U[:, :rank].mT,
        after.U[:, :rank] @ after.U[:, :rank].mT,
        atol=1e-6,
    )
    assert before.S[0] / before.S[rank - 1] > 1.5 * after.S[0] / after.S[rank - 1]
    whole = torch.linalg.svdvals(sum(group.updates) @ factor).sum()
    assert 0.9 * whole < after.S.sum() <= whole * (1 + 1e-9)


def test_one_update_that_is_many_times_as_long_is_bounded():
    updates = random_updates(24, 24, 4, 24, 1.0, seed=2)
    longer = [updates[0] * 100, *updates[1:]]
    merged = METHOD(group_of(longer))
    assert merged.diagnostics.bounds[0] < 0.1 and merged.diagnostics.bounds[1] > 0.95
    assert merged.delta.norm() < 10 * METHOD(group_of(updates)).delta.norm()


def test_beside_short_weights_it_goes_to_least_squares():
    group = group_of(random_updates(24, 24, 4, 24, 1.0, seed=3), base_norm=1e-3)
    merged = METHOD(group)
    covariances = [
        replace(measured, value=covariance(update, measured.value, share))
        for update, measured, share in zip(
            group.updates, group.expert_statistics, merged.diagnostics.shares, strict=True
        )
    ]
    least = REGMEAN(
        replace(group, expert_statistics=tuple(covariances)), off_diagonal=1.0, ridge=0.0
    )
    assert relative_error(merged.delta, least.delta) < 1e-5
    assert merged.diagnostics.towards_least_squares > 0.999
    told = merged.diagnostics.report_columns(["a", "b", "c", "d"])
    assert told["a, to least squares, %"] == pytest.approx(100, abs=0.1)
    assert "a, to the average, %" not in told and told["experts' inputs"] == "known"


def test_without_any_data_of_the_layer_it_is_the_average():
    updates = random_updates(8, 12, 3, 8, 1.0, seed=4)
    group = group_of(updates)
    none = [replace(m, value=torch.zeros_like(m.value)) for m in group.expert_statistics]
    merged = METHOD(replace(group, expert_statistics=tuple(none)))
    assert relative_error(merged.delta, sum(updates) / 3) < 1e-6


def test_an_expert_whose_data_did_not_reach_the_layer_has_no_part_in_it():
    group = group_of(random_updates(8, 12, 3, 8, 1.0, seed=4))
    deaf = replace(
        group.expert_statistics[0], value=torch.zeros_like(group.expert_statistics[0].value)
    )
    merged = METHOD(replace(group, expert_statistics=(deaf, *group.expert_statistics[1:])))
    others = LinearGroup(
        group.updates[1:], group.weights[1:], expert_statistics=group.expert_statistics[1:]
    )
    assert torch.equal(merged.delta, METHOD(others).delta)
    assert (merged.diagnostics.unheard, merged.diagnostics.unchanged) == (1, 0)
    still = [torch.zeros_like(update) for update in group.updates[1:]]
    alone = replace(
        group,
        updates=(group.updates[0], *still),
        expert_statistics=(deaf, *group.expert_statistics[1:]),
    )
    merged = METHOD(alone)  # it alone changed the layer, and nobody knows on what
    assert relative_error(merged.delta, group.updates[0] / 3) < 1e-6
    assert (merged.diagnostics.unheard, merged.diagnostics.unchanged) == (1, 2)
    assert not merged.diagnostics.inputs_known


def test_updates_of_which_no_input_sees_anything():
    seen = torch.arange(12) < 6
    updates = [update * ~seen for update in random_updates(8, 12, 3, 8, 1.0, seed=5)]
    merged = METHOD(group_of(updates, seen=seen))
    assert torch.isfinite(merged.delta).all()
    assert merged.delta.norm() <= sum(updates).norm()  # what they tell of each other
    assert not merged.delta[:, seen].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_text_that_the_experts_write(tmp_path, dtype):
    base = build("llama").to(dtype)
    save(base, tmp_path / "base")
    files = {}
    for seed, name in enumerate(["code", "math"], start=1):
        save(fine_tuned(base, seed, scale=0.05).to(dtype), tmp_path / name)
        files[name] = tmp_path / f"{name}.covstats.safetensors"
        covmerge.collect(tmp_path / name, Generated("bos", tokens=8), files[name], max_examples=32)
    result = covmerge.merge(
        tmp_path / "base",
        {name: tmp_path / name for name in files},
        "auto_measured",
        out=tmp_path / "out",
        statistics=files,
    )
    told = [m for t in result.stats["tensors"].values() for m in t.get("matrices", [])]
    assert told and all(m["inputs_known"] and m["towards_least_squares"] is not None for m in told)
    assert any(m["flattening"] > 0.3 for m in told)
    assert not any("statistics of experts" in note for note in result.notes)
    other = covmerge.merge(
        tmp_path / "base", {name: tmp_path / name for name in files}, "ties", statistics=files
    )
    (note,) = (note for note in other.notes if "statistics of experts" in note)
    assert "'ties' does not look at" in note and "'code', 'math' have some" in note
    assert "(auto_measured, esm, lot," in note
