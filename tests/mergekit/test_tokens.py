"""What mergekit's rules of tokens and chat templates become."""

import pytest

from tests.mergekit.test_compiling import compiled, refused

MODELS = """
models:
  - {model: org/a, parameters: {weight: 1}}
  - {model: org/b, parameters: {weight: 1}}
"""
TIES = f"merge_method: ties\nbase_model: org/base{MODELS}"
LINEAR = f"merge_method: linear{MODELS}"


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        (f"{TIES}tokenizer_source: union", {"source": "union"}),
        (f"{TIES}tokenizer_source: base", {"source": "base"}),
        (f"{TIES}tokenizer_source: org/b", {"source": "b"}),
        (f"{TIES}tokenizer: {{}}", {"source": "union"}),
        (
            f"{TIES}tokenizer: {{source: {{model: org/b}}, pad_to_multiple_of: 8}}",
            {"source": "b", "pad_to_multiple_of": 8},
        ),
        (
            f"{TIES}tokenizer: {{tokens: {{x: {{source: org/a}}, y: {{source: org/base, force: true}}}}}}",
            {"source": "union", "tokens": {"x": {"of": "a"}, "y": {"of": "base", "force": True}}},
        ),
        (
            f"{TIES}tokenizer: {{tokens: {{x: {{source: {{kind: zero}}}}}}}}",
            {"source": "union", "tokens": {"x": {"of": "zero"}}},
        ),
        (
            f"{TIES}tokenizer: {{tokens: {{x: {{source: {{kind: model_token, model: org/a, "
            "token_id: 3}}}}",
            {"source": "union", "tokens": {"x": {"of": "a", "id": 3}}},
        ),
        (f"base_model: org/a\n{LINEAR}tokenizer_source: base", {"source": "base"}),
        (f"{LINEAR}tokenizer_source: base", {"source": "a"}),
        (f"{LINEAR}tokenizer_source: union", {"source": "union"}),
    ],
)
def test_rules(text, tokenizer):
    assert compiled(text)["tokenizer"] == tokenizer


def test_an_adapter_has_the_tokens_of_its_model():
    ours = compiled(
        "merge_method: ties\nbase_model: org/base\nparameters: {weight: 1}\n"
        "models: [{model: org/base+org/lora}, {model: org/b}]\n"
        "tokenizer: {tokens: {x: {source: org/base+org/lora}}}"
    )
    assert ours["tokenizer"]["tokens"] == {"x": {"of": "base"}}


def test_names_that_mean_something_else_are_not_given():
    ours = compiled(
        "merge_method: linear\nparameters: {weight: 1}\nbase_model: ./m/base\n"
        "models: [{model: ./m/base}, {model: ./m/chatml}]\ntokenizer_source: union\nchat_template: chatml"
    )
    assert list(ours["experts"]) == ["base-2", "chatml-2"]
    assert ours["tokenizer"] == {"source": "union"}
    assert ours["chat_template"] == "chatml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokenizer: {source: org/c}", "`source` is org/c, which is none of the models"),
        ("tokenizer_source: base\ntokenizer: {source: base}", "remove one of them"),
        ("tokenizer: {sauce: base}", "unknown key 'sauce'. Did you mean 'source'?"),
        ("tokenizer: {pad_to_multiple_of: x}", "pad_to_multiple_of is 'x'; it is a number"),
        ("tokenizer: {tokens: {x: {force: true}}}", "no `source` says whose row"),
        ("tokenizer: {tokens: {x: {source: {kind: nought}}}}", "kind is 'nought'; it is zero or"),
        (
            "tokenizer: {tokens: {x: {source: {kind: model_token, model: org/a}}}}",
            "exactly one of `token` and `token_id`",
        ),
        ("chat_template: chatmel", "chat_template is 'chatmel'; it is auto, one of alpaca"),
    ],
)
def test_what_is_refused(text, said):
    assert said in refused(TIES + text)
