"""RegMean, RegMean++, LOT and Fisher merging: what data may look like."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.base.types import LinearGroup, Measured
from covmerge.errors import RecipeError, TensorError
from covmerge.methods import registry
from tests.methods.groups import group_of, random_updates, relative

DATA = ["auto_measured", "regmean", "lot", "ssr", "fisher"]
GRAM = ["auto_measured", "regmean", "lot", "ssr"]


def merge(name, group, **params):
    method = registry.get(name)
    return method(group, **method.resolve(params))


def group_for(name, updates, weights=None):
    return group_of(registry.get(name), updates, weights)


def with_rows(updates, rows, dead=()):
    """Gram matrices of a few rows of inputs, some of which are always zero."""
    generator = torch.Generator().manual_seed(3)
    measured = []
    for update in updates:
        inputs = torch.randn(rows, update.shape[1], generator=generator, dtype=torch.float64)
        inputs[:, list(dead)] = 0.0
        gram = (inputs.T @ inputs / rows).to(update)
        measured.append(Measured(gram, rows, float(gram.norm())))
    return LinearGroup(tuple(updates), (1.0,) * len(updates), expert_statistics=tuple(measured))


def with_measured(group, values):
    measured = [replace(m, value=v) for m, v in zip(group.expert_statistics, values, strict=True)]
    return replace(group, expert_statistics=tuple(measured))


def test_the_plan_knows_what_they_need():
    for name in GRAM:
        assert registry.get(name).data == "gram"
        assert registry.get(name).unit == "matrix"
    assert registry.get("fisher").data == "fisher"
    assert registry.get("fisher").unit == "element"


@pytest.mark.parametrize("name", DATA)
def test_without_data_the_next_step_is_named(name):
    message = f"'{name.replace('+', '.')}' needs the .* has 0 for 2: pass one for each update"
    with pytest.raises(RecipeError, match=message):
        covmerge.merge_layer([torch.ones(2, 3), torch.ones(2, 3)], name)


@pytest.mark.parametrize("name", DATA)
def test_data_for_some_experts_only(name):
    group = group_for(name, random_updates(4, 6, 3, 4, 1.0, 0))
    with pytest.raises(RecipeError, match="has 2 for 3"):
        merge(name, replace(group, expert_statistics=group.expert_statistics[:2]))


@pytest.mark.parametrize("name", DATA)
def test_data_of_another_shape(name):
    group = group_for(name, random_updates(4, 6, 3, 4, 1.0, 0))
    wrong = [group.expert_statistics[0].value, torch.ones(5, 5), group.expert_statistics[2].value]
    wanted = r"\[4, 6\] needs \[4, 6\]" if name == "fisher" else r"\[4, 6\] needs \[6, 6\]"
    with pytest.raises(TensorError, match=rf"expert 1 is \[5, 5\], its update {wanted}"):
        merge(name, with_measured(group, wrong))


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestDegenerateExperts:
    @pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
    def test_tiny_layers(self, name, dtype, shape):
        merged = merge(name, group_for(name, random_updates(*shape, 5, 1, 3.0, 1, dtype))).delta
        assert merged.shape == shape
        assert torch.isfinite(merged).all()

    def test_low_rank_updates(self, name, dtype):
        updates = random_updates(20, 16, 4, 2, 30.0, 2, dtype)
        merged = merge(name, group_for(name, updates)).delta
        assert torch.isfinite(merged).all()
        assert 0 < merged.norm() < max(update.norm() for update in updates)


class TestFewRows:
    """Three experts with 8 rows each in 40 dimensions: ΣG has rank 24."""

    updates = random_updates(24, 40, 3, 24, 1.0, 5)

    def test_published_form(self):
        """The literal weight form raises, or returns noise in place of W₀."""
        group = with_rows([update.float() for update in self.updates], 8)
        grams = [m.value for m in group.expert_statistics]
        base = torch.ones(24, 40)
        weighted = sum((base + d) @ g for d, g in zip(group.updates, grams, strict=True))
        try:
            literal = weighted @ torch.inverse(sum(grams)) - base
        except torch.linalg.LinAlgError:
            return
        assert (literal - merge("lot", group).delta).norm() > literal.norm() / 2

    def test_lot_leaves_unseen_inputs_alone(self):
        group = with_rows(self.updates, 8)
        merged = merge("lot", group)
        assert merged.stats["rank"] == 24
        unseen = torch.linalg.svd(sum(m.value for m in group.expert_statistics))[2][24:]
        assert (merged.delta @ unseen.T).norm() < 1e-9 * merged.delta.norm()

    def test_lot_in_float32(self):
        exact = merge("lot", with_rows(self.updates, 8)).delta
        single = merge("lot", with_rows([update.float() for update in self.updates], 8))
        assert single.stats["rank"] == 24
        assert relative(single.delta, exact) < 1e-4

    def test_shrinkage_makes_regmean_well_posed(self):
        merged = merge("regmean", with_rows([update.float() for update in self.updates], 8))
        assert merged.stats["jitter"] == 0.0
        assert merged.stats["rcond"] > 1e-3
        exact = merge("regmean", with_rows(self.updates, 8)).delta
        assert relative(merged.delta, exact) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_regmean_without_shrinkage_reports_its_jitter(self, dtype):
        group = with_rows([update.to(dtype) for update in self.updates], 8)
        merged = merge("regmean", group, off_diagonal=1.0)
        assert merged.stats["jitter"] > 0.0
        assert torch.isfinite(merged.delta).all()
        ridged = merge("regmean", group, off_diagonal=1.0, ridge=1e-3)
        assert ridged.stats["jitter"] == 0.0
        assert relative(ridged.delta, merge("lot", group).delta.double()) < 1e-2

    # SSR knows inputs by what A makes of them, and passes unseen ones on that look like others to it. To
    # `auto_measured` what changed there tells of inputs that the data lacks.
    @pytest.mark.parametrize(
        "name", [name for name in GRAM if name not in ("ssr", "auto_measured")]
    )
    def test_inputs_that_are_always_zero_keep_the_base(self, name):
        group = with_rows([update.float() for update in self.updates], 200, dead=(0, 7))
        merged = merge(name, group).delta
        assert merged[:, [0, 7]].abs().max() < 1e-12
        alive = [column for column in range(40) if column not in (0, 7)]
        assert merged[:, alive].abs().sum(0).min() > 0
        assert merged.norm() < 1.0


def test_no_data_at_all_of_a_layer():
    """An expert of a mixture that no token was sent to."""
    updates = random_updates(5, 6, 2, 5, 3.0, 1)
    group = with_measured(group_for("lot", updates), [torch.zeros(6, 6).double()] * 2)
    weighted = replace(group, weights=(3.0, 1.0))
    assert torch.allclose(merge("regmean", weighted).delta, (3 * updates[0] + updates[1]) / 4)
    assert not merge("lot", group).delta.any()


def test_an_expert_without_rows_leaves_the_others():
    updates = random_updates(5, 6, 3, 5, 3.0, 1)
    group = group_for("regmean", updates)
    group = with_measured(group, [m.value * (t < 2) for t, m in enumerate(group.expert_statistics)])
    two = LinearGroup(group.updates[:2], (1.0, 1.0), expert_statistics=group.expert_statistics[:2])
    for name in GRAM:
        assert torch.allclose(merge(name, group).delta, merge(name, two).delta)


class TestRegMean:
    group = group_for("regmean", random_updates(8, 12, 3, 8, 3.0, 2))

    def test_weight_form_of_the_published_code(self):
        base = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double()
        grams = [
            0.9 * m.value + 0.1 * torch.diag(m.value.diag()) for m in self.group.expert_statistics
        ]
        pairs = zip(self.group.updates, grams, strict=True)
        literal = (torch.inverse(sum(grams)) @ sum(g @ (base + d).T for d, g in pairs)).T
        assert torch.allclose(base + merge("regmean", self.group).delta, literal)

    def test_diagonal_is_an_average_per_input(self):
        merged = merge("regmean", self.group, off_diagonal=0.0).delta
        diagonals = torch.stack([m.value.diag() for m in self.group.expert_statistics])
        expected = sum(d * q for d, q in zip(self.group.updates, diagonals, strict=True))
        assert torch.allclose(merged, expected / diagonals.sum(0))

    @pytest.mark.parametrize("factor", [1e-6, 1e6])
    def test_the_ridge_does_not_know_the_scale_of_the_inputs(self, factor):
        scaled = with_measured(self.group, [m.value * factor for m in self.group.expert_statistics])
        expected = merge("regmean", self.group, ridge=0.1).delta
        assert torch.allclose(merge("regmean", scaled, ridge=0.1).delta, expected)

    def test_a_ridge_pulls_towards_the_base(self):
        norms = [merge("regmean", self.group, ridge=r).delta.norm() for r in (0.0, 0.1, 10.0)]
        assert norms[0] > norms[1] > 5 * norms[2] > 0

    def test_full_off_diagonal_turns_with_the_inputs(self):
        turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))[0]
        turn = turn.double()
        turned = LinearGroup(
            tuple(d @ turn.T for d in self.group.updates),
            self.group.weights,
            expert_statistics=tuple(
                replace(m, value=turn @ m.value @ turn.T) for m in self.group.expert_statistics
            ),
        )
        expected = merge("regmean", self.group, off_diagonal=1.0).delta @ turn.T
        assert relative(merge("regmean", turned, off_diagonal=1.0).delta, expected) < 1e-5

    def test_lot_is_regmean_without_shrinkage(self):
        regmean = merge("regmean", self.group, off_diagonal=1.0).delta
        assert torch.allclose(merge("lot", self.group).delta, regmean)

    @pytest.mark.parametrize("params", [{"off_diagonal": 1.1}, {"off_diagonal": -1.0}])
    def test_parameters_are_checked(self, params):
        with pytest.raises(RecipeError, match="off_diagonal"):
            registry.get("regmean").resolve(params)


class TestFisher:
    updates = random_updates(6, 5, 3, 5, 3.0, 2)

    def given(self, *values, totals=(1.0, 1.0, 1.0), weights=(1.0, 1.0, 1.0)):
        measured = tuple(
            Measured(torch.full((6, 5), value, dtype=torch.float64), 9, total)
            for value, total in zip(values, totals, strict=True)
        )
        return LinearGroup(tuple(self.updates), weights, expert_statistics=measured)

    def test_equal_information_is_the_average(self):
        merged = merge("fisher", self.given(0.3, 0.3, 0.3)).delta
        assert torch.allclose(merged, sum(self.updates) / 3)

    def test_no_information_is_the_average(self):
        zero = self.given(0.0, 0.0, 0.0)
        for how in ("max", "add"):
            merged = merge("fisher", zero, floor_how=how).delta
            assert torch.allclose(merged, sum(self.updates) / 3)

    def test_no_information_favours_the_first_where_asked(self):
        merged = merge("fisher", self.given(0.0, 0.0, 0.0), floor_on="first").delta
        assert torch.allclose(merged, self.updates[0])

    def test_normalisation_brings_experts_to_one_scale(self):
        loud = self.given(1.0, 100.0, 1.0, totals=(2.0, 200.0, 2.0))
        assert torch.allclose(merge("fisher", loud).delta, sum(self.updates) / 3)
        merged = merge("fisher", loud, normalize=False).delta
        assert relative(merged, self.updates[1]) < 0.1

    def test_information_that_is_zero_in_all_tensors(self):
        """Published: a division by zero."""
        dead = self.given(1.0, 0.0, 1.0, totals=(1.0, 0.0, 1.0))
        merged = merge("fisher", dead).delta
        assert relative(merged, (self.updates[0] + self.updates[2]) / 2) < 1e-5
        alone = merge("fisher", self.given(0.0, 0.0, 0.0, totals=(0.0, 0.0, 0.0))).delta
        assert torch.allclose(alone, sum(self.updates) / 3)

    def test_a_weight_is_a_coefficient(self):
        merged = merge("fisher", self.given(0.3, 0.3, 0.3, weights=(2.0, 1.0, 1.0))).delta
        expected = (2 * self.updates[0] + self.updates[1] + self.updates[2]) / 4
        assert torch.allclose(merged, expected)

    @pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)])
    def test_tensors_of_any_shape(self, shape):
        updates = [torch.rand(shape) for _ in range(2)]
        group = (
            group_for("fisher", updates)
            if shape
            else LinearGroup(
                tuple(updates),
                (1.0, 1.0),
                expert_statistics=(Measured(torch.tensor(0.5), 3, 1.0),) * 2,
            )
        )
        merged = merge("fisher", group).delta
        assert merged.shape == shape
        low, high = torch.minimum(*updates), torch.maximum(*updates)
        assert ((merged >= low - 1e-6) & (merged <= high + 1e-6)).all()

    def test_row_blocks_give_the_same_bytes(self):
        group = group_for("fisher", self.updates)
        whole = merge("fisher", group).delta
        blocks = []
        for rows in (slice(0, 2), slice(2, 6)):
            part = replace(group, updates=tuple(d[rows] for d in group.updates))
            part = with_measured(part, [m.value[rows] for m in group.expert_statistics])
            blocks.append(merge("fisher", part).delta)
        assert torch.equal(torch.cat(blocks), whole)

    @pytest.mark.parametrize("params", [{"floor": 0.0}, {"floor_how": "both"}])
    def test_parameters_are_checked(self, params):
        with pytest.raises(RecipeError, match="floor"):
            registry.get("fisher").resolve(params)
