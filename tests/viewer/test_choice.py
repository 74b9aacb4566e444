"""Which recipes are a choice of the page, and what of a recipe stays. tests/report has the page's own."""

import pytest

from covmerge.front.viewer.scene import choice_of, fixed_part
from covmerge.plan.recipe import parse_recipe


def recipe(**given):
    return parse_recipe({"base": "./base", "experts": {"a": "./a", "b": "./b"}, **given})


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
        parameters={"refine": False},
        rules=rules,
        before=["pico"],
        tensors={"missing": "present", "embeddings": "base"},
        output={"dtype": "bfloat16"},
    )
    fixed = fixed_part(given, "/m/base")
    assert not {"experts", "method", "parameters", "before"} & fixed.keys()
    found = recipe(**fixed, method="average")
    assert found.base == "/m/base"
    assert [(rule.match, rule.use, rule.method) for rule in found.rules] == [
        ("*.up.*", "method", None),
        ("*.up.*", "base", None),
        (None, "base", None),
    ]
    assert found.tensors.missing == "base"
    assert found.tensors.embeddings == "base"
    assert found.output.dtype == "bfloat16"
