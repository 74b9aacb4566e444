import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covmerge.errors import RecipeError
from covmerge.plan.recipe.strict_yaml import parse_yaml


def value_of(text: str) -> Any:
    return parse_yaml(text, "r.yml")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("5e3", 5000.0),
        ("+1e3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("tRUE", "tRUE"),
        ("~", None),
        ("null", None),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("<<", "<<"),
        ("e5", "e5"),
        ("١", "١"),
        ("'1e-5'", "1e-5"),
        ('"true"', "true"),
        (r'"\ud83d\ude00"', "\N{GRINNING FACE}"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = value_of(f"key: {text}")["key"]
    assert read == value
    assert type(read) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(value_of(".nan"))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        # YAML ends a key after 1024 characters, and JSON may write six for one.
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=160), inner),
        max_leaves=8,
    )
)
def test_json_is_read_as_json_reads_it(value: object) -> None:
    assert value_of(json.dumps(value)) == value


def test_every_key_and_item_has_its_line() -> None:
    text = "a: 1\nb:\n  c: {d: 2,\n    e: 3}\n  f:\n    - x\n    - g: 4\n"
    origin = parse_yaml(text, "r.yml")[1]
    assert origin.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", "d"): 3,
        ("b", "c", "e"): 4,
        ("b", "f"): 5,
        ("b", "f", 0): 6,
        ("b", "f", 1): 7,
        ("b", "f", 1, "g"): 7,
    }
    assert origin.where(("b", "f", 1, "g")) == "r.yml:7"
    assert origin.where(("b", "f", 1, "unknown", 3)) == "r.yml:7"
    assert origin.where(("unknown",)) == "r.yml"


def test_an_alias_repeats_a_value() -> None:
    assert value_of("a: &p {x: [1]}\nb: *p\nc: *p") == {key: {"x": [1]} for key in "abc"}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "~"])
def test_an_empty_document_is_none(text: str) -> None:
    assert value_of(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "r.yml:3: the key 'a' is already given in line 1"),
        ("a: {b: 1, b: 2}", "r.yml:1: the key 'b' is already given in line 1"),
        ("a:\n  1: x", "r.yml:2: the key '1' is not text; put it in quotes"),
        ("true: x", "r.yml:1: the key 'true' is not text; put it in quotes"),
        ("? [a]\n: b", "r.yml:1: the key is not text"),
        ("a: 1\nb: !!python/object/apply:os.system [x]", "r.yml:2: the tag 'tag:yaml.org,2002:pyt"),
        ("a: !!str 5", "r.yml:1: the tag 'tag:yaml.org,2002:str' is refused"),
        ("!x a: 5", "r.yml:1: the tag '!x' is refused"),
        ("a: ! 5", "r.yml:1: the tag '!' is refused"),
        ("a: &a\n  - *a", "r.yml:2: the alias '*a' lies inside an anchored value"),
        ("a: &a 1\nb: &b [*a]", "r.yml:2: the alias '*a' lies inside an anchored value"),
        ("a: &a [&b 1]", "r.yml:1: the anchor '&b' lies inside an anchored value"),
        ("a: &a 1\nb:\n" + " - *a\n" * 17, "r.yml:19: more than 16 aliases"),
        ("match: *mlp", r"r.yml:1: the alias '*mlp' has no anchor before it; if it is a pattern"),
        ("match: *.mlp.*", "r.yml:1: not valid YAML: expected alphabetic or numeric character, "),
        ("match: *.mlp.*", "quote a pattern that starts with '*'"),
        ("a: 1\n---\nb: 2", "r.yml:2: a second document starts here"),
        ("a: b: c", "r.yml:1: not valid YAML: mapping values are not allowed here"),
        ("a: [1, 2", "r.yml:1: not valid YAML"),
        ("a:\n\t- b", "r.yml:2: not valid YAML: found character '\\t'"),
        (
            "a: 1\nb: 012",
            "r.yml:2: 012 is another number in YAML 1.1 than in 1.2: write it without",
        ),
        ("007: a", "r.yml:1: 007 is another number in YAML 1.1 than in 1.2"),
        ("a: 1e999", "r.yml:1: the number 1e999 is too large"),
        ("a: " + "9" * 5000, "r.yml:1: the number 99999"),
        (r'a: "\ud83d"', "r.yml:1: the text holds half of a surrogate pair"),
        (r'a: "\UFFFFFFFF"', "r.yml: not valid YAML"),
        ("a: \x00", "r.yml: not valid YAML"),
        ("{a: [" * 16 + "{}" + "]}" * 16, "r.yml:1: nested more than 32 levels deep"),
    ],
)
def test_what_is_refused_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        value_of(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "&a [*a, ", "? "])
def test_deep_nesting_is_refused_at_once(opening: str) -> None:
    start = time.thread_time()  # its own work, whatever else the machine does
    with pytest.raises(RecipeError):
        value_of(opening * 100_000)
    assert time.thread_time() - start < 5


@given(st.text(st.sampled_from("ab1.:-?[]{},&*!|>'\"%#@ \n\t\\~e+")))
def test_any_text_is_a_value_or_a_recipe_error(text: str) -> None:
    try:
        value_of(text)
    except RecipeError as error:
        assert str(error).startswith("r.yml")


@pytest.mark.parametrize(
    "text",
    [
        "experts:\n" + "".join(f"  e{number}: x\n" for number in range(50_000)),
        "rules: [" + "{match: a, use: base}, " * 40_000 + "]",
        "- a\n" * 200_000,
    ],
)
def test_what_is_too_long_is_refused_before_it_is_read(text: str) -> None:
    before = time.process_time()
    with pytest.raises(
        RecipeError, match=r"r\.yml:\d+: more than 10000 values; a recipe is a short"
    ):
        parse_yaml(text, "r.yml")
    assert time.process_time() - before < 10
