"""Tokenizers that are a SentencePiece model alone, as older Llamas, Mistrals and T5s have them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import covmerge
from covmerge.api import run_recipe
from covmerge.errors import InputError
from covmerge.recipe import parse_recipe
from covmerge.vocabulary.tokens import Reader

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
    notes = json.loads((merged(tmp_path, "union") / "covmerge.json").read_text())["notes"]
    assert any("of the added tokens are pieces of other models' words" in note for note in notes)


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
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    said = r"tokenizer.model without a tokenizer.json.* pip install 'covmerge\[sentencepiece\]'"
    with pytest.raises(InputError, match=said):
        Reader().read(tmp_path / "a")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 499723\n"


@pytest.mark.parametrize("content", [b"", POINTER, b"\n\x0f\n\x05<unk>"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    """Of which transformers makes a tokenizer of three tokens, with numbers that no model has."""
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", llama, "llama", 340, LLAMA)
    (tmp_path / "a" / "tokenizer.model").write_bytes(content)
    with pytest.raises(InputError, match=r"a: tokenizer.model is no SentencePiece model \("):
        Reader().read(tmp_path / "a")
