"""Layers of one shape in one batch: what the kernel gives of each, or the kernel itself, on CPU tensors."""

from dataclasses import replace
from functools import partial, wraps
from math import isfinite

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.base.types import LowRank, Merged, Rounding
from covmerge.errors import TensorError
from covmerge.maths.linalg.lapack import LinAlgError
from covmerge.maths.methods.factored import merge_factors
from covmerge.maths.reference import REFERENCES
from covmerge.methods import registry
from covmerge.methods.registry import Method
from covmerge.steps import resolve_steps, with_steps
from covmerge.testing import checks
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.test_costs import allocated
from tests.methods.variants import VARIANTS

BATCHED = [method.name for method in registry if method.batched is not None]
BATCHED_VARIANTS = [
    *[(name, params) for name, params in VARIANTS if name in BATCHED],
    ("ace", {"rank_rtol": 1e-3, "tau": 0.01}),
    ("actmat", {"rtol": 1e-2}),
    ("iso_c", {"rank_rtol": 0.2, "scale": 0.4}),
]
SOLVED = [
    pair for pair in BATCHED_VARIANTS if pair[1].get("solver") != "adam"
]  # which has no batch
# What may become of a layer: its experts' ranks and sizes, and which of them is something else.
KINDS = ("usual", "alike", "low rank", "copies", "unchanged", "blind", "huge", "tiny", "not finite")
# In float32 a kernel is within this of float64, and so is a batch (tests/methods/test_precision.py).
FLOAT32 = 2e-3


def layer(kind, name, shape, count, seed, dtype):
    """One layer of a kind."""
    rank = 2 if kind == "low rank" else min(shape)
    updates = random_updates(*shape, count, rank, 1.05 if kind == "alike" else 30.0, seed)
    if kind == "copies":
        updates = [updates[0].clone() for _ in updates]
    elif kind == "unchanged":
        updates[0] = torch.zeros_like(updates[0])
    elif kind == "blind":
        updates[0] = updates[0][:1].expand(shape).clone()
    elif kind == "not finite":
        updates[0][0, 0] = float("nan")
    factor = {"huge": 2.0**40, "tiny": 2.0**-40}.get(kind, 1.0)
    weights = [1.0 + 0.5 * t for t in range(count)]
    return group_of(registry.get(name), [(u * factor).to(dtype) for u in updates], weights)


def same_facts(batched, alone, *, rounding, loose=()):
    """The same facts: numbers to rounding, all else as it is, but for what hangs on rounding itself."""
    assert batched.keys() == alone.keys()
    for key, fact in batched.items():
        if isinstance(fact, float) and isfinite(fact) and alone[key] is not None:
            assert fact == pytest.approx(alone[key], rel=0.05, abs=rounding), key
        elif isinstance(fact, tuple):
            assert fact == pytest.approx(alone[key], rel=1e-5), key
        elif key not in loose:
            assert fact == alone[key], key


def held_to_the_kernel(name, params, groups, *, loose=()):
    """Run a batch, hold every layer that it took to the kernel; return which it took."""
    method = registry.get(name)
    given = method.resolve(params)
    found = method.at_once(groups, **given)
    assert len(found) == len(groups)
    for group, merged in zip(groups, found, strict=True):
        if merged is None:
            continue
        alone = method(group, **given)
        assert merged.delta.dtype == alone.delta.dtype
        exact = merged.delta.dtype == torch.float64
        assert relative(merged.delta, alone.delta.double()) < (1e-7 if exact else FLOAT32)
        # What is 0 of copies is so up to rounding of their dtype.
        same_facts(merged.stats, alone.stats, rounding=1e-12 if exact else 1e-6, loose=loose)
    return [merged is not None for merged in found]


def test_who_declares_a_batch():
    assert set(BATCHED) == {"ace", "actmat", "wudi", "iso_c"}


@pytest.mark.parametrize(("name", "params"), BATCHED_VARIANTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    d_out=st.integers(2, 20),
    d_in=st.integers(2, 20),
    count=st.integers(1, 5),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 10_000),
)
def test_a_batch_of_any_layers_is_the_loop(name, params, d_out, d_in, count, kinds, dtype, seed):
    groups = [
        layer(kind, name, (d_out, d_in), count, seed + place, dtype)
        for place, kind in enumerate(kinds)
    ]
    copies = [[update.clone() for update in group.updates] for group in groups]
    # Of updates of low rank that end in rounding, what is beyond it is counted as rounding has it.
    taken = held_to_the_kernel(name, params, groups, loose=("rank",))
    for group, copy in zip(groups, copies, strict=True):
        for update, own in zip(group.updates, copy, strict=True):
            assert torch.equal(update, own) or not update.isfinite().all()
    for kind, own in zip(kinds, taken, strict=True):
        assert not (own and kind in ("not finite", "huge", "tiny"))


@pytest.mark.parametrize(("name", "params"), SOLVED, ids=str)
@pytest.mark.parametrize("shape", [(24, 24), (30, 12), (12, 30), (3, 20)], ids=str)
def test_a_batch_agrees_with_the_reference(name, params, shape):
    method = registry.get(name)
    spreads = (2.0, 30.0, 30.0, 100.0)
    groups = [
        group_of(method, random_updates(*shape, 3, min(shape), spread, seed), [1.0, 2.0, 1.0])
        for seed, spread in enumerate(spreads)
    ]
    found = method.at_once(groups, **method.resolve(params))
    assert sum(merged is not None for merged in found) >= 2
    for group, merged in zip(groups, found, strict=True):
        if merged is not None:
            assert relative(merged.delta, REFERENCES[name](group, **params)) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "params"), SOLVED, ids=str)
def test_one_that_fails_takes_no_other_with_it(name, params, dtype):
    good = [layer("usual", name, (24, 12), 3, seed, dtype) for seed in range(4)]
    bad = [layer(kind, name, (24, 12), 3, 9, dtype) for kind in ("not finite", "unchanged")]
    taken = held_to_the_kernel(name, params, [bad[0], *good[:2], bad[1], *good[2:]], loose="rank")
    assert not taken[0]
    assert taken[1:3] == taken[4:] == [True, True]
    assert taken[3] == (name == "iso_c")  # a sum of updates is one also with a zero among them


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("check", ["dual", "primal"])
def test_laws_hold_in_a_batch(name, check, monkeypatch):
    """All laws, forms and strange updates, where each layer is merged between two others of its shape."""
    method = registry.get(name)
    used = []

    @wraps(method.kernel)
    def in_a_batch(group, **parameters):
        others = [group.times([1.0 + 0.1 * t for t in range(len(group.weights))]), group]
        merged = method.at_once([group, *others], **parameters)[0]
        used.append(merged is not None)
        return method.kernel(group, **parameters) if merged is None else merged

    stand_in = replace(method, kernel=in_a_batch)
    found = type(registry).get
    monkeypatch.setattr(
        type(registry), "get", lambda self, own: stand_in if own == name else found(self, own)
    )
    for title, run in checks(name).items():
        if (check == "dual") == ("5x30" in title):
            run()
    assert sum(used) > 10


def test_the_gate_parts_a_batch():
    """Layers whose gate fired are one stack, and the others another: each as its kernel has it."""
    kinds = ("alike", "usual", "alike", "usual", "usual")
    for dtype in (torch.float64, torch.float32):
        groups = [layer(kind, "ace", (20, 16), 4, seed, dtype) for seed, kind in enumerate(kinds)]
        assert all(held_to_the_kernel("ace", {}, groups))
        facts = [
            m.stats for m in registry.get("ace").at_once(groups, **registry.get("ace").resolve({}))
        ]
        assert [own["gate_fired"] for own in facts] == [kind == "usual" for kind in kinds]
        assert ["sigma_iso" in own for own in facts] == [kind == "usual" for kind in kinds]
    # One alone on its side of the gate is the kernel's.
    assert held_to_the_kernel("ace", {}, groups[:2]) == [False, False]


def test_a_system_that_wants_jitter_or_float64_is_the_kernels():
    usual = [layer("usual", "ace", (24, 12), 3, seed, torch.float32) for seed in range(3)]
    singular = layer("low rank", "ace", (24, 12), 3, 5, torch.float32)
    assert held_to_the_kernel("ace", {"eps": 0.0}, [*usual, singular]) == [True] * 3 + [False]
    # eps 1e-9 of a low-rank layer: there is a factor, and float32 cannot solve with it.
    assert held_to_the_kernel("ace", {"eps": 1e-9}, [*usual, singular]) == [True] * 3 + [False]
    method = registry.get("ace")
    assert method(singular, **method.resolve({"eps": 1e-9})).stats["precision"] == "float64"


def test_eigenvalues_are_masked_not_left_out():
    """Members of other ranks than their neighbours', each cut off where its own spectrum ends."""
    for dtype in (torch.float64, torch.float32):
        method = registry.get("actmat")
        groups = [
            group_of(method, random_updates(20, 16, 2, rank, 2.0, rank, dtype))
            for rank in (1, 3, 5, 8)
        ]
        assert all(held_to_the_kernel("actmat", {}, groups))
        found = method.at_once(groups, **method.resolve({}))
        assert [own.stats["rank"] for own in found] == [2, 6, 10, 16]
        assert {own.stats["solver"] for own in found[:3]} == {"eigen64"}


def test_each_member_is_refined_within_its_own_rank():
    """Where the gate fired, each member keeps as many directions as it has."""
    for dtype, eps in ((torch.float64, 1e-5), (torch.float32, 1e-3)):
        for shape in ((20, 16), (16, 20)):
            method = registry.get("ace")
            given = {"k_frac": 0.9, "eps": eps, "rank_rtol": 1e-3}
            groups = [
                group_of(method, random_updates(*shape, 2, rank, 30.0, rank, dtype))
                for rank in (16, 1, 5, 16)
            ]
            assert all(held_to_the_kernel("ace", given, groups))
            found = method.at_once(groups, **method.resolve(given))
            ks = [own.stats["k"] for own in found]
            assert ks[1] < ks[2] < ks[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_rounding_made_is_refined_in_no_batch(dtype):
    """Of a spectrum that ends in the solve's rounding, no more directions than the updates' rows have."""
    method = registry.get("ace")
    groups = [
        group_of(method, random_updates(20, 16, 2, rank, 30.0, rank, dtype)) for rank in (1, 2, 3)
    ]
    assert all(held_to_the_kernel("ace", {"k_frac": 0.9}, groups, loose=("rank",)))
    found = method.at_once(groups, **method.resolve({"k_frac": 0.9}))
    assert [own.stats["k"] for own in found] == [2, 4, 6]
    assert all(own.stats["rank"] > own.stats["k"] for own in found)  # by rounding


def test_rounding_of_stored_weights_ends_a_rank_in_a_batch_too():
    for name in ("actmat", "wudi", "iso_c", "ace"):
        groups = []
        for seed in range(3):
            updates = random_updates(24, 16, 2, 3, 2.0, seed, torch.float32)
            noise = torch.Generator().manual_seed(seed)
            noisy = [u + 1e-4 * torch.randn(u.shape, generator=noise) for u in updates]
            error = Rounding(edge=1e-4 * (24**0.5 + 16**0.5) * 1.05, energy=24 * 16 * 1e-8)
            group = group_of(registry.get(name), noisy)
            groups.append(replace(group, rounding=(error, error)))
        assert any(held_to_the_kernel(name, {}, groups, loose=("rank",))), name


def test_a_group_in_other_coordinates_is_the_kernels():
    """Cores of adapters come with a frame, in which 𝟏 is not 𝟏."""
    seen = []

    def watched(groups, **parameters):
        found = registry.get("ace").batched(groups, **parameters)
        seen.extend(found)
        return found

    method = replace(registry.get("ace"), batched=watched)
    frames = []
    kernel = method.kernel

    @wraps(kernel)
    def kept(group, **parameters):
        frames.append(group)
        return kernel(group, **parameters)

    adapters = [LowRank(torch.randn(12, 2).double(), torch.randn(2, 9).double()) for _ in range(2)]
    given = method.resolve({})
    merge_factors(replace(method, kernel=kept), adapters, [1.0, 1.0], given)
    assert frames[0].frame is not None
    assert method.at_once([frames[0], frames[0]], **given) == [None, None]
    assert seen == [None, None]


def test_steps_leave_the_batch_out():
    method = with_steps(registry.get("ace"), (), resolve_steps(["rescale"], "after"))
    groups = [layer("usual", "ace", (12, 12), 3, seed, torch.float64) for seed in range(3)]
    assert method.at_once(groups, **registry.get("ace").resolve({})) == [None] * 3


def batch_that(does):
    """A method whose batch does something to the updates' sums."""

    def batched(groups):
        return [does(place, sum(group.updates)) for place, group in enumerate(groups)]

    return Method("sums", lambda group: sum(group.updates), unit="element", batched=batched)


def test_what_a_batch_gives_is_looked_at():
    groups = [group_of(registry.get("average"), [torch.ones(2, 3) * s]) for s in (1.0, 2.0, 3.0)]
    halves = batch_that(lambda place, total: Merged(total) if place else None).at_once(groups)
    assert [None if own is None else float(own.delta[0, 0]) for own in halves] == [None, 2.0, 3.0]
    spoilt = batch_that(lambda place, total: Merged(total / place)).at_once(groups)
    assert [own is None for own in spoilt] == [True, False, False]
    with pytest.raises(TensorError, match="'sums' returns"):
        batch_that(lambda place, total: Merged(total.double())).at_once(groups)
    assert batch_that(lambda place, total: Merged(total)).at_once(groups[:1]) == [None]


@pytest.mark.parametrize("error", [LinAlgError("did not converge"), OverflowError("too large")])
def test_a_batch_that_fails_as_a_whole_is_done_by_the_kernel(error):
    def fails(place, total):
        raise error

    groups = [group_of(registry.get("average"), [torch.ones(2, 3)])] * 2
    assert batch_that(fails).at_once(groups) == [None, None]


def test_a_fault_of_the_batch_itself_is_told():
    groups = [group_of(registry.get("average"), [torch.ones(2, 3)])] * 2
    with pytest.raises(KeyError):
        batch_that(lambda place, total: {}[place]).at_once(groups)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (128, 512), (512, 128)], ids=str)
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_takes_no_more_memory_than_its_layers_declare(name, shape, dtype):
    method = registry.get(name)
    count, n = 4, 4
    groups = [
        group_of(method, random_updates(*shape, count, min(shape), 30.0, seed, dtype))
        for seed in range(n)
    ]
    given = method.resolve({})
    run = partial(method.at_once, groups, **given)
    assert all(merged is not None for merged in run())
    cost = method.cost(*shape, count, dtype.itemsize)
    result = n * shape[0] * shape[1] * dtype.itemsize

    def held():
        return Merged(torch.stack([merged.delta for merged in run()]))

    assert allocated(held) <= n * cost.workspace + 2 * result + 2**20
