"""Tokenizers that are a SentencePiece model alone, as older Llamas, Mistrals and T5s have them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import covmerge
from covmerge.errors import InputError
from covmerge.front.api import run_recipe
from covmerge.front.cli import app
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.vocabulary.tokens import read_tokenizer
from tests.advised import advice

MODELS = Path(__file__).parent / "sentencepiece"
TEXT = "the model merges two experts 12 and wörld  alpha"
LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}
T5 = {
    **{"tokenizer_class": "T5Tokenizer", "extra_ids": 10},
    "additional_special_tokens": [f"<extra_id_{number}>" for number in range(10)],
}
CHAT = {"<|im_end|>": 340, "<|im_start|>": 341, "<pad>": 342}


def llama(rows):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=rows,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def t5(rows):
    config = transformers.T5Config(
        vocab_size=rows, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def save(folder, build, name, rows, config=None):
    """A model with the file of its tokenizer, and the config beside it that releases of 2023 wrote."""
    torch.manual_seed(len(name))
    model = build(rows)
    model.save_pretrained(folder)
    leaf = "spiece.model" if build is t5 else "tokenizer.model"
    shutil.copy(MODELS / f"{name}.model", folder / leaf)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model.get_input_embeddings().weight.detach()


def merged(folder, source):
    models = {name: str(folder / name) for name in ("a", "b")}
    recipe = parse_recipe(
        {"base": None, "experts": models, "method": "linear", "tokenizer": {"source": source}}
    )
    run_recipe(recipe, folder / "out")
    return folder / "out"


def loaded(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.covering(1)
@pytest.mark.parametrize("source", ["a", "b", "union"])
@pytest.mark.parametrize(
    ("build", "config", "rows"),
    [
        (llama, LLAMA, (340, 340)),
        (llama, None, (340, 340)),
        (t5, T5, (55, 50)),  # with ten more tokens, and some rows of padding
        (t5, None, (145, 140)),
    ],
)
def test_rows_are_merged_by_token(tmp_path, build, config, rows, source):
    package = pytest.importorskip("sentencepiece")
    name = build.__name__
    weights = [
        save(tmp_path / "a", build, name, rows[0], config),
        save(tmp_path / "b", build, f"{name}_other", rows[1], config),
    ]
    out = merged(tmp_path, source)
    tokens, *own = (loaded(folder) for folder in (out, tmp_path / "a", tmp_path / "b"))
    table = "shared.weight" if build is t5 else "model.embed_tokens.weight"
    found = load_file(out / "model.safetensors")[table]
    for token, number in tokens.get_vocab().items():
        held = [
            rows[ids[token]]
            for rows, ids in zip(weights, (one.get_vocab() for one in own), strict=True)
            if token in ids
        ]
        assert torch.allclose(found[number], sum(held) / len(held), atol=1e-6), token
    files = {path.name for path in out.iterdir()}
    stored = "spiece.model" if build is t5 else "tokenizer.model"
    if source == "union":
        assert "tokenizer.json" in files and stored not in files
        assert len(tokens) > max(len(one) for one in own)
    else:
        assert "tokenizer.json" not in files
        assert (out / stored).read_bytes() == (tmp_path / source / stored).read_bytes()
        model = package.SentencePieceProcessor(model_file=str(out / stored))
        if config is not None:
            assert tokens.encode(TEXT, add_special_tokens=False) == model.encode(TEXT)
        assert tokens.encode(TEXT) == own["ab".index(source)].encode(TEXT)
    assert tokens.decode(tokens.encode("the model", add_special_tokens=False)) == "the model"
    assert covmerge.verify(out).ok


@pytest.mark.parametrize("source", ["b", "union"])
def test_tokens_of_a_chat_model_in_added_tokens_json(tmp_path, source):
    """The form before tokenizer_config.json listed them."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    weights = save(tmp_path / "b", llama, "llama", 343, LLAMA)
    (tmp_path / "b" / "added_tokens.json").write_text(json.dumps(CHAT))
    special = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<s>"}
    (tmp_path / "b" / "special_tokens_map.json").write_text(json.dumps(special))
    out = merged(tmp_path, source)
    found = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.allclose(found[340:], weights[340:], atol=1e-6)
    text = "<|im_start|>the model<|im_end|>"
    assert loaded(out).encode(text) == loaded(tmp_path / "b").encode(text)
    assert {key: loaded(out).get_vocab()[key] for key in CHAT} == CHAT


def test_an_added_token_whose_number_transformers_changes_is_refused(tmp_path):
    """It gives the next free number, whatever the file says: another row would be taken for the token's."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    save(tmp_path / "b", llama, "llama", 346, LLAMA)
    first, second, _ = CHAT
    added = {first: CHAT[first], second: 345}
    (tmp_path / "b" / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(
        InputError, match=r"added_tokens.json gives .* the number 345, .* reads 341"
    ):
        merged(tmp_path, "b")


@pytest.mark.parametrize("key", [" 345", "+345", "3_45", "-5", "٣٤٥"])
def test_a_number_that_only_python_reads_is_refused(tmp_path, key):
    pytest.importorskip("sentencepiece")
    added = {"added_tokens_decoder": {key: {"content": "<x>", "special": True}}}
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    save(tmp_path / "b", llama, "llama", 346, LLAMA | added)
    with pytest.raises(InputError, match=r"tokenizer_config.json gives '<x>' the number"):
        merged(tmp_path, "b")


def test_a_union_says_that_pieces_of_words_were_added(tmp_path):
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    save(tmp_path / "b", llama, "llama_other", 340, LLAMA)
    out = merged(tmp_path, "union")
    notes = json.loads((out / "covmerge.json").read_text())["notes"]
    assert any("of the added tokens are pieces of other models' words" in note for note in notes)
    (note,) = [note for note in notes if "mark of a space" in note]
    unseen = re.findall("'(▁[^']+)'", note)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert unseen and all(piece in tokenizer.get_vocab() for piece in unseen)
    for piece in unseen:
        assert piece not in tokenizer.tokenize("x" + piece.replace("▁", " "))


@pytest.mark.parametrize(("source", "there"), [("a", True), ("b", False), ("union", False)])
def test_mistrals_other_file_goes_with_its_tokens(tmp_path, source, there):
    """Of the same tokens, by mistral-common's name; it would contradict others."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    save(tmp_path / "b", llama, "llama_other", 340, LLAMA)
    shutil.copy(MODELS / "llama.model", tmp_path / "a" / "tokenizer.model.v3")
    out = merged(tmp_path, source)
    assert (out / "tokenizer.model.v3").exists() is there


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    """Transformers takes the file for one of tiktoken's then, and asks for that."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    said = advice(
        "to read a SentencePiece model takes the package sentencepiece: {}, or save it with"
    )
    install = advice("pip install 'covmerge[sentencepiece]'")
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "sentencepiece", None)
        with pytest.raises(InputError, match=said) as told:
            read_tokenizer(tmp_path / "a", {})
    assert re.search(install, str(told.value))
    read_tokenizer(tmp_path / "a", {})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 499723\n"


@pytest.mark.parametrize("content", [b"", POINTER, b"\n\x0f\n\x05<unk>"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    """Of which transformers makes a tokenizer of three tokens, with numbers that no model has."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    (tmp_path / "a" / "tokenizer.model").write_bytes(content)
    with pytest.raises(InputError, match=r"a: tokenizer.model is no SentencePiece model \("):
        read_tokenizer(tmp_path / "a", {})


ODD = {
    "a list": (b'["<x>"]', "holds a JSON list, an object is needed: is it the right file"),
    "a text": (b'{"<x>": "340"}', "gives '<x>' the number '340', and a token's is a whole number"),
    "negative": (
        b'{"<x>": -1}',
        "gives '<x>' the number -1, and a token's is a whole number from 0",
    ),
    "a fraction": (b'{"<x>": 340.0}', "gives '<x>' the number 340.0, and a token's"),
    "a truth value": (b'{"<x>": true}', "gives '<x>' the number true, and a token's"),
    "null": (b'{"<x>": null}', "gives '<x>' the number null, and a token's"),
    "NaN": (b'{"<x>": NaN}', "gives '<x>' the number NaN, and a token's"),
    "huge": (b'{"<x>": 4294967296}', "gives '<x>' the number 4294967296, and a token's"),
    "of 5000 digits": (
        b'{"<x>": ' + b"1" * 5000 + b"}",
        "is not valid JSON (a number has thousands of digits)",
    ),
    "nested": (b'{"<x>": {"id": 340}}', "gives '<x>' the number {\"id\": 340}, and a token's"),
    "one number twice": (b'{"<x>": 340, "<y>": 340}', "gives '<x>' and '<y>' the same number 340"),
    "one token twice": (b'{"<x>": 340, "<x>": 341}', "has the key '<x>' twice"),
    "an empty token": (b'{"": 340}', "gives the empty text the number 340, and no token is empty"),
    "no UTF-8": (b'{"\xff": 340}', "is not valid JSON ('utf-8' codec can't decode byte 0xff"),
    "no JSON": (b"<x> 340", "is not valid JSON (Expecting value"),
    "without an end": (b'{"<x>": ' + b"[" * 10**5, "is not valid JSON (maximum recursion depth"),
    "large": (
        b'{"<x>": 4294967295}',
        "gives '<x>' the number 4294967295, and transformers reads 340: its row",
    ),
    "another's": (b'{"<x>": 5}', "gives '<x>' the number 5, and transformers reads 340: its row"),
}


@pytest.mark.parametrize("form", ["model", "json"])
@pytest.mark.parametrize(("content", "said"), ODD.values(), ids=ODD)
def test_an_odd_added_tokens_json_is_named(tmp_path, content, said, form):
    """Beside either form of a tokenizer; transformers fails of some, and renumbers others."""
    pytest.importorskip("sentencepiece")
    for name in ("a", "b"):
        save(tmp_path / name, llama, "llama", 345, LLAMA)
    if form == "json":
        loaded(tmp_path / "b").save_pretrained(tmp_path / "b")
        (tmp_path / "b" / "tokenizer.model").unlink()
    path = tmp_path / "b" / "added_tokens.json"
    path.write_bytes(content)
    outcome = CliRunner().invoke(app, ["merge", str(recipe_of(tmp_path)), str(tmp_path / "out")])
    told = outcome.stderr.replace("\n", " ")
    assert outcome.exit_code == 2
    assert f"{path} {said}" in told
    assert not (tmp_path / "out").exists()


def recipe_of(folder):
    path = folder / "recipe.yaml"
    experts = "".join(f"  {name}: {folder / name}\n" for name in ("a", "b"))
    path.write_text(f"base: null\nexperts:\n{experts}method: linear\ntokenizer:\n  source: union\n")
    return path


def test_added_tokens_json_that_says_what_tokenizer_json_does_is_read(tmp_path):
    """An older copy of it is passed over, as transformers does; what that lacks must have its number."""
    pytest.importorskip("sentencepiece")
    save(tmp_path, llama, "llama", 343, LLAMA)
    tokenizer = loaded(tmp_path)
    tokenizer.add_tokens(["<x>", "<y>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    added = tmp_path / "added_tokens.json"
    for told in ({"<x>": 340, "<y>": 341}, {"<x>": 341}, {"<z>": 342}):
        added.write_text(json.dumps(told))
        ids = read_tokenizer(tmp_path, {}).ids
        assert [ids["<x>"], ids["<y>"], ids.get("<z>", 342)] == [340, 341, 342]


@pytest.mark.parametrize("number", ["1" * 5000, "12345678901"])
def test_a_number_of_more_digits_than_any_table_has_rows_is_refused(tmp_path, number):
    pytest.importorskip("sentencepiece")
    added = {"added_tokens_decoder": {number: {"content": "<x>", "special": True}}}
    save(tmp_path / "a", llama, "llama", 340, LLAMA | added)
    with pytest.raises(InputError, match=r"tokenizer_config.json gives '<x>' the number '1"):
        read_tokenizer(tmp_path / "a", {})


@pytest.mark.parametrize("listed", [["<x>"], "<x>", 340])
def test_a_list_of_added_tokens_that_is_no_object_is_named(tmp_path, listed):
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA | {"added_tokens_decoder": listed})
    with pytest.raises(InputError, match=r"tokenizer_config.json gives added_tokens_decoder "):
        read_tokenizer(tmp_path / "a", {})


def test_mistrals_other_file_alone_is_named(tmp_path):
    """Without a word its rows would be taken for those of the first model's tokens."""
    for name in ("a", "b"):
        save(tmp_path / name, llama, "llama", 340, LLAMA)
    (tmp_path / "b" / "tokenizer.model").rename(tmp_path / "b" / "tokenizer.model.v3")
    outcome = CliRunner().invoke(app, ["merge", str(recipe_of(tmp_path)), str(tmp_path / "out")])
    assert outcome.exit_code == 2
    said = (
        f"{tmp_path / 'b' / 'tokenizer.model.v3'} is the only file with the tokens of this model, and "
        "transformers reads none of this name: copy it to tokenizer.model beside it, or save the model "
        "with a tokenizer.json"
    )
    assert said in outcome.stderr.replace("\n", " ")
