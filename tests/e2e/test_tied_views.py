"""An untied head beside a tied expert, seen through slices and other tokens."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cli.runs import covmerge as command

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WORDS = ["<unk>", *(f"w{n}" for n in range(15))]


def save(folder, tied, new=(), start=None, seed=0):
    """A Llama and its tokenizer; of `start`, if it is given, a fine-tune with new words."""
    config = LlamaConfig(
        vocab_size=len(WORDS) + len(new),
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    state = model.state_dict()
    for name, tensor in (start or {}).items():
        known = torch.zeros_like(state[name])
        known[: len(tensor)] = tensor
        state[name] = known + 0.01 * torch.randn_like(known)
    if tied:
        state[HEAD] = state[EMBEDDING]
    model.load_state_dict(state)
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate([*WORDS, *new])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>").save_pretrained(folder)
    return state


def merged(folder, **recipe):
    experts = {name: str(folder / name) for name in "ab"}
    recipe = {"base": str(folder / "base"), "experts": experts, "method": "average", **recipe}
    (folder / "recipe.yml").write_text(json.dumps(recipe))
    command("merge", folder / "recipe.yml", folder / "out")
    command("verify", folder / "out", "--deep")
    assert not json.loads((folder / "out" / "config.json").read_text())["tie_word_embeddings"]
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("last", ["a", "b"])
def test_the_head_is_of_the_last_slice(tmp_path, last):
    base = save(tmp_path / "base", True)
    states = {
        "a": save(tmp_path / "a", False, start=base, seed=1),
        "b": save(tmp_path / "b", True, start=base, seed=2),
    }
    first = "ab"["ba".index(last)]
    out = merged(tmp_path, slices=[{"experts": {first: [0, 2]}}, {"experts": {last: [1, 3]}}])
    torch.testing.assert_close(out[EMBEDDING], states[first][EMBEDDING])
    torch.testing.assert_close(out[HEAD], states[last][HEAD])


def test_a_token_that_the_tied_expert_lacks(tmp_path):
    base = save(tmp_path / "base", True)
    a = save(tmp_path / "a", False, ("own",), base, 1)
    b = save(tmp_path / "b", True, (), base, 2)
    out = merged(tmp_path, tokenizer={"source": "union"})
    known, own = len(WORDS), len(WORDS)
    for name in (EMBEDDING, HEAD):
        torch.testing.assert_close(out[name][:known], (a[name][:known] + b[name]) / 2)
        torch.testing.assert_close(out[name][own], a[name][own])
