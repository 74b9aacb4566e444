import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from covmerge.base.types import Role
from covmerge.errors import RecipeError
from covmerge.plan.recipe import Rule, dump_recipe, json_schema, load_recipe, parse_recipe
from covmerge.plan.recipe.strict_yaml import parse_yaml

EXAMPLES = sorted((Path(__file__).parent / "examples").iterdir())


def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def test_the_shipped_schema_is_current() -> None:
    shipped = resources.files("covmerge.plan.recipe").joinpath("schema.json").read_text("utf-8")
    assert shipped == json.dumps(json_schema(), indent=2) + "\n", (
        "run: covmerge schema > src/covmerge/plan/recipe/schema.json"
    )


def test_the_schema_is_a_schema_that_needs_no_web_host() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].startswith("urn:")
    dialect = schema.pop("$schema")
    assert dialect == "https://json-schema.org/draft/2020-12/schema"
    assert "://" not in json.dumps(schema)


def test_every_key_is_described() -> None:
    schema = json_schema()
    for model in (schema, *schema["$defs"].values()):
        assert model["description"]
        for key, field in model.get("properties", {}).items():
            assert field.get("description"), key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_fit_the_schema_and_the_models(path: Path) -> None:
    validator().validate(parse_yaml(path.read_text("utf-8"), path.name)[0])
    dumped = dump_recipe(load_recipe(path))
    validator().validate(dumped)
    assert parse_recipe(dumped) == load_recipe(path)


@pytest.mark.parametrize(
    "change",
    [
        {"paramters": {}},
        {"experts": {}},
        {"experts": {".hidden": "x"}},
        {"experts": {"a/b": "x"}},
        {"experts": {"a": ""}},
        {"experts": {"a": {"weight": 1}}},
        {"experts": {"a": {"source": "x", "weight": 0}}},
        {"experts": {"a": {"source": "x", "weight": "1"}}},
        {"method": ""},
        {"tensors": {"fused": "halves"}},
        {"rules": [{"use": "base"}]},
        {"rules": [{"role": "norm"}]},
        {"rules": [{"role": "norm", "use": "base", "method": "ties"}]},
        {"rules": [{"role": "norm", "use": "base", "parameters": {"a": 1}}]},
        {"rules": [{"role": "normal", "use": "base"}]},
        {"dtype": "bfloat16"},
        {"output": {"shard_size": 0}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_models_refuse(change: dict[str, Any]) -> None:
    data = {"base": "b", "experts": {"a": "x"}} | change
    assert not validator().is_valid(data)
    with pytest.raises(RecipeError):
        parse_recipe(data)


def test_a_run_stands_in_place_of_experts() -> None:
    run = {"folder": "outputs", "last": 5, "weights": "ema", "decay": 0.8}
    assert validator().is_valid({"run": run, "method": "linear"})
    assert validator().is_valid({"run": {"folder": "outputs"}, "base": "b"})
    assert not validator().is_valid({"run": run, "experts": {"a": "x"}})
    assert not validator().is_valid({"run": run, "base": "b", "experts": {"a": "x"}})
    assert not validator().is_valid({"run": {**run, "decay": 1.0}})
    assert not validator().is_valid({"base": "b"})


@pytest.mark.parametrize(
    ("rule", "name", "role", "applies"),
    [
        ({"match": "*.mlp.*"}, "h.0.mlp.c_fc.weight", Role.CONV1D, True),
        ({"match": "mlp"}, "h.0.mlp.c_fc.weight", Role.CONV1D, False),
        ({"match": "H.*"}, "h.0.mlp.c_fc.weight", Role.CONV1D, False),
        ({"match": "h.[01].*"}, "h.1.ln", Role.NORM, True),
        ({"role": "norm"}, "h.1.ln", Role.NORM, True),
        ({"role": "norm"}, "h.1.ln", Role.BIAS, False),
        ({"role": "norm", "match": "h.*"}, "h.1.ln", Role.NORM, True),
        ({"role": "norm", "match": "x.*"}, "h.1.ln", Role.NORM, False),
        ({"role": "bias", "match": "h.*"}, "h.1.ln", Role.NORM, False),
    ],
)
def test_a_rule_applies_when_all_its_conditions_hold(
    rule: dict[str, Any], name: str, role: Role, applies: bool
) -> None:
    assert Rule(**rule, use="base").applies_to(name, role) is applies


def test_recipes_are_frozen() -> None:
    recipe = parse_recipe({"base": "b", "experts": {"a": "x"}})
    with pytest.raises(ValidationError, match="frozen"):
        recipe.method = "ties"  # type: ignore[misc]
