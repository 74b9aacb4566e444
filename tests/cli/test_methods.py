import json
from pathlib import Path

import pytest

from covmerge.methods import registry
from covmerge.steps import registry as steps
from tests.cli.runs import covmerge, flags, statistics_for, words, write_recipe


def test_list():
    ran = covmerge("methods")
    for method in registry:
        assert method.name in ran.stdout
        if method.reference is not None:  # covmerge's own has none
            assert f"arXiv:{method.reference.arxiv}" in ran.stdout
    for name in registry.absent:
        assert name in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", registry.names())
def test_page(name):
    method = registry.get(name)
    text = words(covmerge("methods", name).stdout)
    assert method.summary in text
    assert words(method.equation) in text
    if method.reference is not None:
        assert words(method.reference.title) in text
        assert f"arXiv:{method.reference.arxiv}" in text
    assert words(method.laws.replicas_text) in text
    assert "departs from it" in text
    for parameter in method.parameters:
        assert parameter.name in text
    for family in method.family_defaults:
        assert f"{family}: " in text


@pytest.mark.parametrize("name", registry.names())
def test_page_as_json(name):
    method = registry.get(name)
    page = covmerge("methods", name, "--json").json
    assert page["equation"] == method.equation
    assert page["takes_any_shape"] == method.takes_any_shape
    assert page["departs"]
    for given, parameter in zip(page["parameters"], method.parameters, strict=True):
        assert (given["name"], given["default"]) == (parameter.name, parameter.default)
        assert given["description"] == parameter.description
        assert given["allowed"]
    for family, defaults in method.family_defaults.items():
        for key, value in defaults.items():
            shown = next(p for p in page["parameters"] if p["name"] == key)
            assert shown["family_defaults"][family] == value


def test_list_as_json():
    pages = covmerge("methods", "--json").json
    assert [page["name"] for page in pages] == list(registry.names())
    assert pages[0] == covmerge("methods", pages[0]["name"], "--json").json


@pytest.mark.parametrize("name", registry.names())
def test_the_examples_run(name, models):
    page = covmerge("methods", name, "--json").json
    options = page["command"].split()[page["command"].split().index("--method") : -1]
    files = [f"--stats={expert}={file}" for expert, file in statistics_for(name, models).items()]
    experts = ("a", "b")[: registry.get(name).experts[1]]
    covmerge("merge", *flags(models, experts), *files, *options, models / "by_flags")
    recipe = write_recipe(models, page["recipe"], experts)
    ran = covmerge("merge", recipe, *files, models / "by_recipe", "--json")
    assert ran.json["verification"]["ok"]
    results = [
        (models / folder / "model.safetensors").read_bytes() for folder in ("by_flags", "by_recipe")
    ]
    assert results[0] == results[1]


def test_the_pages_in_docs_are_current():
    file = Path(__file__).parent.parent.parent / "docs" / "methods.md"
    assert covmerge("methods", "--markdown").stdout == file.read_text("utf-8"), (
        "run: covmerge methods --markdown > docs/methods.md"
    )


@pytest.mark.parametrize("name", registry.absent)
def test_a_method_that_is_not_here_says_what_is_missing(name):
    ran = covmerge("methods", name, code=2)
    assert ran.stderr.startswith(f"error: method '{name}' is not available: ")


def test_unknown_method():
    ran = covmerge("methods", "acee", code=2)
    assert ran.stderr == "error: there is no method 'acee'. Did you mean 'ace'?\n"
    assert ran.stdout == ""


def test_schema():
    from covmerge.plan.recipe import json_schema

    assert covmerge("schema").stdout == json.dumps(json_schema(), indent=2) + "\n"


@pytest.mark.parametrize("name", steps.names())
def test_page_of_a_step(name):
    step = steps.get(name)
    text = words(covmerge("methods", name).stdout)
    assert step.summary in text
    assert words(step.equation) in text
    for parameter in step.parameters:
        assert parameter.name in text
    if step.reference is not None:
        assert words(step.reference.title) in text
        assert f"arXiv:{step.reference.arxiv}" in text
    assert ("departs from it" in text) == ("Departs from the paper:" in step.kernel.__doc__)
