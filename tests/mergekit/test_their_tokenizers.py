"""What mergekit's own tests ask of tokenizers, chat templates and vocabularies of different sizes.

Their test_tokenizer.py, test_vocabulary_axis.py, test_embedding_truncation.py and test_chat_template.py.
Models are those of `token_cases.py`: a base, one with two tokens more, one with tokens without rows.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken

from tests.cli.runs import words
from tests.e2e.models import build
from tests.mergekit.outputs import loaded, merged, stored
from tests.mergekit.token_cases import WORDS, Words, ids_of, save_model, save_tokenizer, tokenizer

CHATML = ("<|im_start|>", "<|im_end|>")
UNUSED = tuple(f"<UNUSED_{number}>" for number in range(4))
ODD = AddedToken(
    "<|odd|>", single_word=True, lstrip=True, rstrip=True, normalized=False, special=True
)
NAMES = {"base": "base", "chatml": "t0", "padded": "t1", "odd": "t2"}
BASE = WORDS["base"].order
LINEAR = {"parameters": {"weight": 1.0}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    of = {
        "base": Words(BASE),
        "chatml": Words(BASE, CHATML),
        "padded": Words(BASE, UNUSED, padding=-len(UNUSED)),
        "odd": Words(BASE, ("<|odd|>",)),
    }
    for name, own in of.items():
        save_model(folder / name, "llama", NAMES[name], own)
    found = tokenizer(Words(BASE))
    found.add_special_tokens([ODD])
    found.save(str(folder / "odd" / "tokenizer.json"))
    return folder


@pytest.fixture
def here(models, monkeypatch):
    monkeypatch.chdir(models)
    return models


def of(*models, method="linear", **more):
    """A recipe of models with a weight of 1 each, over the first of them."""
    listed = [{"model": f"./{own}", **LINEAR} for own in models]
    base = {"base_model": f"./{models[0]}"}
    return {"merge_method": method, **base, "models": listed, "dtype": "float32", **more}


def tables(folder):
    """Embedding and head, by token."""
    ids, tensors = ids_of(folder), stored(folder)
    return {
        token: torch.cat(
            [tensors[name][row] for name in ("model.embed_tokens.weight", "lm_head.weight")]
        )
        for token, row in ids.items()
        if row < len(tensors["lm_head.weight"])
    }


def sizes(folder):
    """Tokens, the config's number of them, and rows of both tables."""
    tensors = stored(folder)
    config = json.loads((folder / "config.json").read_text())
    return (
        len(ids_of(folder)),
        config["vocab_size"],
        *(len(tensors[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")),
    )


def test_other_numbers_of_rows_need_a_tokenizer(here, tmp_path):
    ran = merged(of("base", "padded", "chatml"), tmp_path, code=2)
    assert "has 23 rows in the base and 25 in expert 'chatml'" in ran.stderr
    assert "--tokenizer union" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_the_bases_tokens(here, tmp_path):
    merged(of("base", "padded", "chatml", tokenizer_source="base"), tmp_path)
    assert sizes(tmp_path / "out") == (23, 23, 23, 23)
    assert ids_of(tmp_path / "out") == ids_of(here / "base")


@pytest.mark.parametrize(("source", "size"), [("base", 23), ("union", 25)])
def test_updates_are_of_rows_of_the_same_token(source, size, here, tmp_path):
    recipe = of("base", "chatml", method="task_arithmetic", tokenizer={"source": source})
    merged(recipe, tmp_path)
    assert sizes(tmp_path / "out") == (size,) * 4
    found, wanted = tables(tmp_path / "out"), tables(here / "chatml")
    for token, row in found.items():
        torch.testing.assert_close(row, wanted[token])


def test_a_union_has_the_tokens_that_have_rows(here, tmp_path):
    merged(of("base", "padded", "chatml", tokenizer_source="union"), tmp_path)
    assert sizes(tmp_path / "out") == (25, 25, 25, 25)
    found, wanted = tables(tmp_path / "out"), tables(here / "chatml")
    assert found.keys() == wanted.keys()
    for token in CHATML:
        torch.testing.assert_close(found[token], wanted[token])
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(read) == 25
    assert set(CHATML) <= set(map(str, read.added_tokens_decoder.values()))


def test_a_models_tokens(here, tmp_path):
    merged(of("base", "padded", "chatml", tokenizer_source="./chatml"), tmp_path)
    assert sizes(tmp_path / "out") == (25, 25, 25, 25)
    assert ids_of(tmp_path / "out") == ids_of(here / "chatml")


def test_slerp_of_a_union(here, tmp_path):
    recipe = of("base", "chatml", method="slerp", tokenizer_source="union", parameters={"t": 0.5})
    merged(recipe, tmp_path)
    assert sizes(tmp_path / "out") == (25, 25, 25, 25)
    assert set(CHATML) <= ids_of(tmp_path / "out").keys()
    loaded(tmp_path / "out")


def test_forced_rows(here, tmp_path):
    tokens = {
        "a": {"source": "./chatml", "force": True},
        "b": {"source": "./base", "force": True},
    }
    merged(of("base", "chatml", tokenizer={"source": "union", "tokens": tokens}), tmp_path)
    found = tables(tmp_path / "out")
    assert torch.equal(found["a"], tables(here / "chatml")["a"])
    assert torch.equal(found["b"], tables(here / "base")["b"])
    assert len(found) == 25


def test_rows_of_other_tokens(here, tmp_path):
    number = ids_of(here / "chatml")["<|im_end|>"]
    of_a_token = {"kind": "model_token", "model": "./base", "token": "<s>"}
    of_a_number = {"kind": "model_token", "model": "./chatml", "token_id": number}
    tokens = {
        "c": {"source": of_a_number, "force": True},
        "d": {"source": of_a_token, "force": True},
    }
    merged(of("base", "chatml", tokenizer={"source": "base", "tokens": tokens}), tmp_path)
    found = tables(tmp_path / "out")
    assert sizes(tmp_path / "out")[0] == 23
    assert torch.equal(found["c"], tables(here / "chatml")["<|im_end|>"])
    assert torch.equal(found["d"], tables(here / "base")["<s>"])


@pytest.mark.parametrize("source", ["./odd", "base", "union"])
def test_what_a_token_is_goes_with_it_and_what_is_missing_is_added(source, here, tmp_path):
    """One that the base's tokenizer lacks is added under `base` too, where mergekit has an error."""
    row = {"kind": "model_token", "model": "./odd", "token": "a"}
    tokens = {
        "<|odd|>": {"source": "./odd", "force": True},
        "<|new|>": {"source": row, "force": True},
    }
    merged(of("odd", "chatml", tokenizer={"source": source, "tokens": tokens}), tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    number = read.convert_tokens_to_ids("<|odd|>")
    assert number == ids_of(here / "odd")["<|odd|>"]
    token = read.added_tokens_decoder[number]
    assert (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special) == (
        *(True, True, True),
        *(False, True),
    )
    assert read.decode([number], skip_special_tokens=True) == ""
    assert torch.equal(tables(tmp_path / "out")["<|new|>"], tables(here / "odd")["a"])


def test_padding(here, tmp_path):
    """Of one model, which under its own name as the base is a result that is the base."""
    recipe = of("chatml", tokenizer={"source": "base", "pad_to_multiple_of": 16})
    assert "equals the base's" in words(merged(recipe, tmp_path, code=1).stderr)
    del recipe["base_model"]
    merged(recipe, tmp_path)
    assert sizes(tmp_path / "out") == (25, 32, 32, 32)
    loaded(tmp_path / "out")


# Vocabularies along other tensors than matrices: Phi's head has a bias.


def save_phi(folder, tokens, moved=0.0):
    """A model of these tokens, whose bias tells its rows apart."""
    words = Words(tokens)
    model = build("phi")
    model.resize_token_embeddings(len(tokens))
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(float(len(tokens))))
        model.model.final_layernorm.bias += moved
    model.save_pretrained(folder)
    save_tokenizer(folder, words)


@pytest.mark.parametrize(("source", "more"), [("base", 0), ("base", 2), ("union", 2)])
def test_biases_follow_their_tokens(source, more, tmp_path):
    swapped = [*BASE[:3], BASE[4], BASE[3], *BASE[5:], *("xy"[:more])]
    save_phi(tmp_path / "base", BASE)
    save_phi(tmp_path / "other", swapped)
    paths = [str(tmp_path / name) for name in ("base", "other")]
    recipe = {
        **{"merge_method": "linear", "base_model": paths[0], "parameters": {"weight": 0.5}},
        **{"models": [{"model": path} for path in paths], "tokenizer_source": source},
    }
    merged(recipe, tmp_path, "--allow", "swapped-tensors", "--allow", "not-a-fine-tune")
    ids = {folder: ids_of(tmp_path / folder) for folder in ("base", "other", "out")}
    size = len(BASE) + (more if source == "union" else 0)
    model = loaded(tmp_path / "out")
    assert model.config.vocab_size == len(ids["out"]) == size
    for name in ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        found = stored(tmp_path / "out")[name]
        assert len(found) == size
        for token, row in ids["out"].items():
            rows = [
                stored(tmp_path / own)[name][ids[own][token]]
                for own in ("base", "other")
                if token in ids[own]
            ]
            torch.testing.assert_close(found[row], torch.stack(rows).mean(0))
    assert stored(tmp_path / "out")["lm_head.bias"][3:5].tolist() == [3.5, 3.5]
    assert model(torch.tensor([[1, 3, 2]])).logits.shape[-1] == size


def test_rows_that_the_base_lacks_are_left_out_of_a_bias_too(tmp_path):
    save_phi(tmp_path / "base", BASE)
    save_phi(tmp_path / "large", [*BASE, "x", "y"], moved=0.01)
    truncated(tmp_path, "base", "large")
    assert loaded(tmp_path / "out").config.vocab_size == len(BASE)
    assert torch.equal(stored(tmp_path / "out")["lm_head.bias"], torch.arange(float(len(BASE))))


# Other numbers of rows, and no tokenizer asked for.


def truncated(
    place, base, other, flag="--unsafe-truncate-embeddings", method="linear", code=0, **more
):
    """Merge two models over the first, whose updates are not what is asked about."""
    models = [{"model": str(place / own)} for own in (base, other)]
    given = {"t": 0.5} if method == "slerp" else {"weight": 0.5}
    recipe = {"merge_method": method, "base_model": models[0]["model"], "models": models, **more}
    allowed = ("--allow", "not-a-fine-tune", "--allow", "swapped-tensors")
    return merged({**recipe, "parameters": given}, place, flag, *allowed, code=code)


@pytest.fixture
def two_sizes(tmp_path):
    """A model, and one with two rows more; both with the tokens of the first."""
    save_model(tmp_path / "small", "llama", "base", Words(BASE))
    save_model(tmp_path / "large", "llama", "t0", Words(BASE, padding=2))
    return tmp_path


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic"])
@pytest.mark.parametrize(("base", "other"), [("small", "large"), ("large", "small")])
def test_truncated(method, base, other, two_sizes):
    """All rows of the base are there, where mergekit leaves as many as the smallest has."""
    truncated(two_sizes, base, other, method=method)
    found, base, other = (stored(two_sizes / own) for own in ("out", base, other))
    loaded(two_sizes / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].shape == base[name].shape
        assert torch.equal(found[name][len(BASE) :], base[name][len(BASE) :])
        if method == "linear":
            both = [own[name][: len(BASE)] for own in (base, other)]
            torch.testing.assert_close(found[name][: len(BASE)], torch.stack(both).mean(0))


@pytest.mark.parametrize("flag", ["--no-allow-crimes", "--allow-crimes"])
def test_not_truncated_unless_asked(flag, two_sizes):
    ran = truncated(two_sizes, "large", "small", flag, code=2)
    assert "the vocabularies differ in size" in ran.stderr
    assert not (two_sizes / "out").exists()


@pytest.mark.parametrize("asked", [{"tokenizer": {"source": "base"}}, {"tokenizer_source": "base"}])
def test_a_tokenizer_goes_before_truncation(asked, two_sizes):
    """Rows without a token are then left out, which mergekit has an error for."""
    truncated(two_sizes, "large", "small", **asked)
    assert sizes(two_sizes / "out") == (23, 23, 23, 23)


def test_truncated_without_tokenizers(two_sizes):
    for folder in ("small", "large"):
        for file in (two_sizes / folder).glob("tokenizer*"):
            file.unlink()
    truncated(two_sizes, "small", "large")
    assert not list((two_sizes / "out").glob("tokenizer*"))


# Chat templates, of a recipe whose other model has no tokenizer.
LONG = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}{# "
    f"{'x' * 300} #}}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [("chatml", "<|im_start|>"), ("{{messages[0]['content']}}", None), (LONG, None)],
)
def test_chat_templates(template, text, models, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((models / "base" / "config.json").read_bytes())
    moved = {name: own + 0.01 for name, own in stored(models / "base").items()}
    save_file(moved, tmp_path / "bare" / "model.safetensors", metadata={"format": "pt"})
    paths = [str(models / "base"), str(tmp_path / "bare")]
    recipe = {
        **{"merge_method": "linear", "base_model": paths[0], "dtype": "bfloat16"},
        "models": [{"model": path, "parameters": {"weight": 0.5}} for path in paths],
        "chat_template": template,
    }
    merged(recipe, tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (text or template) in read.chat_template
