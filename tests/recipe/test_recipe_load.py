import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covmerge.base.types import Role
from covmerge.errors import RecipeError
from covmerge.plan.recipe import Expert, Recipe, Rule, dump_recipe, load_recipe, parse_recipe

START = "base: org/base\nexperts: {a: org/a}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yml"
    path.write_text(text, encoding="utf-8")
    return path


def message(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text))
    return str(caught.value).replace(f"{folder}/", "")


def test_every_key_arrives() -> None:
    recipe = load_recipe(Path(__file__).parent / "examples" / "every_key.yml")
    assert recipe.experts == {
        "code": Expert(source="org/code"),
        "math": Expert(
            source="org/math@main",
            weight=0.5,
            statistics=str(Path(__file__).parent / "examples" / "math.covstats.safetensors"),
        ),
    }
    assert recipe.parameters == {"eps": 1e-5, "tau": 0.3}
    assert recipe.tensors.model_dump() == {
        "embeddings": "auto",
        "output_head": "base",
        "convolutions": "method",
        "fused": "split",
        "conv1d": "stored",
        "missing": "present",
        "extra": "ignore",
        "vocabulary": "base",
        "few_rows": "allow",
    }
    assert recipe.rules == (
        Rule(match="*.mlp.*", method="actmat", parameters={"rtol": 1e-6}),
        Rule(role=Role.NORM, use="base"),
        Rule(match="classifier.*", role=Role.LINEAR, use="head"),
    )
    assert (recipe.dtype, recipe.output.dtype) == ("float64", "bfloat16")
    assert recipe.output.shard_size == 512 * 2**20


def test_defaults() -> None:
    recipe = parse_recipe({"base": "b", "experts": {"a": "x"}})
    assert dump_recipe(recipe) == {
        "base": "b",
        "experts": {"a": {"source": "x", "weight": 1.0, "statistics": None}},
        "parameters": {},
        "tensors": {
            "embeddings": "auto",
            "output_head": "auto",
            "convolutions": "auto",
            "fused": "whole",
            "conv1d": "oriented",
            "missing": "error",
            "extra": "error",
            "vocabulary": "error",
            "few_rows": "error",
        },
        "rules": [],
        "dtype": "float32",
        "allow": [],
        "output": {
            "names": None,
            "format": "model",
            "rank": None,
            "whole": False,
            "dtype": "base",
            "shard_size": 5_000_000_000,
            "quantise": "none",
            "keep": [],
        },
    }


def test_experts_keep_their_order(tmp_path: Path) -> None:
    names = ["zeta", "no", "alpha", "1st", "mid.v2"]
    lines = "".join(f"  {name}: org/{name}\n" for name in names)
    recipe = load_recipe(write(tmp_path, f"base: org/base\nexperts:\n{lines}"))
    assert list(recipe.experts) == list(dump_recipe(recipe)["experts"]) == names


names = st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,8}", fullmatch=True)
sources = st.text(string.ascii_letters + "/.@-", min_size=1)
parameters = st.dictionaries(
    st.text(max_size=5),
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.lists(st.integers()),
    max_size=3,
)
conditions = st.fixed_dictionaries(
    {"match": st.text(min_size=1)}, optional={"role": st.sampled_from(Role)}
)
effects = st.fixed_dictionaries({"method": names, "parameters": parameters}) | (
    st.fixed_dictionaries({"use": st.sampled_from(["method", "average", "base", "head"])})
)
recipes = st.builds(
    Recipe,
    base=sources,
    experts=st.dictionaries(
        names, st.builds(Expert, source=sources, weight=st.floats(1e-9, 1e9)), min_size=1
    ),
    parameters=parameters,
    rules=st.lists(st.builds(dict[str, Any].__or__, conditions, effects), max_size=3),
)


@given(recipes)
def test_a_dumped_recipe_is_plain_json_and_the_same_recipe(recipe: Recipe) -> None:
    dumped = dump_recipe(recipe)
    read = json.loads(json.dumps(dumped, allow_nan=False))
    assert read == dumped == dump_recipe(recipe)
    assert parse_recipe(read) == recipe


# Each line: what stands in the file after the first two lines, and the message it must give.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\n\nparamters: {}",
            "r.yml:5: unknown key 'paramters' in the recipe. Did you mean 'parameters'?",
        ),
        (
            "tensors:\n  fusd: whole",
            "r.yml:4: unknown key 'fusd' in tensors. Did you mean 'fused'?",
        ),
        (
            "output: {zzz: 1}",
            "r.yml:3: unknown key 'zzz' in output. Known: dtype, format, keep, names, quantise, rank, "
            "shard_size, whole.",
        ),
        (
            "rules:\n  - {role: norm, use: base}\n  - {mtch: x, use: base}",
            "r.yml:5: unknown key 'mtch' in rules[1]. Did you mean 'match'?",
        ),
        ("method:", "r.yml:3: method is empty; it must be text"),
        ("method: 5", "r.yml:3: method is 5; it must be text"),
        ("method: ''", "r.yml:3: method is ''; it must be text that is not empty"),
        ("dtype: half", "r.yml:3: dtype is 'half'; it must be 'float32' or 'float64'"),
        (
            "dtype: bfloat16",
            "r.yml:3: dtype is 'bfloat16'; it must be 'float32' or 'float64', which is computed in; to "
            'store another pass out_dtype="bfloat16"',
        ),
        (
            "tensors: {fused: halves}",
            "r.yml:3: tensors.fused is 'halves'; it must be 'whole' or 'split'",
        ),
        (
            "output: 5GB",
            "r.yml:3: output is '5GB'; it must be a mapping with the keys format, names, rank, whole, "
            "dtype, shard_size, quantise, keep",
        ),
        (
            "output:\n  shard_size: 5Gb",
            "r.yml:4: output.shard_size: '5Gb' has the unknown unit 'Gb'; "
            "known: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, kB",
        ),
        ("parameters: [1]", "r.yml:3: parameters is [1]; it must be a mapping"),
        (
            "parameters: {a: {b: [1, .nan]}}",
            "r.yml:3: parameters: a.b[1] is NaN; numbers must be finite",
        ),
        ("rules: {role: norm}", 'r.yml:3: rules is {"role": "norm"}; it must be a list'),
        (
            "rules:\n  - norm",
            "r.yml:4: rules[0] is 'norm'; it must be a mapping with the keys match, role, method, "
            "parameters, before, after, use",
        ),
        (
            "rules:\n  - {role: nrm, use: base}",
            "r.yml:4: rules[0].role is 'nrm'; it must be 'linear', 'conv1d', 'conv', 'embedding', "
            "'output', 'expert_stack', 'norm', 'bias', 'buffer', 'head' or 'other'",
        ),
        (
            "rules:\n  - {role: norm, use: keep}",
            "r.yml:4: rules[0].use is 'keep'; it must be 'method', 'average', 'base' or 'head'",
        ),
        (
            "rules:\n  - {use: base}",
            "r.yml:4: rules[0]: the rule has no condition; add 'match' or 'role'",
        ),
        (
            "rules:\n  - {role: norm}",
            "r.yml:4: rules[0]: the rule has no effect; add 'method' or 'use'",
        ),
        (
            "rules:\n  - {role: norm, use: base, method: ties}",
            "r.yml:4: rules[0]: the rule has two effects; remove 'method' or 'use'",
        ),
        (
            "rules:\n  - {role: norm, use: base, parameters: {a: 1}}",
            "r.yml:4: rules[0]: 'parameters' belong to a 'method', and the rule has none",
        ),
        ("base: org/other", "r.yml:3: the key 'base' is already given in line 1"),
    ],
)
def test_problems_name_line_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert message(tmp_path, START + text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" {}", "2: experts is {}; it must be a mapping with at least one entry, name: source"),
        ("", "2: experts is empty; it must be a mapping"),
        (" [x]", '2: experts is ["x"]; it must be a mapping'),
        (
            "\n  a:",
            "3: experts.a is empty; it must be a path, org/name@revision or a mapping with the "
            "keys source, weight, statistics",
        ),
        (
            "\n  a: {weight: 2}",
            "3: experts.a lacks the key 'source'. Path of a checkpoint (relative to the recipe "
            "file), its address (s3, gs, https) or org/name@revision.",
        ),
        (
            "\n  a: {source: x, wieght: 2}",
            "3: unknown key 'wieght' in experts.a. Did you mean 'weight'?",
        ),
        (
            "\n  v1.0: {source: x, weight: 0}",
            "3: experts['v1.0'].weight is 0; it must be greater than 0",
        ),
        (
            "\n  a: {source: x, weight: .inf}",
            "3: experts.a.weight is Infinity; it must be a finite number",
        ),
        (
            "\n  a: {source: x, weight: '1'}",
            "3: experts.a.weight is '1'; it must be a valid number",
        ),
        (
            "\n  a: {source: x, weight: true}",
            "3: experts.a.weight is true; it must be a valid number",
        ),
        (
            "\n  a: ' x'",
            "3: experts.a.source: ' x' has spaces around it or control characters in it",
        ),
        (
            "\n  ok: x\n  ../a: x",
            "4: experts['../a']: '../a' cannot name an expert; use up to 100 letters, digits, "
            "'.', '_' or '-', and no '.' at the start",
        ),
        (
            "\n  Code: x\n  code: y",
            "2: experts: 'Code' and 'code' differ only in case; rename one of them",
        ),
    ],
)
def test_problems_of_experts(tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, f"base: org/base\nexperts:{text}") == f"r.yml:{expected}"


def test_all_problems_are_told_at_once_from_the_top(tmp_path: Path) -> None:
    text = "metod: ties\nexperts: {}\ndtype: half\ntensors:\n  x: 1\n"
    lines = message(tmp_path, text).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "r.yml:",
        "r.yml:1:",
        "r.yml:2:",
        "r.yml:3:",
        "r.yml:5:",
    ]
    assert lines[0].startswith("r.yml: the recipe lacks the key 'base'. The model that every")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "r.yml: is empty; a recipe is a mapping with the keys base, experts, method"),
        ("- a", "r.yml: holds a list; a recipe is a mapping with the keys base, experts"),
        ("\x85" * 1_000_000, "r.yml: larger than 1048576 bytes"),
    ],
)
def test_what_is_not_a_recipe(tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, text).startswith(expected)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.yml: the recipe cannot be read: No such file"):
        load_recipe(tmp_path / "none.yml")
    with pytest.raises(RecipeError, match="the recipe cannot be read: Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin1.yml").write_bytes("base: caf\xe9".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"latin1\.yml: not UTF-8 text \(byte 9\)"):
        load_recipe(tmp_path / "latin1.yml")


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "\ufeff" + START)).base == "org/base"


@pytest.mark.parametrize("key", ["merge_method", "models", "base_model"])
def test_a_mergekit_recipe_is_recognised(tmp_path: Path, key: str) -> None:
    text = message(tmp_path, f"{key}: x\ndtype: bfloat16\nparameters: {{normalize: true}}")
    assert "merge_method is" in text
    assert "it is one of mergekit's" in text


def test_keys_of_a_mapping_must_be_text() -> None:
    data: dict[Any, Any] = {"base": "b", "experts": {"a": "x"}, "tensors": {1: 2}, 3: 4}
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, origin="here")
    assert str(caught.value).splitlines() == [
        "here: the key 1 in tensors is not text",
        "here: the key 3 in the recipe is not text",
    ]


def test_parameters_must_be_what_json_can_hold() -> None:
    data = {"base": "b", "experts": {"a": "x"}, "parameters": {"mask": {"of": Path("x")}}}
    with pytest.raises(RecipeError, match=r"recipe: parameters: mask\.of is of type PosixPath"):
        parse_recipe(data)


class TestSources:
    """Relative paths are relative to the recipe, hub ids stay."""

    def located(self, folder: Path, source: str) -> str:
        recipe = load_recipe(write(folder, f"base: {source}\nexperts: {{a: {source}}}"))
        assert recipe.base == recipe.experts["a"].source
        return recipe.base

    @pytest.mark.parametrize("source", ["code", "./code", "org/code", "code/model.safetensors"])
    def test_a_path_that_exists_beside_the_recipe(self, tmp_path: Path, source: str) -> None:
        (tmp_path / source).mkdir(parents=True)
        assert self.located(tmp_path, source) == str(tmp_path / source)

    @pytest.mark.parametrize("source", ["org/code", "org/code@main", "o-1/c.v2@refs/pr/1"])
    def test_a_hub_id_stays(self, tmp_path: Path, source: str) -> None:
        assert self.located(tmp_path, source) == source

    @pytest.mark.parametrize("source", ["./org/code", "../code", "code", "a/b/c", ".cache/code"])
    def test_a_missing_path_is_still_beside_the_recipe(self, tmp_path: Path, source: str) -> None:
        assert self.located(tmp_path, source) == str(tmp_path / source)

    def test_an_absolute_path_stays(self, tmp_path: Path) -> None:
        assert self.located(tmp_path, "/models/code") == "/models/code"

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        assert self.located(tmp_path, "~/code") == "/home/someone/code"

    def test_a_name_too_long_for_a_file(self, tmp_path: Path) -> None:
        source = "org/" + "x" * 300
        assert self.located(tmp_path, source) == source

    def test_a_recipe_by_a_relative_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "recipes").mkdir()
        write(tmp_path / "recipes", "base: ../base\nexperts: {a: code, b: ./org/code}")
        monkeypatch.chdir(tmp_path)
        recipe = load_recipe("recipes/r.yml")
        assert recipe.base == "./recipes/../base"
        assert [expert.source for expert in recipe.experts.values()] == [
            "./recipes/code",
            "./recipes/org/code",
        ]
        monkeypatch.chdir(tmp_path / "recipes")
        # Without the "./" this would be taken for a model on the Hub.
        assert load_recipe("r.yml").experts["b"].source == "./org/code"

    def test_a_folder_of_the_working_directory_is_never_picked_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "recipes").mkdir()
        (tmp_path / "org" / "a").mkdir(parents=True)
        write(tmp_path / "recipes", START)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RecipeError) as caught:
            load_recipe("recipes/r.yml")
        assert str(caught.value) == (
            "recipes/r.yml:2: experts.a: 'org/a' exists in the working directory but not beside "
            "the recipe; write a path relative to recipes, or add a revision (org/name@main) if "
            "the model on the Hub is meant"
        )


def test_of_many_problems_the_first_are_told(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_text("base: b\nexperts: {a: x}\n" + "".join(f"k{i}: 1\n" for i in range(3000)))
    with pytest.raises(RecipeError, match=r"2950 more problems") as raised:
        load_recipe(path)
    assert len(str(raised.value).splitlines()) == 51
