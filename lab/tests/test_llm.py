"""Generative tasks: what leaks, what is right, that lm-eval says the same, and that experts merge."""

import gzip
import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers

import covmerge
from covmerge.errors import InputError
from covmerge_lab import llm
from covmerge_lab.harness import evaluate
from covmerge_lab.llm import Gpt2Suite, LlmSuite, corpora, lines, model, pretraining, tasks
from covmerge_lab.llm.corpora import Example
from covmerge_lab.llm.lines import Asked, Lines
from covmerge_lab.llm.tasks import Question, TaskSpec
from covmerge_lab.studies.controlled import Size, Training, _weight, linear_layers, run_training
from covmerge_lab.suite import Variant
from covmerge_lab.text import further
from covmerge_lab.training import Settings
from language import LEARNT, UNKNOWN, define, offline, save_llama, save_taught

# transformers, PEFT and lm-eval warn of one another.
pytestmark = pytest.mark.filterwarnings("default")


def ignore_progress(done, total):
    pass


def save_part(suite, task, part, questions):
    tasks.save(questions, suite.examples / task / f"{part}.jsonl")


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A suite whose base answers half of one task."""
    suite = LlmSuite(tmp_path_factory.mktemp("cache"))
    save_taught(suite.base)
    for part in ("train", "test"):
        save_part(suite, "next", part, UNKNOWN + LEARNT)
    return suite


def numbered(cache: Path) -> Iterator[Example]:
    for number in range(3000):
        yield Example(f"text {number}", str(number), f"group {number // 4}")
    yield Example("two ways", "one", "a")
    yield Example("two ways", "another", "b")


def test_parts_share_no_group(tmp_path):
    parts = tasks.build(TaskSpec("n", "numbers", numbered, "Text", "Number"), tmp_path)
    assert {part: len(questions) for part, questions in parts.items()} == tasks.SIZES
    groups = {
        part: {int(question.answer) // 4 for question in questions}
        for part, questions in parts.items()
    }
    assert not groups["train"] & (groups["test"] | groups["validation"])
    assert not groups["test"] & groups["validation"]
    assert len(groups["test"]) >= tasks.SIZES["test"] / tasks.PER_GROUP
    first = parts["train"][0]
    assert first.prompt == f"Text: text {first.answer}\nNumber:"
    assert not any("two ways" in question.prompt for part in parts.values() for question in part)
    assert parts == tasks.build(TaskSpec("n", "numbers", numbered, "Text", "Number"), tmp_path)


def test_a_part_is_kept_to_the_letter(tmp_path):
    questions = [Question("año\u2028?\nSpanish:", 'a "b"'), Question("\t", "\\")]
    tasks.save(questions, tmp_path / "part.jsonl")
    assert tasks.load(tmp_path / "part.jsonl") == questions


def test_word_problems_are_right():
    operations = {"Each": "*", "packs": "*", "more": "+"}
    for example in list(corpora.word_problems(Path()))[:200]:
        numbers = [int(word) for word in example.text.replace(".", "").split() if word.isdigit()]
        assert example.group == " ".join(map(str, sorted(numbers)))
        for word, operation in operations.items():
            if word in example.text and "How many more" not in example.text:
                expected = math.prod(numbers) if operation == "*" else sum(numbers)
                assert int(example.answer) == expected


@pytest.mark.parametrize(
    ("header", "call"),
    [
        ("def f(self, a, b=1): ...", "f(a, b)"),
        ("def f(a, /, *rest, c, **more): ...", "f(a, *rest, c=c, **more)"),
    ],
)
def test_calls(header, call, tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(f"{header}\ndef none(): ...\n")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(corpora, "files", lambda name: tmp_path / "nothing")
    (example,) = corpora.calls(tmp_path)
    assert (example.answer, example.group) == (call, "f")


def test_loss_is_of_the_answers_alone(tmp_path):
    encoder = model.Encoder(save_llama(tmp_path))
    inputs, targets = next(encoder.answered(LEARNT[:1] + UNKNOWN[:1], 2, seed=0))
    text = [encoder.tokenizer.decode(row[row >= 0]) for row in targets]
    assert sorted(text) == [" 1\n", " word\n"]
    assert torch.equal(
        torch.where(targets < 0, inputs["input_ids"][:, -targets.shape[1] :], targets),
        inputs["input_ids"][:, -targets.shape[1] :],
    )
    loaded = model.load(tmp_path).float()
    found = model.answer_loss(loaded, inputs, targets)
    logits = loaded(**inputs).logits.log_softmax(-1)[:, -targets.shape[1] - 1 : -1]
    picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found, -picked[targets >= 0].mean())


def test_score(taught):
    scores = taught.score("next", "test", taught.base, taught.base)
    assert scores == [0.0] * len(UNKNOWN) + [1.0] * len(LEARNT)


def test_the_small_gpt2_is_scored_by_the_tokens_that_it_foresees(taught, tmp_path, monkeypatch):
    suite = Gpt2Suite(tmp_path)
    shutil.copytree(taught.base, suite.base)
    questions = [*UNKNOWN, *LEARNT, Question(LEARNT[0].prompt, "12")]
    save_part(suite, "next", "test", questions)
    loaded, ids = model.load(suite.base), model.Encoder(suite.base).tokenizer

    def share(question):
        read = ids(question.prompt)["input_ids"]
        right = []
        for token in ids(f" {question.answer}\n")["input_ids"]:
            right.append(int(loaded(torch.tensor([read])).logits[0, -1].argmax()) == token)
            read.append(token)
        return sum(right) / len(right)

    monkeypatch.setattr(llm.gpt2, "_BATCH", 4)
    scores = suite.score("next", "test", suite.base, suite.base)
    assert scores == pytest.approx([share(question) for question in questions])
    # " 12" is told after " 1", which is the answer, and not foreseen.
    assert scores[len(UNKNOWN) : -1] == [1.0] * len(LEARNT) and 0 < scores[-1] < 1
    monkeypatch.setattr(Gpt2Suite, "available", {"next": "what is next"})
    monkeypatch.setattr(corpora, "general_text", lambda cache: ["any text"])
    monkeypatch.setattr(Gpt2Suite, "usual", (1,))
    whole = 100 * len(LEARNT) / len(questions)
    assert suite.measures(suite.base)["whole answers"] == pytest.approx(whole)


def test_a_gpt2_s_weights_are_watched_the_way_they_act():
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    gpt2 = transformers.GPT2LMHeadModel(config)
    layers = linear_layers(Gpt2Suite(Path()).adapt(gpt2, rank=2), Gpt2Suite.adapted)
    shapes = {name.split("h.0.")[1]: tuple(_weight(each).shape) for name, each in layers.items()}
    assert shapes["attn.c_attn"] == (12, 4) and shapes["mlp.c_fc"] == (16, 4)
    assert shapes["mlp.c_proj"] == (4, 16)


def test_its_base_can_be_trained_under_control(taught, monkeypatch):
    monkeypatch.setattr(LlmSuite, "controlled_task", "next")
    found = run_training(
        taught, Training("AdamW", 1e-3), 0, Size(2, steps=(1,), held=1), ignore_progress
    )
    assert len(found[1]) == len(linear_layers(taught.fresh("next"), taught.adapted)) > 0


@pytest.mark.slow
def test_lm_eval_says_the_same(taught, tmp_path, monkeypatch):
    offline(monkeypatch, tmp_path)
    scores = taught.score("next", "test", taught.base, taught.base)
    (result,) = evaluate(
        taught.base, tasks=["covmerge_next"], include_path=define(tmp_path), device="cpu"
    )
    assert result.metrics[0].value == sum(scores) / len(scores)


def test_inputs_have_no_answers(taught):
    (inputs,) = taught.inputs("next", 4)
    texts = model.Encoder(taught.base).tokenizer.batch_decode(inputs["input_ids"])
    assert all(text.endswith(("\nWord:", "\nNext:")) for text in texts)
    assert len(texts) == 4


def test_perplexity(taught):
    encoder, loaded = model.Encoder(taught.base), model.load(taught.base)
    text = "Some words of English."
    (inputs,) = encoder.windows([text], 10)
    assert inputs["input_ids"].shape == (1, 10)
    found = model.perplexity(loaded, iter([inputs]))
    with torch.no_grad():
        expected = loaded(**inputs, labels=inputs["input_ids"]).loss.exp()
    # exp makes a relative error of the loss's absolute one: some roundings of a float32 near 10.
    rounding = 8 * torch.finfo(torch.float32).eps * math.log(expected)
    assert found == pytest.approx(float(expected), rel=rounding)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_train(kind, taught, tmp_path):
    suite = LlmSuite(taught.cache, quick=True)
    save_llama(suite.base)
    save_part(suite, "arithmetic", "train", LEARNT * 4)
    save_part(suite, "arithmetic", "test", LEARNT)
    expert = suite.expert("arithmetic", Variant(kind, 0))
    assert suite.train("arithmetic", Variant(kind, 0), ignore_progress) > 0
    assert suite.train("arithmetic", Variant(kind, 0), ignore_progress) is None
    result = covmerge.merge(suite.base, {"a": expert, "b": expert}, out=tmp_path / "out")
    assert result.path == tmp_path / "out"
    assert len(suite.score("arithmetic", "test", tmp_path / "out", expert)) == len(LEARNT)


@pytest.fixture
def read(monkeypatch):
    """What the small GPT-2 learns from, with no package in it but in its form."""
    monkeypatch.setattr(lines, "_english", lambda cache: "We the people. " * 50)
    nouns = [
        Asked("Noun", word, "Plural", f"{word}s")
        for word in ["day", "hat", "dog", "sun", "cup", "tea"]
    ]
    monkeypatch.setattr(lines, "_forms", lambda cache: iter(nouns))
    dates = [Asked("English", "May 1", name, code) for code, name in lines.LANGUAGES.items()]
    monkeypatch.setattr(lines, "_dates", lambda cache: iter(dates))
    return Lines(Path(), seed=0)


def test_what_is_asked_of_the_small_gpt2_is_answered_right(read):
    signs = {"and": "+", "plus": "+", "less": "-", "without": "-", "times": "*", "rows of": "*"}

    def result(text):
        for words, sign in signs.items():
            text = text.replace(words, sign)
        return str(eval(re.sub("[a-z]", "", text)))

    def right(given, text, wanted, answer):
        if given == "Record":
            told = dict(re.split(r" is |: |=| ", each, maxsplit=1) for each in text.split(", "))
            return answer == told[wanted]
        if given == "Entry":
            told, asked = text[:-1].split(" (")
            known = dict(each.split(" ") for each in told.split("; "))
            return json.loads(answer) == {name: known[name] for name in asked.split(" ")}
        answers = {
            "Noun": lambda: f"{text}s",
            "English": lambda: next(c for c, name in lines.LANGUAGES.items() if name == wanted),
            "Sum": lambda: result(text),
            "Settings": lambda: re.sub(r"=\w+", "", text),
            "Words": lambda: {"Backwards": " ".join(text.split()[::-1]), "Capitals": text.upper()}[
                wanted
            ],
        }
        return answer == answers[given]()

    seen, sums = set(), set()
    for line in islice(read, 2000):
        if "\n" in line[:-1]:
            first, second = line.splitlines()
            question = (*first.split(": ", 1), *second.split(": ", 1))
            assert right(*question), line
            seen.add(question[0])
            if question[0] == "Sum":
                sums.add(re.sub(r"\d", "", question[1]).strip())
        else:
            assert len(line) == lines.PIECE + 1
    assert seen == {"Noun", "English", "Sum", "Record", "Entry", "Settings", "Words"}
    assert {*signs, *signs.values(), "day less  day", "hat *  hat"} <= sums
    # Always the same, so that the base is.
    first, again = (list(islice(Lines(Path(), seed=0), 50)) for _ in range(2))
    assert first == again


def test_the_small_gpt2_reads_nothing_that_is_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "fetch", lambda package, cache: tmp_path)
    monkeypatch.setattr(corpora, "fetch", lambda package, cache: tmp_path)
    monkeypatch.setattr(further, "fetch", lambda package, cache: tmp_path)
    for year in range(2000, 2012):
        (tmp_path / f"{year}.txt").write_text(f"of {year}")
    # Perplexity is of the last eight.
    assert lines._english(tmp_path) == "of 2000\nof 2001\nof 2002\nof 2003"
    with gzip.open(tmp_path / "infl_lu.csv.gz", "wt") as file:
        file.write("go,verb,went,gone,going,goes\nday,noun,days\nbig,adj,bigger,biggest\n")
    assert [(a.given, a.answer) for a in lines._forms(tmp_path)] == [
        ("Noun", "days"),
        ("Adjective", "bigger, biggest"),
    ]
    spec = TaskSpec("translation", "numbers", numbered, "English", "Spanish")
    monkeypatch.setattr(tasks, "SPECS", (spec,))
    parts = tasks.build(spec, tmp_path)
    tested = {q.answer for part in ("test", "validation") for q in parts[part]}
    assert len(tested) == tasks.SIZES["test"] + tasks.SIZES["validation"]
    monkeypatch.setattr(corpora, "times", lambda cache, code, seed: islice(numbered(cache), 3000))
    read = [asked.text for asked in lines._dates(tmp_path) if asked.wanted == "Dutch"]
    assert {*read} == {f"text {n}" for n in range(3000)} - {f"text {answer}" for answer in tested}


def test_windows_are_lines_with_an_end_of_text_before_each(read):
    tokens = pretraining.tokenizer(islice(iter(read), 500))
    settings = Settings(1, 1e-3, batch_size=2)
    batch = next(pretraining.windows(iter(Lines(Path(), seed=1)), tokens, settings))
    assert batch.shape == (2, pretraining.WINDOW)
    text = tokens.decode(batch.flatten().tolist())
    expected = "".join(f"{tokens.eos_token}{line}" for line in islice(Lines(Path(), seed=1), 30))
    assert expected.startswith(text) or text.startswith(expected)
    assert tokens("12\n")["input_ids"] == [tokens.vocab[each] for each in ("1", "2", "Ċ")]


@pytest.mark.slow
@pytest.mark.nightly
def test_quick(tmp_path):
    """The real packages; skipped where the registries cannot be reached."""
    suites = [LlmSuite(tmp_path, quick=True), Gpt2Suite(tmp_path, quick=True)]
    steps: list[tuple[int, int]] = []
    for suite in suites:
        steps.clear()
        try:
            suite.prepare(lambda done, total: steps.append((done, total)))
        except InputError as error:
            pytest.skip(str(error))
        assert {path.stem for path in (suite.folder / "lm_eval").iterdir()} == {
            f"covmerge_{task}" for task in suite.tasks
        }
        experts: dict[str, Path] = {}
        for task in suite.tasks:
            suite.train(task, Variant("lora", 0), ignore_progress)
            experts[task] = suite.expert(task, Variant("lora", 0))
        merged = suite.folder / "merged"
        covmerge.merge(suite.base, experts, method="average", out=merged)
        for task in suite.tasks:
            scores = suite.score(task, "test", merged, experts[task])
            assert all(score in (0.0, 1.0) for score in scores) or suite.name == "gpt2"
            assert all(0 <= score <= 1 for score in scores)
        assert suite.measures(merged)["perplexity"] > 1
    smol, gpt2 = (json.loads((suite.base / "config.json").read_text()) for suite in suites)
    assert (smol["model_type"], smol["num_hidden_layers"]) == ("llama", 2)
    assert gpt2["model_type"] == "gpt2"
    # Five steps of training it, and two tasks.
    assert steps[0] == (0, 7) and steps[-1] == (7, 7) and (5, 7) in steps
