"""A choice on the page is a recipe, and that recipe is the choice."""

import pytest

from covmerge.errors import RecipeError
from covmerge.front.viewer import Choice, Group, choice_of, recipe_of
from covmerge.plan.recipe import parse_recipe
from tests.advised import advice

SOURCES = {"": "/m/base", "a": "/m/a", "b": "/m/b", "merged": "/m/out"}


def recipe(**given):
    return parse_recipe({"base": "./base", "experts": {"a": "./a", "b": "./b"}, **given})


def chosen(method="task_arithmetic", a=1.0, b=1.0, **given):
    return Choice(method=method, weights={"a": a, "b": b}, **given)


def group(*patterns, a=1.0, b=1.0, scale=1.0):
    return Group(patterns=patterns, weights={"a": a, "b": b}, scale=scale)


@pytest.mark.parametrize(
    "choice",
    [
        chosen("average"),
        chosen("average", a=0.25, b=3.0),
        chosen(scale=0.3),
        chosen(scale=0.0),
        chosen(groups=(group("*.mlp.*", a=0.0, b=0.0),)),
        chosen(scale=0.5, groups=(group("*.mlp.*", "h.0.*", a=2.0), group("*", scale=0.1))),
        chosen(groups=(group("*.mlp.*", a=2.0, b=1.5), group("*.up.*", scale=2.0))),
    ],
)
def test_there_and_back(choice):
    found = recipe_of(choice, recipe(), SOURCES)
    assert found.base == "/m/base"
    assert {name: own.source for name, own in found.experts.items()} == {"a": "/m/a", "b": "/m/b"}
    again = choice_of(found)
    if any("*" in own.patterns for own in choice.groups):
        # What matches every name is what is said of all.
        assert (again.scale, len(again.groups)) == (0.1, 1)
        return
    assert again == choice


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ace"},
        {"method": "average", "after": ["rescale"]},
        {"method": "average", "rules": [{"match": "*", "method": "ties"}]},
        {"method": "task_arithmetic", "rules": [{"match": "*", "use": "average"}]},
        {"method": "task_arithmetic", "parameters": {"scale": {"by_depth": [0.1, 0.2]}}},
    ],
)
def test_other_recipes_are_no_choice(given):
    assert choice_of(recipe(**given)) is None


def test_by_name_of_different_patterns_is_no_choice():
    def value(match):
        return {"by_name": [{"match": match, "value": 0.5}, {"value": 1.0}]}

    experts = {name: {"source": name, "weight": value(f"*.{name}.*")} for name in ("a", "b")}
    assert choice_of(recipe(method="average", experts=experts)) is None


def test_what_is_left_to_the_base_stays_and_other_methods_go():
    rules = [
        {"match": "*.up.*", "method": "ties", "parameters": {"density": 0.5}},
        {"match": "*.up.*", "use": "base"},
        {"role": "norm", "use": "base"},
    ]
    given = recipe(
        method="ace",
        rules=rules,
        before=["pico"],
        tensors={"missing": "present", "embeddings": "base"},
        output={"dtype": "bfloat16"},
    )
    found = recipe_of(chosen("average"), given, SOURCES)
    assert [(rule.match, rule.use, rule.method) for rule in found.rules] == [
        ("*.up.*", "method", None),
        ("*.up.*", "base", None),
        (None, "base", None),
    ]
    assert (found.before, found.parameters) == ((), {})
    assert found.tensors.missing == "base"
    assert found.tensors.embeddings == "base"
    assert found.output.dtype == "bfloat16"


def test_experts_without_a_weight_are_left_out_and_a_merged_model_may_take_part():
    weights = {"a": 0.0, "b": 0.5, "merged": 1.0}
    choice = Choice(method="task_arithmetic", weights=weights, scale=0.8)
    found = recipe_of(choice, recipe(method="ace"), SOURCES)
    assert {n: (e.source, e.weight) for n, e in found.experts.items()} == {
        "b": ("/m/b", 0.5),
        "merged": ("/m/out", 1.0),
    }
    assert found.parameters == {"scale": 0.8}


def test_no_weight_at_all_is_refused():
    said = advice("all weights are 0: that is the base; give one expert a weight")
    with pytest.raises(RecipeError, match=said):
        recipe_of(chosen(a=0.0, b=0.0), recipe(), SOURCES)
    assert [*recipe_of(chosen(a=0.0, b=1.0), recipe(), SOURCES).experts]


@pytest.mark.parametrize("name", ["", "c"])
def test_a_weight_of_nobody_is_refused(name):
    with pytest.raises(RecipeError, match="no expert"):
        recipe_of(Choice(method="average", weights={name: 1.0}), recipe(), SOURCES)
