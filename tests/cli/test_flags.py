from pathlib import Path

import pytest

from covmerge.errors import RecipeError
from covmerge.front.cli.flags import place_paths, read_recipe
from covmerge.plan.recipe import Expert

FILE = """\
base: org/base
experts: {code: org/code, math: {source: org/math, weight: 0.5}}
method: ace
parameters: {eps: 0.1, tau: 0.2}
tensors: {embeddings: base, fused: split}
rules: [{match: "*.mlp.*", method: actmat, parameters: {rtol: 1e-6}}, {role: norm, use: base}]
dtype: float64
output: {dtype: bfloat16, shard_size: 1GB}
"""
TWO = ("code=org/code", "math=org/math")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(FILE)
    return path


R, O = Path("r.yml"), Path("out")  # noqa: E741


@pytest.mark.parametrize(
    ("first", "second", "experts", "dry_run", "expected"),
    [
        (R, O, False, False, (R, O)),
        (R, O, False, True, (R, O)),
        (O, None, True, False, (None, O)),
        (O, None, True, True, (None, O)),
        (None, None, True, True, (None, None)),
        (R, None, False, True, (R, None)),
    ],
)
def test_places(first, second, experts, dry_run, expected):
    assert place_paths(first, second, experts=experts, dry_run=dry_run) == expected


@pytest.mark.parametrize(
    ("first", "second", "experts", "dry_run", "message"),
    [
        (R, O, True, False, "which of the two"),
        (None, None, True, False, "no output folder"),
        (R, None, False, False, r"covmerge merge r\.yml OUT"),
        (O, None, False, False, "no experts are given: pass --base"),
        (None, None, False, False, "no experts"),
        (None, None, False, True, "no experts"),
    ],
)
def test_places_refused(first, second, experts, dry_run, message):
    with pytest.raises(RecipeError, match=message):
        place_paths(first, second, experts=experts, dry_run=dry_run)


def test_flags_alone():
    recipe = read_recipe(
        None,
        dict(
            base="org/base@v1",
            experts=TWO,
            weights=("math=0.5",),
            method="actmat",
            parameters=("rtol=1e-5",),
            tensors=("embeddings=base", "missing=present"),
            dtype="float64",
            out_dtype="float16",
            shard_size="512MiB",
        ),
    )
    assert recipe.base == "org/base@v1"
    assert recipe.experts == {
        "code": Expert(source="org/code"),
        "math": Expert(source="org/math", weight=0.5),
    }
    assert (recipe.method, recipe.parameters) == ("actmat", {"rtol": 1e-5})
    assert (recipe.tensors.embeddings, recipe.tensors.missing) == ("base", "present")
    assert (recipe.dtype, recipe.output.dtype) == ("float64", "float16")
    assert recipe.output.shard_size == 512 * 2**20


def test_no_flag_changes_no_default():
    recipe = read_recipe(None, dict(base="org/base", experts=TWO))
    assert recipe == read_recipe(None, dict(base="org/base", experts=TWO, before=()))
    assert recipe.output.shard_size == 5_000_000_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3", 3),
        ("true", True),
        ("yes", "yes"),
        ("null", None),
        ("scale_free", "scale_free"),
        ("'1'", "1"),
        ("a=b", "a=b"),
    ],
)
def test_values_are_yaml_scalars(text, value):
    recipe = read_recipe(None, dict(base="org/base", experts=TWO, parameters=(f"key={text}",)))
    assert recipe.parameters == {"key": value}
    assert type(recipe.parameters["key"]) is type(value)


def test_a_file_without_flags_is_taken_as_it_is(file):
    from covmerge.plan.recipe import load_recipe

    assert read_recipe(file, {}) == load_recipe(file)


def test_flags_override_the_file(file, capsys):
    recipe = read_recipe(
        file,
        dict(
            base="other/base",
            weights=("code=2",),
            parameters=("eps=0.5",),
            tensors=("embeddings=average",),
            dtype="float32",
            out_dtype="base",
            shard_size="1MB",
        ),
    )
    assert recipe.base == "other/base"
    assert [expert.weight for expert in recipe.experts.values()] == [2.0, 0.5]
    assert recipe.parameters == {"eps": 0.5, "tau": 0.2}
    assert (recipe.tensors.embeddings, recipe.tensors.fused) == ("average", "split")
    assert (recipe.dtype, recipe.output.dtype) == ("float32", "base")
    assert recipe.output.shard_size == 1_000_000
    assert len(recipe.rules) == 2
    assert capsys.readouterr().err == ""


def test_another_method_drops_the_parameters_and_says_so(file, capsys):
    flags = dict(method="task_arithmetic", parameters=("scale=0.4",))
    recipe = read_recipe(file, flags)
    assert (recipe.method, recipe.parameters) == ("task_arithmetic", {"scale": 0.4})
    said = capsys.readouterr().err
    assert said.startswith("note: --method task_arithmetic drops ace's parameters")
    assert "eps, tau" in said


def test_the_same_method_keeps_the_parameters(file, capsys):
    recipe = read_recipe(file, dict(method="ace"))
    assert recipe.parameters == {"eps": 0.1, "tau": 0.2}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base": None}, "no base is given: pass --base"),
        ({"experts": ()}, "experts"),
        ({"experts": ("./code",)}, "--expert './code' is not NAME=VALUE, such as --expert code="),
        ({"experts": ("=./code",)}, "is not NAME=VALUE"),
        ({"experts": ("code=",)}, "is not NAME=VALUE"),
        ({"experts": ("a=x/y", "a=x/z")}, "--expert gives 'a' twice, 'x/y' and 'x/z'"),
        ({"experts": ("a/b=x/y",)}, "'a/b' cannot name an expert"),
        ({"experts": ("a=x/y", "A=x/z")}, "differ only in case"),
        ({"weights": ("cod=1",)}, "weights of 'cod': there is no such expert. Did you mean 'code'"),
        ({"weights": ("code=-1",)}, "command line: --weight code is -1; it must be greater"),
        ({"weights": ("code=heavy",)}, "--weight code is 'heavy'"),
        ({"weights": ("code=1", "code=2")}, "twice"),
        ({"parameters": ("eps",)}, "--set 'eps' is not NAME=VALUE, such as --set eps=1e-5"),
        ({"parameters": ("eps=1", "eps=2")}, "--set gives 'eps' twice"),
        ({"weights": ("code=-1",)}, "to subtract an expert pass .*generalized_task_arithmetic"),
        ({"parameters": ("eps=.nan",)}, "numbers must be finite"),
        ({"parameters": ("eps=!!python/name:os.system",)}, "tag .* is refused"),
        ({"tensors": ("embedings=base",)}, "unknown key 'embedings'.*Did you mean 'embeddings'"),
        ({"tensors": ("embeddings=none",)}, "--tensors embeddings is 'none'; it must be 'auto'"),
        ({"dtype": "float16"}, "--dtype is 'float16'; it must be 'float32' or 'float64'"),
        ({"out_dtype": "int8"}, "--out-dtype is 'int8'"),
        ({"shard_size": "5Gb"}, "unknown unit 'Gb'"),
    ],
)
def test_wrong_flags(given, message):
    flags = {"base": "org/base", "experts": TWO, **given}
    flags = {name: value for name, value in flags.items() if value is not None}
    with pytest.raises(RecipeError, match=message):
        read_recipe(None, flags)
