"""`{search: ...}` in a recipe: what may be marked, how it is read, and who refuses it."""

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

import covmerge
from covmerge.base.errors import RecipeError
from covmerge.plan.recipe import json_schema
from covmerge.plan.recipe.search import Template
from tests.advised import advice

PLAIN = {"base": "b", "experts": {"a": "a", "c": "c"}, "method": "ties"}


def marked(**more):
    return {**PLAIN, **more}


def read(**more):
    return {mark.name: mark for mark in Template.of(marked(**more)).marks}


def test_places_and_kinds():
    found = read(
        experts={"a": {"source": "a", "weight": {"by_depth": [0, {"search": [0, 1.5]}]}}, "c": "c"},
        method={"search": ["ties", "cart"]},
        parameters={"density": {"search": [0.1, 1, "log"]}, "rank_ratio": {"search": [0.1, 0.3]}},
        rules=[
            {
                "match": "*",
                "method": "consensus",
                "parameters": {"k": {"search": [1, 3]}},
            }
        ],
        before=[{"pact": {"core": {"search": [0.1, 0.2, 0.4]}}}],
    )
    weight = found["experts.a.weight.by_depth[1]"]
    assert 0 < weight.low < 1e-5 and weight.high == 1.5  # 0 would leave the expert out
    assert next(iter(found)) == "method" and found["method"].choices == ("ties", "cart")
    assert found["parameters.density"].log and not found["parameters.density"].whole
    assert found["rules[0].parameters.k"].whole
    assert found["before[0].pact.core"].choices == (0.1, 0.2, 0.4)


def test_a_method_gets_its_own_parameters():
    template = Template.of(
        marked(
            method={"search": ["ties", "iso_c"]},
            parameters={"density": {"search": [0.1, 1]}, "scale": 0.5},
        )
    )
    density = next(mark for mark in template.marks if mark.name == "parameters.density")
    assert not template.applies(density, {"method": "iso_c"})
    assert template.applies(density, {"method": "ties"})
    assert template.recipe({"method": "iso_c"}).parameters == {"scale": 0.5}
    chosen = {"method": "ties", "parameters.density": 0.25}
    assert template.recipe(chosen).parameters == {"density": 0.25, "scale": 0.5}
    untuned = template.untuned()
    assert (untuned.method, untuned.parameters) == ("", {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"base": {"search": ["a", "b"]}}, "base cannot be searched: weights, parameters"),
        ({"dtype": {"search": ["float32", "float64"]}}, "dtype cannot be searched"),
        ({"method": {"search": ["ties"]}}, "method: search is"),
        ({"method": {"search": ["ties", 1]}}, "method: search is"),
        (
            {"method": {"search": [1, 2]}},
            advice("search is {}: write names of methods, two at least"),
        ),
        ({"method": {"search": ["ties", "tiess"]}}, "method: there is no method 'tiess'"),
        ({"parameters": {"density": {"search": [1, 0.1]}}}, "is not below the second"),
        ({"parameters": {"density": {"search": [0, 1, "log"]}}}, "of numbers above 0"),
        ({"parameters": {"density": {"search": 0.5}}}, "parameters.density: search is 0.5"),
        ({"parameters": {"density": {"search": [0.1, 0.1, 0.2]}}}, "stands there twice"),
        ({"parameters": {"dens": {"search": [0, 1]}}}, advice("no parameter '{}': remove it")),
        (
            {"parameters": {"density": {"search": [0, 1], "log": True}}},
            advice("`search` stands alone: remove {}"),
        ),
        ({}, advice("no value is marked, so there is nothing to search: write {search")),
    ],
    ids=str,
)
def test_wrong_marks(wrong, words):
    with pytest.raises(RecipeError, match=words):
        template = Template.of(marked(**wrong))
        for mark in template.marks:
            for end in mark.ends:
                template.recipe(
                    {own.name: own.ends[0] for own in template.marks} | {mark.name: end}
                )


def test_a_merge_refuses_marks(tmp_path):
    recipe = marked(parameters={"density": {"search": [0.1, 1]}})
    with pytest.raises(
        RecipeError,
        match=advice(
            "is marked by `search`, and only `covmerge search` chooses such values: call it in place of "
            "this, or write one value"
        ),
    ):
        covmerge.parse_recipe(recipe)
    (tmp_path / "r.yml").write_text("base: b\nexperts: {a: a}\nmethod: {search: [ties, tsv_m]}\n")
    with pytest.raises(RecipeError, match=r"r.yml:3: method is marked"):
        covmerge.load_recipe(tmp_path / "r.yml")
    # An expert may be called so.
    assert "search" in covmerge.parse_recipe({"base": "b", "experts": {"search": "s"}}).experts


def test_editors_know_marks():
    recipe = marked(
        experts={"a": {"source": "a", "weight": {"search": [0, 1.5]}}},
        method={"search": ["ties", "tsv_m"]},
        rules=[{"role": "head", "method": {"search": ["ties", "tsv_m"]}}],
    )
    jsonschema.Draft202012Validator(json_schema()).validate(recipe)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(
            {**recipe, "method": {"serch": [1]}}
        )


EVOLVED = {
    # By mergekit 0.1.5, `ModelGenome.genotype_merge_config`.
    "smooth": {
        "models": [
            {"model": "a", "parameters": {"weight": [0.25, 0.5], "density": [0.3125, 0.5625]}},
            {"model": "b", "parameters": {"weight": [0.375, 0.625], "density": [0.4375, 0.6875]}},
            {"model": "base"},
        ]
    },
    "filters": {
        "slices": [
            {
                "sources": [
                    {
                        "model": model,
                        "layer_range": layers,
                        "parameters": {
                            name: [{"filter": "self_attn", "value": one}, {"value": other}]
                            for name, (one, other) in values.items()
                        },
                    }
                    for model, values in models.items()
                ]
                + [{"model": "base", "layer_range": layers}]
            }
            for layers, models in (
                (
                    [0, 2],
                    {
                        "a": {"weight": (0.25, 0.3125), "density": (0.28125, 0.34375)},
                        "b": {"weight": (0.375, 0.4375), "density": (0.40625, 0.46875)},
                    },
                ),
                (
                    [2, 4],
                    {
                        "a": {"weight": (0.5, 0.5625), "density": (0.53125, 0.59375)},
                        "b": {"weight": (0.625, 0.6875), "density": (0.65625, 0.71875)},
                    },
                ),
            )
        ]
    },
}
REST = {
    "merge_method": "ties",
    "base_model": "base",
    "dtype": "bfloat16",
    "parameters": {"normalize": True, "int8_mask": True},
}


@pytest.mark.parametrize("form", ["smooth", "filters"])
def test_a_genome_is_the_recipes_that_mergekit_makes_of_it(tmp_path, monkeypatch, form):
    """Values from 1/4 on, in steps of 1/(2n), in the order of mergekit's genotype."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"num_hidden_layers": 4}')
    save_file({"x": torch.zeros(1)}, tmp_path / "a" / "model.safetensors")
    genome = {"models": ["a", "b"], "merge_method": "ties", "base_model": "base"}
    more = {"smooth": True} if form == "smooth" else {"filters": ["self_attn"]}
    template = Template.of(
        {"genome": {**genome, "layer_granularity": 2, **more}, "tasks": ["x"], "limit": 3}
    )
    expected = {**EVOLVED[form], **REST}
    chosen = {mark.name: _at(expected, mark.place) for mark in template.marks}
    assert template.filled(chosen) == expected
    assert len(set(chosen.values())) == (8 if form == "smooth" else 16)
    with pytest.raises(RecipeError, match=advice("{} layers are not groups of {}: give a divisor")):
        Template.of({"genome": {**genome, "layer_granularity": 3}})
    assert template.notes == (
        "recipe: tasks, limit say what mergekit scores; here the scorer does",
    )


def _at(data, place):
    for key in place:
        data = data[key]
    return data


@pytest.mark.parametrize(
    ("genome", "words"),
    [
        (
            {"merge_method": "slerp"},
            advice("no search has such a choice: write a recipe with `merge_method: slerp`"),
        ),
        ({"merge_method": "sce"}, "'sce' is none of linear, task_arithmetic, ties, dare_ties"),
        ({"smoth": True}, "unknown key 'smoth'. Did you mean 'smooth'"),
        ({"layer_granularity": "two"}, "layer_granularity"),
        ({"models": []}, "`models` is a list of models"),
    ],
    ids=str,
)
def test_a_genome_without_an_answer(genome, words):
    given = {"models": ["a", "b"], "merge_method": "ties", "base_model": "base"}
    with pytest.raises(RecipeError, match=words):
        Template.of({"genome": {**given, **genome}})


def test_marks_in_a_recipe_of_mergekits():
    """What the message on slerp advises."""
    theirs = {
        "merge_method": "slerp",
        "base_model": "a",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"t": {"search": [0, 1]}},
    }
    template = Template.of(theirs)
    (mark,) = template.marks
    assert (mark.name, mark.ends) == ("parameters.t", (0.0, 1.0))
    recipe = template.recipe({"parameters.t": 0.25})
    assert recipe == covmerge.parse_recipe({**theirs, "parameters": {"t": 0.25}})
    with pytest.raises(RecipeError, match="t"):
        covmerge.parse_recipe(theirs)
