"""Text that a language model writes itself, as the inputs of its layers."""

import importlib
import json
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import torch
import transformers

import covmerge
from covmerge.errors import InputError, ResourceError
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.plan.statistics import Generated, StatisticsFile, collect, needed
from covmerge.plan.statistics.examples import Reading
from covmerge.plan.statistics.model import load_model
from covmerge.plan.statistics.written import Begun, ends_of
from tests.cli.runs import covmerge as run
from tests.e2e.models import build, fine_tuned
from tests.statistics.models import classifier, save, save_family, write_texts

OUT = "a.covstats.safetensors"
END = 2  # [EOS] of the tests' tokenizer
TEMPLATE = (
    "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"
    "{% if add_generation_prompt %} w3{% endif %}"
)


@pytest.fixture
def expert(tmp_path):
    return save(build("llama"), tmp_path / "m")


def with_template(folder, template=TEMPLATE):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def batches(folder, how, **reading):
    model = load_model(open_checkpoint(folder), "cpu", head=True)
    found, total = model.batches(how, Reading(**reading))
    batches = list(found)
    assert sum(len(batch["input_ids"]) for batch in batches) == total
    return batches


def test_a_text_goes_on_from_its_start_to_its_end(expert):
    found = batches(expert, Generated(tokens=9), max_examples=40, batch_size=16)
    assert [len(batch["input_ids"]) for batch in found] == [16, 16, 8]
    ended = 0
    for batch in found:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert ids[0] == END  # it has no other token between texts
            seen = ids[1:][mask[1:].bool()].tolist()
            assert END not in seen[:-1]
            ended += seen[-1] == END
            assert len(seen) == 9 or seen[-1] == END
            assert mask.sum() == 1 + len(seen)
    assert ended  # of some of them the end is tested


def test_it_is_what_the_model_foresees(expert):
    """At a low temperature the likeliest token follows; others, as likely as the model says, at one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(expert)
    (batch,) = batches(expert, Generated(tokens=6, temperature=1e-4), max_examples=4, batch_size=4)
    ids = batch["input_ids"]
    with torch.no_grad():
        likeliest = model(input_ids=ids).logits.argmax(-1)
    told = batch["attention_mask"][:, 1:].bool()
    assert torch.equal(ids[:, 1:][told], likeliest[:, :-1][told])

    (batch,) = batches(expert, Generated(tokens=1), max_examples=2000, batch_size=2000)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[END]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(batch["input_ids"][:, 1], minlength=len(expected)) / 2000
    assert (counts - expected).abs().max() < 5 * (0.25 / 2000) ** 0.5


def test_grams_are_those_of_the_texts(expert, tmp_path):
    how = Generated(tokens=5, seed=3)
    done = collect(expert, how, tmp_path / OUT, max_examples=12, batch_size=8)
    given = batches(expert, how, max_examples=12, batch_size=8)
    collect(expert, given, tmp_path / f"b{OUT}")
    own, same = (StatisticsFile.open(tmp_path / name) for name in (OUT, f"b{OUT}"))
    assert done.examples == own.about.examples == 12
    assert own.about.content == same.about.content
    assert own.about.rows == same.about.rows


def test_what_was_written_is_recorded(expert, tmp_path):
    collect(expert, Generated("bos", 4, 0.5, 7), tmp_path / OUT, max_examples=4)
    about = StatisticsFile.open(tmp_path / OUT).about
    written = {"start": "bos", "tokens": 4, "temperature": 0.5, "seed": 7, "batch_size": 4}
    assert about.generated == written
    collect(expert, write_texts(tmp_path / "a.txt"), tmp_path / f"b{OUT}")
    assert StatisticsFile.open(tmp_path / f"b{OUT}").about.generated is None
    assert b'"generated' not in (tmp_path / f"b{OUT}").read_bytes()


def test_the_seed_decides(expert, tmp_path):
    state = torch.random.get_rng_state()
    files = [
        collect(expert, Generated(tokens=4, seed=seed), tmp_path / f"{n}{OUT}", max_examples=8).path
        for n, seed in enumerate((0, 0, 1))
    ]
    contents = [StatisticsFile.open(path).about.content for path in files]
    assert contents[0] == contents[1] != contents[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_checkpoints_own_ideas_of_sampling_have_no_part(expert):
    plain = batches(expert, Generated(tokens=6), max_examples=8)
    asked = {"top_k": 1, "repetition_penalty": 3.0, "max_length": 3, "bad_words_ids": [[5]]}
    (expert / "generation_config.json").write_text(json.dumps(asked))
    for one, other in zip(plain, batches(expert, Generated(tokens=6), max_examples=8), strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


@pytest.mark.parametrize(("start", "begins"), [("chat", [4, 5, 6]), ("user", [4])])
def test_from_its_chat_template(expert, start, begins):
    with_template(expert)
    found = batches(expert, Generated(start, tokens=3), max_examples=4)[0]["input_ids"]
    assert found[:, : len(begins)].tolist() == [begins] * 4
    assert found.shape[1] == len(begins) + 3


def test_a_question_is_answered_where_it_ends(expert):
    """The template's `w2 w3` stands between the two, in place of the token that ended the question."""
    with_template(expert)
    found = batches(expert, Generated("user", 4, temperature=9.0), max_examples=120, batch_size=40)
    answered = 0
    for batch in found:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            text = ids[mask.bool()].tolist()
            assert mask.tolist() == sorted(mask.tolist(), reverse=True)  # padded behind
            assert text[0] == 4 and END not in text[:-1]
            if len(text) == 5 and END not in text and [5, 6] not in (text[2:4], text[3:5]):
                continue  # it was still asking
            # A question of at most three tokens, and an answer of at most four that ends.
            replies = [n for n in range(1, 5) if text[n : n + 2] == [5, 6]]
            lengths = [len(text) - n - 2 for n in replies]
            assert any(length == 4 or text[-1] == END for length in lengths)
            answered += 1
    assert answered  # of some of them the answer is tested


def test_an_answer_is_what_the_model_goes_on_with(expert, tmp_path):
    """Its questions and answers are what it writes after the same beginnings."""
    with_template(expert)
    written = []
    whole = load_model(open_checkpoint(expert), "cpu", head=True)

    def generate(ids, attention_mask, max_new_tokens, logits_processor):
        written.append((ids.tolist(), attention_mask.tolist(), max_new_tokens))
        added = [[7, 2, 2], [8, 9, 9]] if len(written) == 1 else [[11, 2, 2]]
        return torch.cat([ids, torch.tensor(added)], 1)

    whole.whole.generate = generate
    how = Reading(max_examples=2)
    (batch,) = whole.batches(Generated("user", tokens=3), how)[0]
    assert written == [([[4], [4]], [[1], [1]], 3), ([[4, 7, 5, 6]], [[1, 1, 1, 1]], 3)]
    assert batch["input_ids"].tolist() == [[4, 7, 5, 6, 11, 2], [4, 8, 9, 9, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0]]
    written.clear()
    (batch,) = whole.batches(Generated("user", tokens=3), Reading(max_examples=2, max_length=4))[0]
    assert len(written) == 1  # an answer has no room
    assert batch["input_ids"].tolist() == [[4, 7, 2, 2], [4, 8, 9, 9]]


def test_regmean_without_data(tmp_path):
    base, paths = save_family(build("llama"), tmp_path)
    statistics = {}
    for name, path in paths.items():
        statistics[name] = tmp_path / f"{name}.covstats.safetensors"
        collect(path, Generated(tokens=8), statistics[name], max_examples=32)
    covmerge.merge(base, paths, "regmean", tmp_path / "out", statistics=statistics)
    covmerge.verify(tmp_path / "out").raise_if_failed()
    recorded = json.loads((tmp_path / "out" / "covmerge.json").read_text())["sources"]
    assert recorded["statistics e1"]["content"]["generated"]["start"] == "bos"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_what_cannot_write(expert, tmp_path):
    encoder = save(classifier(), tmp_path / "encoder")
    with pytest.raises(InputError, match="BertForSequenceClassification, no language model"):
        collect(encoder, Generated("chat"), tmp_path / OUT)
    with pytest.raises(
        InputError, match=r"template that works \(UndefinedError: .* pass start=.bos."
    ):
        collect(with_template(expert, "{{ a.b.c }}"), Generated("chat"), tmp_path / OUT)
    with pytest.raises(InputError, match=r"template .* leaves out what the user says"):
        collect(with_template(expert, "w1"), Generated("user"), tmp_path / OUT)
    with pytest.raises(InputError, match=r"template .* is empty"):
        collect(with_template(expert, ""), Generated("chat"), tmp_path / OUT)
    with pytest.raises(InputError, match="start 'chat' has 3 tokens and a text at most 3"):
        collect(with_template(expert), Generated("chat"), tmp_path / OUT, max_length=3)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("start", ["chat", "user"])
def test_without_a_chat_template_nothing_is_loaded(expert, tmp_path, monkeypatch, start):
    """Transformers' own words are a paragraph on how a tokenizer gets one."""
    own = importlib.import_module("covmerge.plan.statistics.collect")
    monkeypatch.setattr(own, "load_model", lambda *_, **__: pytest.fail("loaded"))
    said = (
        f"{expert}: its tokenizer has no chat template (neither chat_template.jinja nor one in "
        f'tokenizer_config.json), which start="{start}" goes on from: pass start="bos", or with '
        "tokenizer the folder of one that has it"
    )
    with pytest.raises(InputError) as told:
        collect(expert, Generated(start), tmp_path / OUT)
    assert str(told.value) == said
    ran = run("collect", expert, tmp_path / OUT, "--inputs=generated", f"--start={start}", code=2)
    typed = said.replace(f'start="{start}"', f"--start {start}").replace(
        'start="bos"', "--start bos"
    )
    typed = typed.replace("with tokenizer", "with --tokenizer")
    assert " ".join(ran.stderr.split()) == f"error: {typed}"


def test_a_class_whose_own_libraries_are_missing_is_no_traceback(expert, tmp_path):
    """Transformers has something in its place, whose every attribute is an ImportError."""
    copied = tmp_path / "model"
    shutil.copytree(expert, copied)
    transformers = importlib.import_module("transformers")
    missing = next(
        name
        for name in dir(transformers)
        if type(getattr(transformers, name, None)).__name__ == "DummyObject"
    )
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "architectures": [missing]}))
    with pytest.raises(InputError, match=str(copied)):
        collect(copied, Generated("chat"), tmp_path / OUT)


def test_a_tokenizer_that_is_no_folder_is_named(expert, tmp_path):
    with pytest.raises(InputError, match=r"nowhere is no folder: pass the folder of a tokenizer"):
        collect(expert, Generated("chat"), tmp_path / OUT, tokenizer=tmp_path / "nowhere")
    assert not (tmp_path / OUT).exists()


def test_of_several_chat_templates_it_is_the_default(expert, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(expert)
    tokenizer.chat_template = {"rag": TEMPLATE, "tools": TEMPLATE}
    tokenizer.save_pretrained(expert)
    with pytest.raises(
        InputError, match=r"template called 'default' \(but 'rag', 'tools'\), which"
    ):
        collect(expert, Generated("chat"), tmp_path / OUT)


def test_a_start_that_works_is_named(expert, tmp_path):
    path = expert / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "bos_token": None, "eos_token": None}))
    with pytest.raises(
        InputError, match=r"start=.user. goes on from: pass a file of examples, or with"
    ):
        collect(expert, Generated("user"), tmp_path / OUT)
    with pytest.raises(
        InputError, match=r"no token that a text begins with: pass a file of examples"
    ):
        collect(expert, Generated("bos"), tmp_path / OUT)
    with_template(expert)
    with pytest.raises(
        InputError, match=r"a text begins with: pass start=.chat., or a file of exa"
    ):
        collect(expert, Generated("bos"), tmp_path / OUT)


def test_the_template_may_be_another_tokenizers(expert, tmp_path):
    other = with_template(save(build("llama"), tmp_path / "other"))
    collect(expert, Generated("user", tokens=2), tmp_path / OUT, max_examples=2, tokenizer=other)
    assert StatisticsFile.open(tmp_path / OUT).about.generated["start"] == "user"


@pytest.fixture
def base(tmp_path):
    return save(fine_tuned(build("llama"), seed=1, scale=0.5), tmp_path / "base")


def test_a_text_goes_on_from_what_the_base_began(expert, base, tmp_path):
    how = Generated("base", tokens=5, seed=3)
    collect(expert, how, tmp_path / OUT, base=base, max_examples=12, batch_size=8)
    with pytest.raises(InputError, match="collect with the base named"):
        batches(expert, how, max_examples=12)

    of_base = batches(base, Generated("bos", tokens=7, seed=3), max_examples=12)
    begun = [
        tuple(ids[mask.bool()].tolist())
        for batch in of_base
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    begun = [text[:-1] if text[-1] == END else text for text in begun]
    assert len(set(map(len, begun))) > 1  # some were over before
    texts = [
        ids[mask.bool()].tolist()
        for batch in batches(
            expert, replace(how, begun=Begun("b", 7, tuple(begun), 64, ())), max_examples=12
        )
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    for text, first in zip(texts, begun, strict=True):
        assert tuple(text[: len(first)]) == first
        assert len(first) < len(text) <= len(first) + 5
    rows = StatisticsFile.open(tmp_path / OUT).about
    assert set(rows.rows.values()) == {sum(map(len, texts))}
    assert rows.generated == {
        "start": "base",
        "tokens": 5,
        "temperature": 1.0,
        "seed": 3,
        "batch_size": 8,
        "begun_by": str(base),
        "begun_tokens": 7,  # texts have room for 16
    }


def test_a_base_that_writes_nothing_begins_nothing(expert, tmp_path):
    encoder = save(classifier(), tmp_path / "encoder")
    with pytest.raises(InputError, match="no language model that writes"):
        collect(expert, Generated("base"), tmp_path / OUT, base=encoder, max_examples=4)
    assert not (tmp_path / OUT).exists()


def with_vocabulary(folder, **changed):
    """A language model of another size, or a tokenizer whose words are others."""
    rows, first = changed.get("rows", 64), changed.get("first", "w0")
    model = build("llama")
    if rows != 64:
        model.config.vocab_size = rows
        model = transformers.LlamaForCausalLM(model.config)
    save(model, folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    numbers = words["model"]["vocab"]
    numbers[first] = numbers.pop("w0")
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


def test_a_base_of_another_vocabulary_begins_nothing(expert, tmp_path):
    how = Generated("base", tokens=3)
    larger = with_vocabulary(tmp_path / "larger", rows=4000)
    said = (
        r"larger, whose embedding has 4000 rows, began a text with the token \d+, and that of .*/m has "
        "64 rows: leave out start=.base."
    )
    with pytest.raises(InputError, match=said):
        collect(expert, how, tmp_path / OUT, base=larger, max_examples=4)
    other = with_vocabulary(tmp_path / "other", first="x")
    with pytest.raises(
        InputError, match=r"the token 3 is 'x' to .*/other, and 'w0' to .*/m, which"
    ):
        collect(expert, how, tmp_path / OUT, base=other, max_examples=32)
    # A tokenizer that is named is both's; rows that no token is written of are nothing to an expert.
    collect(expert, how, tmp_path / OUT, base=other, max_examples=32, tokenizer=expert)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [OUT]


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (float("nan"), "/m writes nothing, .* not finite"),
        (1e38, "/m writes nothing, .* not finite"),
    ],
)
def test_a_model_that_gives_no_odds(expert, tmp_path, factor, says):
    model = transformers.AutoModelForCausalLM.from_pretrained(expert)
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
        model.model.norm.weight.mul_(1e4)
    model.save_pretrained(expert)
    with pytest.raises(InputError, match=says):
        collect(expert, Generated(), tmp_path / OUT, max_examples=4)
    base = save(build("llama"), tmp_path / "b")
    with pytest.raises(InputError, match=says):
        collect(base, Generated("base"), tmp_path / OUT, base=expert, max_examples=4)
    assert not (tmp_path / OUT).exists()


def test_what_transformers_cannot_write_with(expert, monkeypatch):
    def fail(*_, **__):
        raise KeyError("past")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", fail)
    with pytest.raises(InputError, match=r"/m cannot write \(KeyError: 'past'\): pass a file"):
        batches(expert, Generated(), max_examples=1)


def test_a_start_that_the_model_has_no_row_for(expert, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(expert)
    tokenizer.add_tokens(["more"])  # its tokenizer has 63, so that this has the last row
    tokenizer.add_special_tokens({"bos_token": "<new>"})
    tokenizer.save_pretrained(expert)
    said = (
        r"/m has an embedding of 64 rows, and .* go on from has the token 64 \('<new>'\) of its tok"
    )
    with pytest.raises(InputError, match=said):
        collect(expert, Generated(), tmp_path / OUT, max_examples=4)
    with_template(expert, TEMPLATE.replace(" w3", "<new>"))
    with pytest.raises(InputError, match=said):
        collect(expert, Generated("user"), tmp_path / OUT, max_examples=4)
    with_template(expert, TEMPLATE.replace("w3", "more"))
    collect(expert, Generated("user"), tmp_path / OUT, max_examples=4)


@pytest.mark.parametrize("ends", ["1", "x", {"a": 1}, 1.5, True, [None], [[1]], [2, True]])
def test_ends_that_are_no_tokens(expert, tmp_path, ends):
    """In config.json transformers itself sees to the types."""
    path = expert / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    with pytest.raises(InputError) as told:
        collect(expert, Generated(), tmp_path / OUT, max_examples=4)
    assert f"eos_token_id of {path} is " in str(told.value)
    assert "a whole number from 0 to 63: correct it" in str(told.value)


@pytest.mark.parametrize(
    ("name", "ends", "beyond"),
    [
        ("generation_config.json", -1, "-1"),
        ("generation_config.json", [END, 64, 10**30], f"64, {10**30}"),
        ("config.json", 50256, "50256"),
    ],
)
def test_ends_that_the_model_has_no_row_for(expert, tmp_path, name, ends, beyond):
    """Configs of GPT-2 have its own end, whatever the vocabulary; transformers passes over it too."""
    if name == "config.json":
        (expert / "generation_config.json").unlink()
    path = expert / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    with_template(expert)
    said = f"eos_token_id of {path} has {beyond}, and the model 64 tokens: no text ends there"
    done = collect(expert, Generated("user", tokens=4), tmp_path / OUT, max_examples=24)
    assert said in done.notes


def test_ends_of_a_text(expert):
    """Of a list each; where the checkpoint has none, the tokenizer's; none at all, where it says so."""
    path = expert / "generation_config.json"
    known = json.loads(path.read_text())
    with closing(open_checkpoint(expert)) as checkpoint:
        model = load_model(checkpoint, "cpu", head=True)
        tokenizer = model.tokenizer(Reading())
        for given, ends in ((5, [5]), ([5, -1, 63, 64], [5, 63]), ([], []), (None, [END])):
            path.write_text(json.dumps({**known, "eos_token_id": given}))
            assert ends_of(model, tokenizer) == ends


def test_as_many_texts_at_once_as_fit(expert, tmp_path, monkeypatch):
    config = json.loads((expert / "config.json").read_text())
    each = needed.memory_of_text(config, 64 + needed._TEMPLATE)
    with closing(open_checkpoint(expert)) as checkpoint:
        model = needed.memory_needed(checkpoint)
    monkeypatch.setattr(needed, "fits", lambda size, limit: size <= model + 5 * each)
    done = collect(expert, Generated(), tmp_path / OUT, max_examples=8)
    assert StatisticsFile.open(tmp_path / OUT).about.generated["batch_size"] == 4
    assert any("4 texts were written at once, and not 8" in note for note in done.notes)
    with pytest.raises(ResourceError, match="pass batch_size=3, or fewer tokens"):
        collect(expert, Generated(), tmp_path / f"b{OUT}", max_examples=8, batch_size=6)
    collect(expert, Generated(), tmp_path / f"b{OUT}", max_examples=4, batch_size=100_000)
    assert StatisticsFile.open(tmp_path / f"b{OUT}").about.generated["batch_size"] == 4
    monkeypatch.setattr(needed, "fits", lambda size, limit: size <= model)
    with pytest.raises(ResourceError, match="8 texts that it writes at once do not fit"):
        collect(expert, Generated(), tmp_path / f"c{OUT}", max_examples=8)


@pytest.mark.parametrize(
    "config", [{}, {"hidden_size": "x", "text_config": 3}, {"hidden_size": -1}]
)
def test_a_config_that_tells_no_sizes(config):
    assert needed.memory_of_text(config, 100) == 0


def test_sizes_of_a_text_within_a_config():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 5, "num_attention_heads": 2}
    outer = {"vocab_size": None, "text_config": sizes}
    assert needed.memory_of_text(outer, 3) == needed.memory_of_text(sizes, 3) > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"start": "chats"}, "cannot start from 'chats'. Did you mean 'chat'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-320}, "temperature is 1e-320: pass 1e-06 or more"),
    ],
)
def test_what_cannot_be_asked_for(given, says):
    with pytest.raises(InputError, match=says):
        Generated(**given)


def test_from_the_command_line(expert, tmp_path):
    flags = [
        "--inputs=generated",
        "--max-examples=4",
        "--tokens=3",
        "--seed=2",
        "--temperature=0.7",
    ]
    run("collect", expert, tmp_path / OUT, *flags)
    about = StatisticsFile.open(tmp_path / OUT).about
    written = {"start": "bos", "tokens": 3, "temperature": 0.7, "seed": 2, "batch_size": 4}
    assert about.generated == written
    for given, says in {
        (expert, tmp_path / "a.txt", tmp_path / OUT, "--inputs=generated"): "a.txt: leave it out",
        (expert, "--inputs=generated"): "covmerge collect EXPERT OUT",
        (
            expert,
            tmp_path / OUT,
            "--inputs=own",
        ): "--inputs is 'own': pass data, generated or random",
        (expert, "a.txt", OUT, "--start=chat"): "--start belongs to --inputs generated",
        (expert, OUT, "--inputs=generated", "--labels=data"): "has no labels",
        (expert, OUT, "--inputs=generated", "--start=end"): "cannot start from 'end'",
        (expert, OUT, "--inputs=generated", "--text-column=a"): "--text-column is for a file",
        (expert, OUT, "--inputs=generated", "--pair-column=a"): "--pair-column is for a file",
        (expert, OUT, "--inputs=generated", "--label-column=a"): "--label-column is for a file",
        (expert, OUT, "--inputs=generated", "--start=base"): "--start base needs --base",
        (expert, OUT, "--inputs=generated", "--base=m"): "--base is for --start base",
    }.items():
        assert says in " ".join(run("collect", *given, code=2).stderr.split())
