"""What a file's rounding allows to be known of an update, whatever dtype the merge computes in."""

import re
from typing import Any

import pytest
import torch

import covmerge
from covmerge.base.diagnostics import TensorDiagnostics, summarise
from covmerge.base.types import LinearGroup, LowRank, Rounding
from covmerge.maths.measures.rounding import rounding_of
from covmerge.maths.methods import ace as ace_kernel
from covmerge.maths.methods import registry
from covmerge.maths.methods.closed_form import active_experts
from covmerge.maths.reference import REFERENCES
from tests.advised import advice
from tests.methods.groups import group_of, random_updates, relative
from tests.methods.test_factored import VARIANTS
from tests.methods.variants import VARIANTS as REFERENCED

WIDE, TALL = (96, 128), (128, 96)


def adapters(shape, rank=4, norms=(0.5, 2.0, 8.0), seed=1):
    """Updates of low rank, float64, of unlike norms."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for norm in norms:
        left = torch.randn(shape[0], rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)
        made.append(LowRank(left * (norm / (left @ right).norm()), right))
    return made


def test_rounding_stays_with_its_update_where_another_left_the_sums():
    updates = tuple(times * torch.ones(2, 3) for times in (1.0, 0.0, 2.0))
    errors = tuple(Rounding(edge, edge**2) for edge in (0.1, 0.2, 0.3))
    active = active_experts(LinearGroup(updates, (1.0,) * 3, rounding=errors))
    assert active.rounding == (errors[0], errors[2]) and active.unchanged == 1


def folded(updates, stored, computed, name, params):
    """Merge the same adapters as full models: folded into a base's weights of a dtype."""
    generator = torch.Generator().manual_seed(7)
    base = (0.05 * torch.randn(updates[0].shape, generator=generator)).to(stored)
    experts = [{"layer.weight": (base.double() + update.dense()).to(stored)} for update in updates]
    merged = covmerge.merge(
        {"layer.weight": base},
        experts,
        method=name,
        dtype=computed,
        out_dtype="float64",
        **params,
    )
    return merged.tensors["layer.weight"] - base.double()


# How an update is factorised decides where TIES cuts in Core Space, and a folded one does not say.
SAME_FOLDED = [
    (n, p)
    for n, p in VARIANTS
    if registry.get(n).data == "none" and (n != "core_space" or p.get("inner") != "ties")
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "params"), SAME_FOLDED, ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=str)
@pytest.mark.parametrize("computed", ["float32", "float64"])
def test_an_adapter_folded_into_float32_weights_merges_as_its_factors_do(
    name, params, shape, computed
):
    updates = adapters(shape)
    expected = covmerge.merge_layer(updates, name, **params).dense()
    found = folded(updates, torch.float32, computed, name, params)
    entries = params.get("inner", "ties" if name in ("knots", "ctm") else "") == "ties"
    assert relative(found, expected) < (2e-2 if entries else 2e-3)


# Of unlike norms bfloat16 keeps 8 bits of the largest: Iso-CTS divides the weak directions of the sum
# among tasks, and says of which it cannot know ("dependent").
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "norms"),
    [
        *((name, (0.5, 2.0, 8.0)) for name in ("ace", "actmat", "wudi", "aswudi", "swudi")),
        *((name, (0.5, 2.0, 8.0)) for name in ("iso_c", "tsv_m", "dc_merge")),
        *((name, (0.5, 2.0, 8.0)) for name in ("core_space", "cart", "ctm")),
        *((name, (2.0, 2.5, 3.0)) for name in ("ace", "iso_cts", "knots")),
    ],
)
@pytest.mark.parametrize("computed", ["float32", "float64"])
def test_bfloat16_weights(name, norms, computed):
    updates = adapters(WIDE, norms=norms, seed=4)
    expected = covmerge.merge_layer(updates, name).dense()
    found = folded(updates, torch.bfloat16, computed, name, {})
    assert relative(found, expected) < 0.1


@pytest.mark.parametrize(("decay", "unsure"), [(0, False), (4, True)])
def test_iso_cts_says_where_rounding_turns_its_task_directions(decay, unsure):
    sizes = torch.arange(1, 9, dtype=torch.float64) ** -decay
    updates = [LowRank(u.left * sizes, u.right) for u in adapters(WIDE, rank=8, norms=(1, 2, 3))]
    base = 0.05 * torch.randn(WIDE, generator=torch.Generator().manual_seed(7))
    experts = [{"layer.weight": (base.double() + u.dense()).float()} for u in updates]
    merged = covmerge.merge({"layer.weight": base}, experts, "iso_cts", out_dtype="float64")
    found = merged.tensors["layer.weight"] - base.double()
    off = relative(found, covmerge.merge_layer(updates, "iso_cts").dense())
    assert (off > 1e-3) == unsure
    said = advice(
        "Merge the adapters themselves if you have them, or by iso_c, which has no task directions"
    )
    assert any(re.search(said, note) for note in merged.notes) == unsure
    merged = covmerge.merge({"layer.weight": base}, experts, "iso_c", out_dtype="float64")
    found = merged.tensors["layer.weight"] - base.double()
    assert relative(found, covmerge.merge_layer(updates, "iso_c").dense()) < 1e-3
    assert not any(re.search(said, note) for note in merged.notes)


FOLDS = {  # an adapter in the dtype of its base, as PEFT merges it
    "float32": ((256, 256), torch.float32, torch.float32),
    "float32 held in float64": ((96, 128), torch.float32, torch.float64),
    "bfloat16": ((256, 256), torch.bfloat16, torch.bfloat16),
    "bfloat16 held in float32": ((96, 128), torch.bfloat16, torch.float32),
    "float64": ((96, 128), torch.float64, torch.float64),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("fold", "name"),
    [
        *((fold, name) for fold in FOLDS for name in ("core_space", "iso_c", "tsv_m")),
        # Entries decide there, which eight bits leave open.
        *(("float32", name) for name in ("dc_merge", "knots")),
    ],
)
@pytest.mark.parametrize("computed", ["float32", "float64"])
@pytest.mark.parametrize("ratio", [0.1, 0.8, 5.0])
def test_the_rounding_of_a_fold_is_no_direction(name, fold, computed, ratio):
    """W = fl(W_0 + fl(BA)), ‖BA‖ up to 5 ‖W_0‖, against the merge of B and A in float64."""
    shape, arithmetic, held = FOLDS[fold]
    generator = torch.Generator().manual_seed(0)
    base = (0.02 * torch.randn(shape, generator=generator)).to(arithmetic)
    factors, experts = list[LowRank](), list[dict[str, torch.Tensor]]()
    for _ in range(3):
        left, right = (torch.randn(n, 16, generator=generator) for n in shape)
        root = (ratio * float(base.double().norm() / (left @ right.mT).norm())) ** 0.5
        left, right = (root * left).to(arithmetic), (root * right.mT).to(arithmetic)
        factors.append(LowRank(left.double(), right.double()))
        experts.append({"layer.weight": (base + left @ right).to(held)})
    merged = covmerge.merge(
        {"layer.weight": base.to(held)},
        experts,
        name,
        dtype=computed,
        out_dtype="float64",
        allow=["not-a-fine-tune"],
    )
    found = merged.tensors["layer.weight"].double() - base.double()
    expected = covmerge.merge_layer(factors, name).dense()
    assert relative(found, expected) < (4e-2 if "bfloat16" in fold else 2e-5)


def test_a_fine_tune_in_float32_keeps_its_small_directions_in_float64():
    """σ_i from 1 to 1e-5 is above all rounding; each direction counts as much in Iso-C."""
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(96, 128, generator=generator)
    left, _, right = torch.linalg.svd(
        torch.randn(96, 128, generator=generator).double(), full_matrices=False
    )
    update = left * torch.logspace(0, -5, 96, dtype=torch.float64) @ right
    expert = (base.double() + update).float()
    models = [{"layer.weight": weights} for weights in (base, expert, expert)]
    merged = covmerge.merge(
        models[0],
        models[1:],
        "iso_c",
        dtype="float64",
        out_dtype="float64",
        allow=["not-a-fine-tune"],
    )
    found = merged.tensors["layer.weight"] - base.double()
    assert relative(found, covmerge.merge_layer([update, update], "iso_c")) < 2e-2


def stored_group(method, shape, rank, spread, stored, computed, alike):
    """A layer of experts whose weights were rounded to a dtype, of which the group knows."""
    generator = torch.Generator().manual_seed(7)
    base = (0.05 * torch.randn(shape, generator=generator)).to(stored)
    updates = [4.0 * update for update in random_updates(*shape, 3, rank, spread, seed=1)]
    updates = {
        "unlike": updates,
        "two are one": [updates[0], updates[0], updates[2]],
        "one unchanged": [*updates[:2], torch.zeros_like(updates[2])],
    }[alike]
    moved = [(base.double() + update).to(stored) for update in updates]
    deltas = [expert.to(computed) - base.to(computed) for expert in moved]
    rounding = rounding_of(deltas, [stored] * 3, base.to(computed))
    return group_of(method, deltas, [1.0, 1.5, 2.0], rounding=rounding)


OF_MATRICES = [
    (n, p)
    for n, p in REFERENCED
    if not registry.get(n).takes_any_shape and p.get("solver") != "adam"
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "params"), OF_MATRICES, ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("spread", "alike"),
    [
        *((spread, ["unlike"]) for spread in (1.0, 1000.0)),
        (30.0, ["unlike", "two are one", "one unchanged"]),
    ],
    ids=["1", "1000", "30"],
)
def test_kernel_and_reference_agree_on_where_rounding_begins(name, params, stored, spread, alike):
    method = registry.get(name)
    for rank in (4, 24):
        for how in alike:
            group = stored_group(method, (48, 64), rank, spread, stored, torch.float64, how)
            merged = method(group, **method.resolve(params)).delta
            assert relative(merged, REFERENCES[name](group, **params)) < 1e-6, (rank, how)


# What float32 leaves open no reference implementation decides: Iso-CTS' weak directions of unlike experts.
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "params"), [(n, p) for n, p in OF_MATRICES if n != "iso_cts"], ids=str
)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_kernels_in_float32_agree_with_references_on_it_too(name, params, spread):
    method = registry.get(name)
    for rank in (4, 24):
        group = stored_group(
            method, (48, 64), rank, spread, torch.bfloat16, torch.float32, "unlike"
        )
        merged = method(group, **method.resolve(params)).delta
        assert relative(merged, REFERENCES[name](group, **params)) < 2e-3, rank


def drawn(shape, seed, decay=0.0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(shape, generator=generator)
    left, sigma, right = torch.linalg.svd(draw, full_matrices=False)
    return (left * sigma * torch.arange(1, len(sigma) + 1) ** -decay) @ right


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["actmat", "wudi", "tsv_m", "core_space", "knots", "iso_c"])
@pytest.mark.parametrize("size", [3e-5, 4e-5, 5e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_full_fine_tunes_in_bfloat16_lose_nothing_to_the_edge(name, size, decay):
    """Their spectra go on below what rounding can give: it tells no direction from another there."""
    base = (0.02 * drawn((128, 96), 0)).to(torch.bfloat16)
    step = drawn((128, 96), 1, decay)
    expert = (base.float() + size * step / step.square().mean().sqrt()).to(torch.bfloat16)
    update = expert.double() - base.double()
    models = [{"layer.weight": weights} for weights in (base, expert, expert)]
    merged = covmerge.merge(models[0], models[1:], name, out_dtype="float64")
    found = merged.tensors["layer.weight"] - base.double()
    exact = covmerge.merge_layer([update, update], name)
    assert relative(found, exact) < 2e-2


@pytest.mark.parametrize("faint", [0.1, 0.02])
def test_iso_cts_keeps_the_directions_of_a_small_expert(faint):
    updates = adapters(WIDE, norms=(faint, 3.0, 3.0))
    expected = covmerge.merge_layer(updates, "iso_cts").dense()
    found = folded(updates, torch.float32, "float32", "iso_cts", {})
    assert relative(found, expected) < 0.1


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv_m", "core_space", "actmat", "wudi"])
def test_updates_that_are_stored_in_bfloat16(name):
    updates = adapters(WIDE, norms=(2.0, 2.5, 3.0), seed=4)
    expected = covmerge.merge_layer(updates, name).dense()
    rounded = [update.dense().to(torch.bfloat16) for update in updates]
    assert relative(covmerge.merge_layer(rounded, name), expected) < 2e-2


class TestAce:
    @pytest.mark.parametrize("norm", [0.1, 1.0, 7.0, 20.0])
    @pytest.mark.parametrize("shape", [(300, 200), (200, 300)], ids=str)
    def test_low_rank_in_float32_is_float64(self, shape, norm):
        """ε is at the rounding of ‖Δ‖² in float32 here."""
        updates = adapters(shape, rank=8, norms=(norm, 1.02 * norm, 0.98 * norm))
        ace = registry.get("ace")
        group = LinearGroup(tuple(u.dense().float() for u in updates), (1.0,) * 3)
        merged = ace(group, **ace.resolve({"normalize": False}))
        exact = covmerge.merge_layer(updates, "ace", normalize=False).dense()
        assert relative(merged.delta, exact) < 2e-3

    def test_threads_change_nothing(self):
        updates = [update.dense().float() for update in adapters(WIDE)]
        before = torch.get_num_threads()
        merged = []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                merged.append(covmerge.merge_layer(updates, "ace"))
        finally:
            torch.set_num_threads(before)
        assert relative(merged[0], merged[1].double()) < 1e-4

    def test_refines_no_more_directions_than_the_updates_have(self):
        updates = [update.dense().float() for update in adapters(WIDE, rank=2)]
        ace = registry.get("ace")
        merged = ace(LinearGroup(tuple(updates), (1.0,) * 3), **ace.resolve({}))
        assert merged.stats["gate_fired"]
        assert merged.stats["k"] == 6

    def test_who_has_directions_enough_is_asked_alone(self, monkeypatch: pytest.MonkeyPatch):
        """All updates of a wide layer together are an eigenproblem of d_in: four fifths of a merge."""
        steep = (1.0 + torch.arange(192.0)) ** -1.5
        updates = [0.1**t * update * steep for t, update in enumerate(torch.randn(3, 48, 192))]
        asked: list[int] = []

        def known(*given: Any) -> int:
            asked.append(known_rank(*given))
            return asked[-1]

        def never(*_: object, **__: object):
            raise AssertionError("asked of all together")

        known_rank = ace_kernel.known_rank
        monkeypatch.setattr("covmerge.maths.methods.ace.known_rank", known)
        monkeypatch.setattr(ace_kernel, "joint_directions", never)
        ace = registry.get("ace")
        merged = ace(LinearGroup(tuple(updates), (1.0,) * 3), **ace.resolve({}))
        assert merged.stats["gate_fired"]
        assert asked == [merged.stats["k"]] == [14]

    @pytest.mark.parametrize("ranks", [(2, 2, 2), (40, 2, 2), (2, 40, 2), (40, 40, 40)])
    @pytest.mark.parametrize("enough", [1, 6, 14, 48])
    def test_what_is_known_of_the_rank_is_what_all_have_together(self, ranks, enough):
        generator = torch.Generator().manual_seed(0)
        updates = [
            torch.randn(48, rank, generator=generator) @ torch.randn(rank, 192, generator=generator)
            for rank in ranks
        ]
        active = active_experts(LinearGroup(tuple(updates), (1.0,) * 3))
        found = ace_kernel.known_rank(active, (48, 192), torch.float32, enough)
        together = min(192, sum(ranks))
        assert min(found, enough) == min(together, enough)

    @pytest.mark.parametrize("normalize", [True, False])
    def test_one_output_row_is_averaged(self, normalize):
        """Its centred update is zero: ACE would lose the row, or divide by nothing."""
        updates = [torch.randn(1, 768) * scale for scale in (0.005, 0.01, 0.03)]
        merged = covmerge.merge_layer(updates, "ace", normalize=normalize)
        assert relative(merged, sum(updates).double() / 3) < 1e-6

    @pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 5e-3])
    def test_rows_that_are_nearly_alike_are_not_lost(self, noise):
        generator = torch.Generator().manual_seed(0)
        updates = [
            0.1 * torch.randn(1, 96, generator=generator).expand(64, 96)
            + noise * torch.randn(64, 96, generator=generator)
            for _ in range(3)
        ]
        merged = covmerge.merge_layer(updates, "ace")
        assert relative(merged, sum(updates).double() / 3) < 1e-6

    def test_rows_that_are_all_alike_are_averaged_beside_the_others(self):
        generator = torch.Generator().manual_seed(0)
        usual = [torch.randn(24, 40, generator=generator) for _ in range(2)]
        alike = torch.randn(1, 40, generator=generator).expand(24, 40).contiguous()
        ace = registry.get("ace")
        merged = ace(LinearGroup((*usual, alike), (1.0,) * 3), **ace.resolve({}))
        assert merged.stats["averaged"] == 1
        without = ace(LinearGroup(tuple(usual), (1.0,) * 2), **ace.resolve({}))
        assert relative(merged.delta, without.delta.double() + alike.double() / 3) < 1e-6

    def test_an_expert_that_hardly_moved_does_not_outweigh_the_others(self):
        generator = torch.Generator().manual_seed(0)
        strong = torch.randn(96, 128, generator=generator)
        strong *= 6.4 / strong.norm()
        faint = torch.zeros(96, 128)
        faint[3, 4] = 1e-6
        merged = covmerge.merge_layer([strong, faint], "ace")
        alone = covmerge.merge_layer([strong], "ace")
        assert relative(merged, alone.double()) < 1e-6

    @pytest.mark.parametrize("normalize", [True, False])
    def test_the_reference_averages_them_too(self, normalize):
        generator = torch.Generator().manual_seed(3)
        usual = [torch.randn(12, 20, generator=generator, dtype=torch.float64) for _ in range(2)]
        alike = torch.randn(1, 20, generator=generator, dtype=torch.float64).expand(12, 20)
        faint = 1e-6 * torch.randn(12, 20, generator=generator, dtype=torch.float64)
        group = LinearGroup((*usual, alike.contiguous(), faint), (1.0, 2.0, 0.5, 1.5))
        ace = registry.get("ace")
        merged = ace(group, **ace.resolve({"normalize": normalize}))
        assert merged.stats["averaged"] == (2 if normalize else 1)
        assert relative(merged.delta, REFERENCES["ace"](group, normalize=normalize)) < 1e-8


# What remains of updates that cancel. By two experts, or what is left of them, a flat spectrum is a sum's.
OF_SUMS = [
    ("iso_c", {}),
    ("iso_cts", {}),
    *((name, {"inner": "iso_c"}) for name in ("core_space", "ctm", "knots")),
]


def opposed(shared, own, shape=WIDE):
    """D + E and −D + E in float64, and E, with ‖D‖ and ‖E‖ beside weights of norm 1."""
    each = (
        adapters(shape, rank=8, norms=(shared or 1.0,)),
        adapters(shape, norms=(own or 1.0,), seed=2),
    )
    d, e = (found[0].dense() * bool(norm) for found, norm in zip(each, (shared, own), strict=True))
    return [d + e, e - d], e


def flat_of(update):
    """σ̄UVᵀ of an update of rank 4, float64."""
    left, sigma, right = torch.linalg.svd(update, full_matrices=False)
    return sigma[:4].mean() * left[:, :4] @ right[:4]


def stored_in(updates, dtype):
    """Updates of weights of norm 1 that were stored in a dtype, and what a group knows of that."""
    base = torch.randn(updates[0].shape, generator=torch.Generator().manual_seed(7))
    base = (base / base.norm()).to(dtype)
    moved = [(base.double() + update).to(dtype).float() - base.float() for update in updates]
    count = len(moved)
    rounding = rounding_of(moved, [dtype] * count, base.float())
    return LinearGroup(tuple(moved), (1.0,) * count, rounding=rounding)


@pytest.mark.parametrize(("name", "params"), OF_SUMS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "shared", "own", "tolerance"),
    [
        # Of float64 the rounding of D is what W_0 would be, so that no file's rounding is known.
        (torch.float64, 5.0, 1e-2, 1e-9),
        (torch.float64, 5.0, 1e-5, 1e-7),
        (torch.float32, 5.0, 1e-2, 1e-4),
        (torch.float32, 0.3, 1e-4, 1e-3),
        (torch.bfloat16, 0.3, 0.05, 5e-2),
    ],
    ids=str,
)
def test_a_flat_spectrum_raises_no_rounding_of_experts_that_nearly_cancel(
    name, params, dtype, shared, own, tolerance
):
    updates, e = opposed(shared, own)
    given = LinearGroup(tuple(updates), (1.0, 1.0))
    group = given if dtype == torch.float64 else stored_in(updates, dtype)
    found = registry.get(name)(group, **params).delta.double()
    if name == "iso_cts":  # has directions of tasks too; the sum's rank is 4
        assert registry.get(name)(group).stats["rank"] == 4
        expected = REFERENCES[name](given)
        tolerance *= 4
    else:
        expected = flat_of(2 * e)
    assert relative(found, expected) < tolerance


# By regressions rounding is about as long as it is in the weights, beside ‖D‖.
REGRESSIONS = {
    (name, eps): {"eps": eps} if eps else {}
    for name, eps in [("ace", 1e-5), ("ace", 1e-2), ("actmat", 0), ("wudi", 0), ("auto", 0)]
}
HALVES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("case", "params"), REGRESSIONS.items(), ids=str)
def test_a_regression_makes_no_more_of_rounding_than_it_is(case, params, dtype):
    """Where experts disagree or cancel, σ₁(D)²/ε times as much as rounding: 1.5 for 0, by ACE."""
    updates, _ = opposed(0.3, 0.0)
    found = registry.get(case[0])(stored_in(updates, dtype), **params).delta
    assert found.norm() < 0.3 * HALVES[dtype]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("case", "params"), REGRESSIONS.items(), ids=str)
def test_adapters_of_one_row_space_folded_into_half_precision_merge_as_themselves(
    case, params, dtype
):
    """All have one A, as LoRA-FA trains them; what is beyond its rows is only rounding."""
    shape, generator = (96, 64), torch.Generator().manual_seed(0)
    rows = torch.randn(4, shape[1], generator=generator, dtype=torch.float64)
    updates = [torch.randn(shape[0], 4, generator=generator).double() @ rows for _ in range(3)]
    updates = [0.3 * update / update.norm() for update in updates]
    expected = REFERENCES[case[0]](LinearGroup(tuple(updates), (1.0,) * 3), **params)
    found = registry.get(case[0])(stored_in(updates, dtype), **params).delta
    assert relative(found, expected) < HALVES[dtype]


@pytest.mark.parametrize(("name", "params"), OF_SUMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [0.3, 0.0], ids=["cancel", "zeros"])
def test_the_rounding_of_experts_that_cancel_is_no_merge(name, params, dtype, shared):
    updates, _ = opposed(shared, 0.0)
    group = LinearGroup(tuple(updates), (1.0, 1.0))
    if dtype != torch.float64:
        group = stored_in(updates, dtype)
    assert not registry.get(name)(group, **params).delta.any()


def weak_in_one_row_space(weak):
    """Three updates of one A of six rows, of which three are weak: norm 0.3 each, float64."""
    shape, generator = (96, 64), torch.Generator().manual_seed(0)
    rows = torch.randn(6, shape[1], generator=generator, dtype=torch.float64)
    strengths = torch.tensor([1.0, 1.0, 1.0, weak, weak, weak], dtype=torch.float64)
    updates = [
        torch.randn(shape[0], 6, generator=generator).double() * strengths @ rows for _ in range(3)
    ]
    return [0.3 * update / update.norm() for update in updates]


def test_ace_says_where_rounding_hides_directions_and_float32_keeps_them():
    updates = weak_in_one_row_space(1e-3)
    expected = REFERENCES["ace"](LinearGroup(tuple(updates), (1.0,) * 3))
    half, single = (
        registry.get("ace")(stored_in(updates, dtype)) for dtype in (torch.bfloat16, torch.float32)
    )
    experts, facts = ("a", "b", "c"), (half.diagnostics,)
    (note,) = summarise([TensorDiagnostics("fc", {"eps": 1e-5}, experts, facts)]).notes
    assert "1 tensor (fc) without the directions of the inputs" in note
    assert "experts saved in float32 keep it" in note
    assert relative(half.delta, expected) > 0.1 and relative(single.delta, expected) < 1e-4


def test_no_direction_of_updates_without_rounding_is_left_out():
    for updates in (weak_in_one_row_space(1e-3), opposed(5.0, 1e-3)[0]):
        group = LinearGroup(tuple(updates), (1.0,) * len(updates))
        assert registry.get("ace")(group).diagnostics.below_rounding == 0
