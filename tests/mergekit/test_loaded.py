"""A recipe of mergekit's with rules of tokens and a chat template, from its file to a model that talks."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.runs import covmerge
from tests.mergekit.token_cases import RECIPES, WORDS, ids_of, save_models

MESSAGES = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
CHATML = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n"
# By recipe: the tokens that its models add, the rows of its tables, and what its chat template makes.
CASES = {
    "union": (["<|im_start|>", "<|im_end|>"], 32, CHATML),
    # Two of four models have this template, but for blanks around it.
    "union_of_other_orders": (
        *(["<|im_start|>", "<|im_end|>", "op", "<tool>"], 27),
        "<s>[user] ab[assistant] cd",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_from_the_recipe_to_a_loaded_model(name, models, tmp_path, monkeypatch):
    added, rows, text = CASES[name]
    monkeypatch.chdir(models)
    (tmp_path / "their.yml").write_text(RECIPES[name])
    out = tmp_path / "merged"
    covmerge("merge", tmp_path / "their.yml", out)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)

    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tables = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    assert [len(table) for table in tables] == [model.config.vocab_size] * 2 == [rows] * 2
    assert len(tokenizer) == len(WORDS["base"].tokens) + len(added)
    assert rows - len(tokenizer) == (7 if name == "union" else 0)  # rows of padding

    stored, own = load_file(models / "llama" / "t1" / "model.safetensors"), ids_of(out)
    theirs = ids_of(models / "llama" / "t1")
    for token in added:
        assert tokenizer.encode(token, add_special_tokens=False) == [own[token]]
    one = "<|im_start|>"  # which t1 alone has: under `union` its row, as the recipe says
    if name == "union":
        for table, key in zip(tables, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
            assert torch.equal(table[own[one]], stored[key][theirs[one]])
            assert torch.equal(table[27:], table[26].expand(5, -1))

    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == text
    prompt = tokenizer.apply_chat_template(
        MESSAGES[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert prompt["input_ids"].max() < rows
    made = model.generate(**prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(made[:, : prompt["input_ids"].shape[1]], prompt["input_ids"])
    assert made.shape[1] > prompt["input_ids"].shape[1]
    assert isinstance(tokenizer.decode(made[0]), str)
