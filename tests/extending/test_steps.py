"""Steps around a method: what the whole needs, where they go, and where they are refused."""

from dataclasses import replace

import pytest
import torch

import covmerge
from covmerge.errors import RecipeError, TensorError
from covmerge.maths.testing.groups import random_updates, relative
from covmerge.methods import get
from covmerge.plan.planning.build import build_plans
from covmerge.plan.recipe import dump_recipe, parse_recipe
from covmerge.steps import resolve_steps, with_steps
from tests.advised import advice

pytestmark = pytest.mark.usefixtures("forget")

UPDATES = random_updates(12, 8, count=3, rank=8, spread=9.0, seed=0)
MEAN = sum(float(update.norm()) for update in UPDATES) / 3


def composed(method, before=(), after=()):
    return with_steps(get(method), resolve_steps(before, "before"), resolve_steps(after, "after"))


def register_matrix_step(name="whiten", **declared):
    @covmerge.register_step(name, when="before", **declared)
    def step(group):
        u = [torch.linalg.svd(update, full_matrices=False) for update in group.updates]
        return replace(group, updates=tuple(one.U @ one.Vh for one in u))


# What they do.


def test_rescale_gives_the_mean_norm():
    merged = covmerge.merge_layer(UPDATES, "average", after=["rescale"])
    assert float(merged.norm()) == pytest.approx(MEAN, rel=1e-12)
    double = covmerge.merge_layer(UPDATES, "average", after=[{"rescale": {"scale": 2.0}}])
    assert relative(double, 2 * merged) < 1e-12
    plain = covmerge.merge_layer(UPDATES, "average")
    assert torch.cosine_similarity(plain.flatten(), merged.flatten(), dim=0) > 1 - 1e-12


def test_an_expert_without_a_change_is_not_in_the_mean():
    zero = torch.zeros_like(UPDATES[0])
    merged = covmerge.merge_layer([*UPDATES, zero], "average", after=["rescale"])
    assert float(merged.norm()) == pytest.approx(MEAN, rel=1e-12)
    nothing = covmerge.merge_layer([zero, zero], "average", after=["rescale"])
    assert not nothing.any()


def test_what_cancels_is_not_enlarged():
    update = UPDATES[0].float()
    noise = update * (1 + 1e-6)
    merged = covmerge.merge_layer([update, -noise], "average", after=["rescale"])
    assert merged.norm() < 1e-5 * update.norm()


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_norm_balance(strength):
    (use,) = resolve_steps([{"norm_balance": {"strength": strength}}], "before")
    group = covmerge.LinearGroup(tuple(UPDATES), (1.0,) * 3)
    balanced = use.step.prepare(group, use.parameters).updates
    for before, after in zip(UPDATES, balanced, strict=True):
        size = float(before.norm())
        assert float(after.norm()) == pytest.approx(
            (1 - strength) * size + strength * MEAN, rel=1e-12
        )
        assert relative(after / after.norm(), before / before.norm()) < 1e-12


def test_they_run_in_order_and_those_after_see_the_experts_as_they_came():
    seen = []

    @covmerge.register_step("look", when="after", unit="element")
    def look(group, merged):
        seen.append([float(update.norm()) for update in group.updates])
        return merged

    @covmerge.register_step("double", when="after", unit="element")
    def double(group, merged):
        return 2 * merged.delta

    one = covmerge.merge_layer(
        UPDATES, "average", before=["norm_balance"], after=["look", "rescale", "double"]
    )
    other = covmerge.merge_layer(
        UPDATES, "average", before=["norm_balance"], after=["double", "rescale"]
    )
    assert relative(one, 2 * other) < 1e-12
    assert seen[0] == pytest.approx([float(update.norm()) for update in UPDATES])


# What the whole needs.


def test_the_unit_is_the_widest():
    register_matrix_step()
    assert composed("task_arithmetic").unit_for({}) == "element"
    assert composed("task_arithmetic", after=["rescale"]).unit_for({}) == "tensor"
    assert composed("task_arithmetic", before=["whiten"]).unit_for({}) == "matrix"
    assert composed("ace", after=["rescale"]).unit_for({}) == "matrix"
    assert not composed("task_arithmetic", before=["whiten"]).takes_any_shape


def test_the_sides_are_common_ones():
    for name, sides in [("left", "outputs"), ("right", "inputs"), ("neither", "none")]:
        register_matrix_step(name, factored=sides)
    knots, given = "knots", get("knots").resolve({})
    assert get(knots).sides_for(given) == "outputs"
    assert composed(knots, ["norm_balance"]).sides_for(given) == "outputs"
    assert composed(knots, ["left"], ["rescale"]).sides_for(given) == "outputs"
    assert composed(knots, ["right"]).sides_for(given) == "none"
    assert composed("average", ["left"], ["rescale"]).sides_for({}) == "outputs"
    assert composed("average", ["left", "right"]).sides_for({}) == "none"
    assert composed("average", ["neither"]).sides_for({}) == "none"


@pytest.mark.parametrize("method", ["average", "ace", "core_space", "knots", "tsv_m"])
def test_adapters_are_merged_on_their_factors(method):
    adapters = [
        covmerge.LowRank(*(torch.randn(s, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
                           for k, s in ((2 * t, (20, 3)), (2 * t + 1, (3, 16)))))
        for t in range(3)
    ]  # fmt: skip
    steps = {"before": ["norm_balance"], "after": ["rescale"]}
    thin = covmerge.merge_layer(adapters, method, **steps)
    assert isinstance(thin, covmerge.LowRank)
    mean = sum(float(one.dense().norm()) for one in adapters) / 3
    assert float(thin.dense().norm()) == pytest.approx(mean, rel=1e-8)
    if method != "core_space":  # its axes are those of the factors
        given = {"rank_rtol": 1e-6} if get(method).has("rank_rtol") else {}
        thin = covmerge.merge_layer(adapters, method, **steps, **given)
        full = covmerge.merge_layer([one.dense() for one in adapters], method, **steps, **given)
        assert relative(thin.dense(), full) < 1e-6


def test_a_step_that_knows_nothing_of_factors_takes_them_from_the_method():
    seen = []

    @covmerge.register("sees")
    def sees(group):
        seen.append((group.factors, group.shared))
        return group.updates[0].clone()

    register_matrix_step()
    group = covmerge.LinearGroup(
        (torch.eye(2),), (1.0,), factors=(covmerge.LowRank(torch.eye(2), torch.eye(2)),), shared={}
    )
    composed("sees", ["whiten"])(group)
    composed("sees", ["norm_balance"])(group)
    assert seen[0] == ((), None)
    assert len(seen[1][0]) == 1


def test_a_global_pass_sees_what_the_steps_made():
    base = {"a.weight": torch.zeros(40, 30), "b.weight": torch.zeros(40, 30)}
    generator = torch.Generator().manual_seed(0)
    experts = [
        {name: (t + 1) * (10.0 if name == "a.weight" else 1.0) * torch.randn(40, 30, generator=generator)
         for name in base}
        for t in range(2)
    ]  # fmt: skip
    # Each tensor is balanced by itself; balanced by hand beforehand gives the same threshold.
    norms = {name: [float(e[name].norm()) for e in experts] for name in base}
    by_hand = [
        {name: e[name] * (sum(norms[name]) / 2 / norms[name][t]) for name in base}
        for t, e in enumerate(experts)
    ]
    steps = covmerge.merge(base, experts, "ties", before=["norm_balance"]).tensors
    hand = covmerge.merge(base, by_hand, "ties").tensors
    for name in base:
        assert relative(steps[name], hand[name]) < 1e-5


def test_one_callable_promises_what_all_of_them_promise():
    register_matrix_step()
    laws = composed("average", ["norm_balance"], ["rescale"]).laws
    assert (laws.order_invariant, laws.scale_equivariant, laws.rotation_equivariant) == (True,) * 3
    unknown = composed("average", ["whiten"]).laws
    assert (unknown.order_invariant, unknown.scale_equivariant) == (None, None)
    assert composed("ties", after=["rescale"]).laws.rotation_equivariant is None


def test_costs_add_up():
    plain, both = (
        m.cost(64, 64, 4, 4) for m in (get("ace"), composed("ace", ["norm_balance"], ["rescale"]))
    )
    assert both.flops > plain.flops
    assert both.workspace >= plain.workspace + 4 * 64 * 64 * 4  # the updates as they came stay


# Where they go.


def toy():
    generator = torch.Generator().manual_seed(1)
    base = {
        "layers.0.mlp.up_proj.weight": torch.randn(8, 8, generator=generator),
        "layers.0.input_layernorm.weight": torch.ones(8),
        "embed_tokens.weight": torch.randn(16, 8, generator=generator),
    }
    experts = [
        {n: w + 0.1 * (t + 1) * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        for t in range(2)
    ]
    return base, experts


def rules_of(**recipe):
    base, experts = toy()
    done = covmerge.merge(base, experts, **recipe)
    return {name.split(".")[-2]: entry["rule"] for name, entry in done.stats["tensors"].items()}


def test_they_go_where_the_method_goes():
    register_matrix_step()
    steps = {"before": ["whiten"], "after": ["rescale"]}
    assert rules_of(method="ace", **steps) == {
        "up_proj": "whiten + ace + rescale",
        "input_layernorm": "average (norm)",
        "embed_tokens": "average (embeddings: auto)",
    }
    # What is no layer's matrix an elementwise method merges without the steps that need one.
    assert rules_of(method="task_arithmetic", **steps) == {
        "up_proj": "whiten + task_arithmetic + rescale",
        "input_layernorm": "task_arithmetic + rescale (norm)",
        "embed_tokens": "task_arithmetic + rescale (embeddings: auto)",
    }


def test_rules_have_steps_of_their_own():
    rule = {"match": "*up_proj*", "method": "average", "after": [{"rescale": {"scale": 3.0}}]}
    found = rules_of(method="task_arithmetic", before=["norm_balance"], rules=[rule])
    assert found["up_proj"] == "average + rescale (rule match *up_proj*)"
    assert found["embed_tokens"] == "norm_balance + task_arithmetic (embeddings: auto)"
    base, experts = toy()
    merged = covmerge.merge(base, experts, "ace", rules=[rule])
    sizes = merged.stats["tensors"]["layers.0.mlp.up_proj.weight"]
    assert sizes["merged_norm"] == pytest.approx(
        3 * sum(sizes["update_norm"].values()) / 2, rel=1e-5
    )


def test_a_merge_to_memory_says_so_and_a_recipe_comes_back_as_it_was():
    base, experts = toy()
    result = covmerge.merge(base, experts, "average", before=["norm_balance"], after=["rescale"])
    assert "steps before the method: norm_balance" in result.notes
    dumped = dump_recipe(result.recipe)
    assert dumped["before"] == [{"norm_balance": {}}]
    assert parse_recipe(dumped) == result.recipe
    plain = dump_recipe(covmerge.merge(base, experts, "average").recipe)
    assert "before" not in plain and "after" not in plain


def test_whole_tensors_are_read_where_a_step_needs_them(tmp_path):
    from safetensors.torch import save_file

    from covmerge.files.checkpoints.open import open_checkpoint

    base = {"fc.weight": torch.zeros(3000, 1000), "norm.weight": torch.ones(8)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({n: w + 1 for n, w in base.items()}, tmp_path / "a.safetensors")
    opened = [open_checkpoint(tmp_path / f"{name}.safetensors") for name in ("base", "a")]
    given = {"base": "b", "experts": {"a": "a"}, "method": "task_arithmetic"}
    items = {}
    for steps in ({}, {"after": ["rescale"]}):
        (plan,) = build_plans([parse_recipe({**given, **steps})], opened[0], {"a": opened[1]})
        items[bool(steps)] = [item for item in plan.items if item.tensor.name == "fc.weight"]
    for one in opened:
        one.close()
    assert len(items[False]) > 1
    assert len(items[True]) == 1 and items[True][0].at_once is None


# Where they are refused.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"after": ["rescal"]}, "there is no step 'rescal'. Did you mean 'rescale'"),
        ({"before": ["rescale"]}, "step 'rescale' is one after a method: name it under `after`"),
        ({"after": [{"rescale": {"scale": -1}}]}, "step 'rescale': scale = -1: .*greater than 0"),
        ({"after": [{"rescale": {"scales": 1}}]}, "step 'rescale' has no parameter 'scales'"),
        ({"after": [{"rescale": {}, "more": {}}]}, r"after\[0\]: .* is not a step: write its name"),
        ({"after": [3]}, r"after\[0\]: 3 is not a step"),
        ({"method": "emr", "after": ["rescale"]}, "method 'emr' makes a model per expert"),
        (
            {"rules": [{"match": "*", "use": "average", "after": ["rescale"]}]},
            "steps .* belong to a 'method', and the rule has none",
        ),
    ],
)
def test_what_a_recipe_may_not_say(given, says):
    base, experts = toy()
    with pytest.raises(RecipeError, match=says):
        covmerge.merge(base, experts, **{"method": "average", **given})


def test_data_of_stored_tensors_is_not_turned():
    register_matrix_step()
    with pytest.raises(
        RecipeError, match=r"method 'fisher' has data .* step 'whiten' needs oriented"
    ):
        composed("fisher", ["whiten"])
    assert composed("fisher", after=["rescale"]).unit_for({}) == "tensor"
    assert composed("regmean", ["whiten"]).unit_for({}) == "matrix"


FACTORED = advice("'{}' needs the base and is `factored`: the base has no basis of low rank; l")


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"when": "during"}, "when='during'; it is one of 'before', 'after'"),
        ({"when": "before", "unit": "layer"}, "unit='layer'; it is one of 'element', 'row'"),
        ({"when": "before", "factored": "left"}, "factored='left'; it is one of 'none', 'outputs'"),
        (
            {"when": "before", "laws": covmerge.Laws(replicas=lambda p, n: 1.0)},
            advice("step '{}': `replicas` is a law of methods; leave it out"),
        ),
        ({"when": "after"}, r"\(group, merged, \*, parameters\)"),
        ({"when": "before", "needs_base": True, "factored": "both"}, FACTORED),
    ],
)
def test_what_a_step_may_not_declare(declared, says):
    with pytest.raises(ValueError, match=says):
        covmerge.register_step("odd", **declared)(lambda group: group)
    with pytest.raises(ValueError, match="only methods are given random numbers"):
        covmerge.register_step("odd", when="before")(lambda group, *, seed=0: group)
    covmerge.register_step("odd", when="before", needs_base=True)(lambda group: group)
    covmerge.merge_layer(
        UPDATES, "average", before=["odd"], base=torch.eye(12, 8, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda group: group.updates, "step 'odd' must return the group"),
        (lambda group: replace(group, updates=group.updates[:1]), "with as many updates"),
        (
            lambda group: replace(group, updates=tuple(u[:1] for u in group.updates)),
            "must keep shape",
        ),
        (lambda group: group.times([float("inf")] * 3), "step 'odd' gives NaN or Inf"),
    ],
)
def test_a_step_that_gives_something_else(function, says):
    covmerge.register_step("odd", when="before")(function)
    with pytest.raises(TensorError, match=says):
        covmerge.merge_layer(UPDATES, "average", before=["odd"])


def test_a_step_that_overflows():
    covmerge.register_step("odd", when="before")(
        lambda group: group.times([1e30] * 3).times([1e30] * 3)
    )
    single = [update.float() for update in UPDATES]
    said = advice("sizes are too far apart for {}; compute in float64, or leave the step out")
    with pytest.raises(TensorError, match=said):
        covmerge.merge_layer(single, "average", before=["odd"])
    covmerge.merge_layer(UPDATES, "average", before=["odd"])
    covmerge.merge_layer(single, "average")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("name", covmerge.steps.names())
def test_of_nothing_it_makes_nothing(name, shape):
    step = covmerge.steps.get(name)
    empty = torch.zeros(shape)
    base = empty if step.needs_base else None
    merged = covmerge.merge_layer([empty, empty], "average", base=base, **{step.when: [name]})
    assert merged.shape == shape


@pytest.mark.parametrize("given", ["rescale", [None], [{"rescale": None}], [{}], [3]])
def test_what_is_no_list_of_steps(given):
    with pytest.raises(RecipeError, match=r"after: .* write "):
        covmerge.merge_layer([torch.eye(2)], "average", after=given)
