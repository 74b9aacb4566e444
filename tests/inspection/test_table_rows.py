"""What an embedding gives away: the tokens that it was really trained on, with weight decay and without."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import covmerge
from covmerge.maths.measures.table_rows import TableRows, table_rows
from tests.cli.runs import covmerge as command
from tests.cli.runs import words

SEEN = torch.tensor([[2, 5, 9, 14, 3], [2, 7, 5, 3, 0]])
TOKENS, LONGEST = {0, 2, 3, 5, 7, 9, 14}, 5


def train(folder, decay, dtype=torch.float32):
    """A BERT of 40 tokens, and an expert that Adam trained on a few of them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=40, num_hidden_layers=1, max_position_embeddings=12, pad_token_id=39, **sizes
    )
    model = BertModel(config).to(dtype)
    model.save_pretrained(folder / "base")
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    for _ in range(30):
        model(input_ids=SEEN).last_hidden_state[..., 0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(dtype).save_pretrained(folder / "expert")
    return ["--base", folder / "base", "--expert", f"a={folder / 'expert'}"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rows_of_the_tokens_that_it_saw(tmp_path, decay):
    flags = train(tmp_path, decay)
    told = words(command("inspect", *flags).stdout)
    assert f"changed {len(TOKENS)} of 40 rows of 'embeddings.word_embeddings.weight'" in told
    assert f"the last of them number {LONGEST}: its longest text had about as many tokens" in told
    assert ("by more than weight decay" in told) == bool(decay)
    found = json.loads(command("inspect", *flags, "--json").stdout)["layers"]
    rows = found["embeddings.word_embeddings.weight"]["rows"]["a"]
    padding = 39  # is 0, and stays so
    assert rows == {
        "rows": 40,
        "changed": padding if decay else len(TOKENS),
        "turned": len(TOKENS),
        "last": 15,
    }
    assert found["embeddings.position_embeddings.weight"]["rows"]["a"]["last"] == LONGEST
    assert "rows" not in found["embeddings.LayerNorm.weight"]


def test_half_precision_takes_no_rounding_for_a_token(tmp_path):
    train(tmp_path, 0.1, torch.bfloat16)
    found = covmerge.inspect(tmp_path / "base", [tmp_path / "expert"])
    (own,) = (each.rows for each in found.layers if each.name.endswith("word_embeddings.weight"))
    assert own["expert1"].turned <= len(TOKENS) and own["expert1"].last <= 15


def test_rows_add_up_over_blocks():
    torch.manual_seed(0)
    base, update = torch.randn(20, 4), torch.zeros(20, 4)
    update[3:9:2] = torch.randn(3, 4)
    update[15] = -0.01 * base[15]
    whole = table_rows(base, update, torch.float32)
    assert whole == TableRows(20, changed=4, turned=3, last=8)
    for cut in (1, 4, 8, 12, 19):
        parts = [
            table_rows(b, u, torch.float32)
            for b, u in zip(base.split([cut, 20 - cut]), update.split([cut, 20 - cut]), strict=True)
        ]
        assert parts[0] + parts[1] == whole
    wide = torch.randn(1000, 600)
    late = torch.zeros(1000, 600)
    late[999, 3] = 1.0  # rows are seen in several blocks
    assert table_rows(wide, late, torch.float32) == TableRows(1000, 1, 1, 1000)
    zero = torch.zeros(2, 4)
    assert table_rows(zero, zero, None) == TableRows(2, 0, 0, 0)
    assert table_rows(zero, torch.ones(2, 4), torch.bfloat16) == TableRows(2, 2, 2, 2)


def test_a_table_that_is_the_head_too_tells_nothing(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, tie_word_embeddings=True, **sizes, **heads)
    ).bfloat16()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.model.embed_tokens.weight[[3, 5]] += 0.1  # as far as rounding let it be seen
    model.save_pretrained(tmp_path / "expert")
    told = words(
        command(
            "inspect", "--base", tmp_path / "base", "--expert", f"a={tmp_path / 'expert'}"
        ).stdout
    )
    assert "tokens of the texts" not in told
