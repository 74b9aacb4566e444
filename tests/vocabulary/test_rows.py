"""Rows under another vocabulary, by any ranges, beside a dictionary of rows by token."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covmerge.errors import InputError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.recipe.sections import TokenizerRules
from covmerge.plan.vocabulary.rows import Retokenized, Source, Tables, tables_of, vocabulary
from covmerge.plan.vocabulary.tokens import Tokenizer

TOKENS = [f"t{number}" for number in range(14)]
NAME = "model.embed_tokens.weight"


@st.composite
def vocabularies(draw):
    """Numbers of some tokens, with holes between them."""
    tokens = draw(st.permutations(TOKENS))[: draw(st.integers(1, len(TOKENS)))]
    numbers = draw(st.permutations(range(len(tokens) + draw(st.integers(0, 3)))))
    return dict(zip(tokens, numbers, strict=False))


def source(ids, rows):
    return Source(Tokenizer(Path(), {}, {}, ids, {}), rows)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(vocabularies(), min_size=1, max_size=4),
    vocabularies(),
    st.booleans(),
    st.sampled_from([None, 1, 4]),
    st.integers(0, 2),
)
def test_rows_are_those_of_the_tokens(own, out, with_base, multiple, short):
    keys = [None if with_base and not n else f"e{n}" for n in range(len(own))]
    ids = dict(zip(keys, own, strict=True))
    forced = TOKENS[0]
    giver = keys[-1]
    rules = TokenizerRules.model_validate({"pad_to_multiple_of": multiple})
    # The last rows of every embedding are cut off: those tokens have none there.
    rows = {key: max(1, max(i.values()) + 1 - short) for key, i in ids.items()}
    has_forced = forced in ids[giver] and ids[giver][forced] < rows[giver]
    if has_forced:
        tokens = {forced: {"of": "base" if giver is None else giver, "force": True}}
        rules = TokenizerRules.model_validate({**rules.model_dump(), "tokens": tokens})
    sources = {key: source(i, rows[key]) for key, i in ids.items()}
    decided, _ = vocabulary(out, max(out.values()) + 1, rules, sources)
    stored = {key: torch.randn(rows[key], 3, dtype=torch.float64) for key in keys}
    checkpoints = {key: open_checkpoint({NAME: tensor}) for key, tensor in stored.items()}
    tables = {key: Tables(frozenset([NAME]), rows[key], None, {}) for key in keys}

    def row(key, token):
        number = ids[key].get(token, rows[key])
        return stored[key][number] if number < rows[key] else None

    for key in keys:
        view = Retokenized(key, checkpoints, tables, decided)
        wanted = torch.full((decided.rows, 3), torch.nan, dtype=torch.float64)
        for token, number in out.items():
            have = [r for other in keys if (r := row(other, token)) is not None]
            if token == forced and has_forced:
                found = row(giver, token)
            elif (found := row(key, token)) is None and (
                found := row(None, token) if with_base else None
            ) is None:
                found = sum(have) / len(have) if have else torch.zeros(3, dtype=torch.float64)
            wanted[number] = found
        named = sorted(out.values())
        padding = [n for n in range(decided.rows) if n not in named]
        wanted[padding] = wanted[named].mean(0)
        torch.testing.assert_close(view.read(NAME), wanted)
        for start in range(0, decided.rows, 3):
            part = range(start, min(start + 3, decided.rows))
            torch.testing.assert_close(view.read(NAME, part), wanted[part.start : part.stop])
    assert decided.rows % (multiple or 1) == 0


def test_what_is_no_table_of_tokens_is_left_alone():
    """Positions are embeddings too; the bias of a head goes with it."""
    tensors = {
        "bert.embeddings.word_embeddings.weight": torch.zeros(8, 4),
        "bert.embeddings.position_embeddings.weight": torch.zeros(8, 4),
        "bert.embeddings.token_type_embeddings.weight": torch.zeros(2, 4),
        "cls.predictions.decoder.weight": torch.zeros(8, 4),
        "cls.predictions.bias": torch.zeros(8),
        "bert.encoder.layer.0.output.dense.weight": torch.zeros(8, 4),
    }
    found = tables_of(_with_config(tensors, {"vocab_size": 8}))
    assert sorted(found.names) == [
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.bias",
        "cls.predictions.decoder.weight",
    ]


def _with_config(tensors, config):
    checkpoint = open_checkpoint(tensors)
    checkpoint.config = config
    return checkpoint


def test_tables_that_are_not_of_one_number_of_rows_are_refused():
    tensors = {NAME: torch.zeros(8, 4), "lm_head.weight": torch.zeros(10, 4)}
    with pytest.raises(InputError, match="are not of one number of rows"):
        tables_of(open_checkpoint(tensors))
    columns = {NAME: torch.zeros(8, 4), "final_logits_bias": torch.zeros(1, 8)}
    with pytest.raises(
        InputError, match=r"'final_logits_bias' .* has the vocabulary along its col"
    ):
        tables_of(_with_config(columns, {"vocab_size": 8}))
