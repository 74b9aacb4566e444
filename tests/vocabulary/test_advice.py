"""What errors about vocabularies advise, done literally and followed to a merge that is right."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from covmerge.errors import InputError, TensorError
from covmerge.front.api import plan_recipe, run_recipe
from covmerge.plan.recipe import parse_recipe
from tests.adapters.models import save as save_adapter
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.mergekit.token_cases import WORDS, Words, ids_of, save_model, save_tokenizer
from tests.vocabulary.test_merge import recipe
from tests.vocabulary.test_sentencepiece import LLAMA, MODELS, save
from tests.vocabulary.test_sentencepiece import llama as sentencepiece_llama

HEAD = "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    for name in ("base", "t0", "t1", "t2"):
        save_model(tmp_path / "llama" / name, "llama", name, WORDS[name])
    return tmp_path


def weights(path):
    return load_file(path / "model.safetensors")


def refused(said, given, error=InputError):
    with pytest.raises(error, match=said) as told:
        plan_recipe(given)
    return str(told.value)


def merged(given, out):
    assert run_recipe(given, out).verification.ok
    return weights(out)


def check_row(found, out, token, model):
    """The row of a token that one model has is that model's."""
    own = weights(model)[HEAD][ids_of(model)[token]]
    torch.testing.assert_close(found[HEAD][ids_of(out)[token]], own)


@pytest.mark.parametrize("how", ["its tokenizer", "vocabulary: base"])
def test_an_expert_of_more_rows_without_a_tokenizer(how, folder):
    lone = folder / "llama" / "t1" / "tokenizer.json"
    kept = lone.read_bytes()
    lone.unlink()
    said = advice("out `tokenizer` and merge the rows of the base by --tensors vocabulary=base")
    refused(said, recipe(folder, ("t1",)))
    out = folder / "out"
    if how == "its tokenizer":
        lone.write_bytes(kept)
        check_row(merged(recipe(folder, ("t1",)), out), out, "<|im_end|>", lone.parent)
    else:
        given = recipe(folder, ("t1",), tokenizer=None, tensors={"vocabulary": "base"})
        found = merged(given, out)
        torch.testing.assert_close(found[HEAD], weights(lone.parent)[HEAD][:23])


def test_an_expert_with_other_tokens_of_the_same_numbers(folder):
    order = [*WORDS["base"].order]
    order[-2:] = reversed(order[-2:])
    save_model(folder / "llama" / "t3", "llama", "t3", Words(order))
    given = recipe(folder, ("t0", "t3"), tokenizer=None)
    (note,) = [note for note in plan_recipe(given)[0].notes if "its tokenizer" in note]
    assert note.startswith(
        "expert 't3': its tokenizer differs from the base's: 2 tokens with another"
    )
    assert re.search(advice("{} merges token by token"), note)
    out = folder / "out"
    found = merged(recipe(folder, ("t0", "t3")), out)[HEAD][ids_of(out)[order[-1]]]
    own = [folder / "llama" / name for name in ("t0", "t3")]
    rows = [weights(model)[HEAD][ids_of(model)[order[-1]]] for model in own]
    torch.testing.assert_close(found, (rows[0] + rows[1]) / 2)


def test_a_base_without_a_tokenizer(folder):
    files = [folder / "llama" / name / "tokenizer.json" for name in ("base", "t0")]
    for file in files:
        file.unlink()
    given = recipe(folder, ("t0",))
    refused(
        advice("{} has no tokenizer: save the model with its tokenizer, or leave out `tokenizer`"),
        given,
    )
    found = merged(recipe(folder, ("t0",), tokenizer=None), folder / "out")
    torch.testing.assert_close(found[HEAD], weights(folder / "llama" / "t0")[HEAD])


def test_a_chat_template_without_a_tokenizer(folder):
    (folder / "llama" / "base" / "tokenizer.json").unlink()
    given = recipe(folder, ("t0",), tokenizer=None, chat_template="auto")
    said = advice(
        "has no tokenizer that a chat template could belong to: leave out `chat_template`, or save the"
    )
    refused(said, given)
    merged(recipe(folder, ("t0",), tokenizer=None), folder / "out")
    shutil.copy(folder / "llama/t0/tokenizer.json", folder / "llama/base/tokenizer.json")
    merged(given, folder / "with")


@pytest.mark.parametrize("template", ["t0", "chatml", "{{ messages[0]['content'] }}"])
def test_a_chat_template_of_a_model_that_has_none(template, folder):
    said = advice(
        "chat_template is that of '{}', which has none: name another model, a format, or write the template"
    )
    refused(said, recipe(folder, ("t0", "t2"), chat_template="t2"))
    merged(recipe(folder, ("t0", "t2"), chat_template=template), folder / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    assert "ab" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], tokenize=False
    )


def test_a_source_that_is_an_adapter(folder):
    base = folder / "llama" / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    save_adapter(model, lora, folder / "llama" / "lora")
    experts = ("lora", "t1")
    said = advice(
        "'{}' is an adapter, whose rows are the base's: name the base. For tokens of its own"
    )
    refused(said, recipe(folder, experts, tokenizer={"source": "lora"}))
    tokens = {"<|im_end|>": {"of": "lora"}}
    said = advice(
        "tokenizer.tokens[{}] is of '{}', an adapter, which has the base's tokens: name the base"
    )
    refused(said, recipe(folder, experts, tokenizer={"source": "union", "tokens": tokens}))
    found = merged(recipe(folder, experts, tokenizer={"source": "base"}), folder / "out")
    assert ids_of(folder / "out") == ids_of(base)
    right = (weights(base)[HEAD][5] + weights(folder / "llama" / "t1")[HEAD][5]) / 2
    torch.testing.assert_close(found[HEAD][5], right)


def test_an_adapter_of_the_head_is_folded_first(folder):
    llama = folder / "llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama / "base")
    lora = LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    save_adapter(model, lora, llama / "head")
    said = advice(
        "fold it into its base first (`covmerge merge --base BASE --expert {}=ADAPTER OUT`), and copy"
    )
    told = refused(said, recipe(folder, ("head", "t1")))
    typed = re.search(r"`covmerge ([^`]*)`", told)[1]
    places = {"BASE": llama / "base", "OUT": llama / "folded"}
    words = [str(places.get(w, w)).replace("ADAPTER", str(llama / "head")) for w in typed.split()]
    command(*words)
    found = merged(recipe(folder, ("folded", "t1")), folder / "out")
    right = (weights(llama / "folded")[HEAD][5] + weights(llama / "t1")[HEAD][5]) / 2
    torch.testing.assert_close(found[HEAD][5], right)
    check_row(found, folder / "out", "<|im_end|>", llama / "t1")


def test_an_adapters_own_tokens_go_with_it_once_it_is_folded(folder):
    """Trained in rows that the base has to spare, as those of a padded vocabulary."""
    llama, words = folder / "llama", WORDS["base"]
    save_model(llama / "padded", "llama", "base", replace(words, padding=2))
    model = transformers.AutoModelForCausalLM.from_pretrained(llama / "padded")
    how = {"init_lora_weights": False, "modules_to_save": ["lm_head"]}
    lora = LoraConfig(target_modules=["q_proj"], r=2, **how)
    save_adapter(model, lora, llama / "own")
    save_tokenizer(llama / "own", replace(words, added=("<own>",)))
    file = llama / "own" / "adapter_model.safetensors"
    stored = load_file(file)
    (head,) = (tensor for name, tensor in stored.items() if "lm_head" in name)
    row = head[len(words.order)].fill_(0.25).clone()
    save_file(stored, file)

    alone = recipe(folder, ("own",), base="padded", tokenizer=None)
    (note,) = [note for note in plan_recipe(alone)[0].notes if "its tokenizer" in note]
    assert "1 token added (such as '<own>'). An adapter is merged by the base's" in note
    step = advice(
        "Fold it into its base first, copy its tokenizer's files into that folder, and merge the folder by"
    )
    assert re.search(step, note)
    said = advice("=ADAPTER OUT`), and copy its tokenizer's files into OUT if it has some")
    refused(said, recipe(folder, ("own", "t1"), base="padded"))

    command(
        "merge", "--base", llama / "padded", "--expert", f"own={llama / 'own'}", llama / "folded"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / "own" / name, llama / "folded")
    found = merged(recipe(folder, ("folded", "t1"), base="padded"), folder / "out")
    assert torch.equal(found[HEAD][ids_of(folder / "out")["<own>"]], row)
    check_row(found, folder / "out", "<|im_end|>", llama / "t1")


def test_adapters_over_bases_of_other_sizes(folder):
    """Each of them advised a base that the other then refused."""
    llama, words = folder / "llama", WORDS["base"]
    own = {"one": ("<one>",), "two": ("<a>", "<b>")}
    trained = {}
    for name, tokens in own.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(llama / "base")
        model.resize_token_embeddings(len(words.order) + len(tokens))
        model.save_pretrained(llama / f"new-{name}")
        save_tokenizer(llama / f"new-{name}", replace(words, added=tokens))
        whole = ["embed_tokens", "lm_head"]
        how = {"init_lora_weights": False, "modules_to_save": whole}
        save_adapter(model, LoraConfig(target_modules=["q_proj"], r=2, **how), llama / name)
        save_tokenizer(llama / name, replace(words, added=tokens))
        file = llama / name / "adapter_model.safetensors"
        stored = load_file(file)
        (head,) = (key for key in stored if key.endswith(".lm_head.weight"))
        stored[head] += 0.05 * torch.randn(stored[head].shape)
        trained[name] = stored[head].clone()
        save_file(stored, file)
    said = advice("over the base as it is, by token: --tokenizer union")
    for base in ("base", "new-one"):
        told = refused(said, recipe(folder, ("one", "two"), base=base, tokenizer=None), TensorError)
        typed = re.search(r"instead \(`covmerge ([^`]*)`", told)[1]
        name = "one" if base == "base" else "two"
        places = {"NEW": llama / f"new-{name}", "FOLDED": llama / f"folded-{name}"}
        parts = [str(places.get(w, w)).replace("ADAPTER", str(llama / name)) for w in typed.split()]
        command(*parts)
    found = merged(recipe(folder, ("folded-one", "folded-two")), folder / "out")[HEAD]
    ids = ids_of(folder / "out")
    for name, tokens in own.items():
        for token in tokens:
            row = trained[name][ids_of(llama / name)[token]]
            torch.testing.assert_close(found[ids[token]], row)
    both = (trained["one"][5] + trained["two"][5]) / 2
    torch.testing.assert_close(found[5], both)


def test_an_adapter_without_rows_of_its_tokens_says_so_in_a_union_too(folder):
    llama = folder / "llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama / "base")
    save_adapter(model, LoraConfig(target_modules=["q_proj"], r=2), llama / "own")
    save_tokenizer(llama / "own", replace(WORDS["base"], added=("<own>",)))
    notes = plan_recipe(recipe(folder, ("own", "t1")))[0].notes
    assert [n for n in notes if "expert 'own': its tokenizer" in n and "<own>" in n]
    assert not [n for n in notes if "expert 't1': its tokenizer" in n]


NO_ROW = advice(
    "whose embedding has no row for the token {}: name a model that has it, or another token by"
)
ROWS = [
    ({"x": "t1"}, NO_ROW, {"x": {"of": "t1", "token": "a"}}),
    ({"<tool>": "t1"}, NO_ROW, {"<tool>": "t2"}),
    (
        {"x": {"of": "t1", "id": 25}},
        advice("which has {} rows: name a smaller `id`"),
        {"x": {"of": "t1", "id": 24}},
    ),
]


@pytest.mark.parametrize(("tokens", "said", "advised"), ROWS)
def test_rows_that_no_model_has(tokens, said, advised, folder):
    with pytest.raises(InputError, match=said):
        plan_recipe(recipe(folder, tokenizer={"source": "union", "tokens": tokens}))
    given = recipe(folder, tokenizer={"source": "union", "tokens": advised})
    found = merged(given, folder / "out")
    (token, rule), t1 = *advised.items(), folder / "llama" / "t1"
    if isinstance(rule, dict):
        own = rule.get("id", ids_of(t1).get(rule.get("token")))
        row = found[HEAD][ids_of(folder / "out")[token]]
        torch.testing.assert_close(row, weights(t1)[HEAD][own])


def test_a_row_that_the_dtype_of_another_cannot_hold(folder):
    for name, dtype, length in (("base", torch.float16, 1.0), ("t1", torch.float32, 1e6)):
        file = folder / "llama" / name / "model.safetensors"
        held = {
            n: (t * (length if n == HEAD else 1.0)).to(dtype) for n, t in load_file(file).items()
        }
        save_file(held, file, {"format": "pt"})
    said = advice(
        "would get rows of other models that its dtype cannot hold ({}): store the model in another dtype"
    )
    allow = {"allow": ["not-a-fine-tune"]}
    with pytest.raises(TensorError, match=said):
        run_recipe(recipe(folder, ("t1",), **allow), folder / "out")
    file = folder / "llama" / "base" / "model.safetensors"
    save_file({n: t.float() for n, t in load_file(file).items()}, file, {"format": "pt"})
    run_recipe(recipe(folder, ("t1",), **allow), folder / "out")


def test_code_of_a_tokenizer_is_saved_plain(folder):
    t1 = folder / "llama" / "t1"
    plain = (t1 / "tokenizer.json").read_bytes()
    (t1 / "tokenizer.json").write_text('{"version": "1.0"}')
    said = advice(
        "transformers cannot load its tokenizer without running code of its own ({}): save it with a plain"
    )
    refused(said, recipe(folder, ("t1",)))
    (t1 / "tokenizer.json").write_bytes(plain)
    check_row(merged(recipe(folder, ("t1",)), folder / "out"), folder / "out", "<|im_end|>", t1)


def test_a_number_beyond_all_rows_is_corrected(folder):
    file = folder / "llama" / "t1" / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"p": 18', '"p": 2000000'))
    said = advice(": its tokenizer has {} tokens, and one of them the number {}: correct {}")
    refused(said, recipe(folder, ("t1",), tokenizer={"source": "t1"}))
    file.write_text(text)
    merged(recipe(folder, ("t1",), tokenizer={"source": "t1"}), folder / "out")


# By SentencePiece, which has no tokenizer.json.


def pieces(folder, rows=345, added=None, **config):
    """A base, and an expert with an odd added_tokens.json."""
    pytest.importorskip("sentencepiece")
    save(folder / "a", sentencepiece_llama, "llama", 340, LLAMA)
    save(folder / "b", sentencepiece_llama, "llama", rows, LLAMA | config)
    if added is not None:
        (folder / "b" / "added_tokens.json").write_text(added)


def union(folder, source="union"):
    experts = {name: str(folder / name) for name in ("a", "b")}
    given = {"base": None, "experts": experts, "method": "linear"}
    return parse_recipe(given | {"tokenizer": {"source": source}})


LISTED = {"added_tokens_decoder": {"x": {"content": "<x>", "special": True}}}
ADDED = {
    "an empty text": (
        advice("gives the empty text the number {}, and no token is empty: remove it"),
        {"added": '{"": 341, "<x>": 340}'},
    ),
    "no number": (
        advice(
            "is a whole number from 0, such as 340: correct it, or save the tokenizer with a tokenizer.json"
        ),
        {"added": '{"<x>": "340"}'},
    ),
    "one number twice": (
        advice("the same number {}: correct it, or save the tokenizer with a tokenizer.json"),
        {"added": '{"<x>": 340, "<y>": 340}'},
    ),
    "a list": (
        advice(
            "gives added_tokens_decoder {}, and it is an object of numbers and their tokens: correct it"
        ),
        {"added_tokens_decoder": ["<x>"]},
    ),
    "a name": (
        advice("gives {} the number {}, which is none: correct it"),
        LISTED,
    ),
    "another number": (
        advice("Save the tokenizer with a {} that has these numbers, or leave out `tokenizer`"),
        {"added": '{"<x>": 344}'},
    ),
}


@pytest.mark.parametrize("how", ["correct", "tokenizer.json"])
@pytest.mark.parametrize(("said", "given"), ADDED.values(), ids=ADDED)
def test_odd_added_tokens(said, given, how, tmp_path):
    pieces(tmp_path, **given)
    with pytest.raises(InputError, match=said):
        plan_recipe(union(tmp_path))
    if how == "correct":
        (tmp_path / "b" / "added_tokens.json").write_text('{"<x>": 340}')
        save(tmp_path / "b", sentencepiece_llama, "llama", 345, LLAMA)
    else:
        (tmp_path / "b" / "added_tokens.json").unlink(missing_ok=True)
        save(tmp_path / "b", sentencepiece_llama, "llama", 345, LLAMA)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
        tokenizer.save_pretrained(tmp_path / "b")
        (tmp_path / "b" / "tokenizer.model").unlink()
    found = merged(union(tmp_path), tmp_path / "out")
    own = weights(tmp_path / "b")["model.embed_tokens.weight"]
    number = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(
        "<x>"
    )
    torch.testing.assert_close(found["model.embed_tokens.weight"][number], own[340])


def test_leaving_out_the_tokenizer_ends_with_the_rows_of_the_base(tmp_path):
    pieces(tmp_path, added='{"<x>": 344}')
    given = {
        "base": str(tmp_path / "a"),
        "experts": {"b": str(tmp_path / "b")},
        "method": "average",
    }
    given |= {"allow": ["not-a-fine-tune"]}  # it is made at random
    refused(
        advice("set --tensors vocabulary=base to merge the rows of the base"),
        parse_recipe(given),
    )
    found = merged(parse_recipe(given | {"tensors": {"vocabulary": "base"}}), tmp_path / "out")
    table = "model.embed_tokens.weight"
    torch.testing.assert_close(found[table], weights(tmp_path / "b")[table][:340])


def test_mistrals_other_file_is_copied(tmp_path):
    pieces(tmp_path, rows=340)
    plain = tmp_path / "b" / "tokenizer.model"
    plain.rename(tmp_path / "b" / "tokenizer.model.v3")
    said = advice(
        "transformers reads none of this name: copy it to {} beside it, or save the model with a {}"
    )
    refused(said, union(tmp_path))
    shutil.copy(tmp_path / "b" / "tokenizer.model.v3", plain)
    merged(union(tmp_path), tmp_path / "out")


@pytest.mark.parametrize("how", ["fetch", "plain"])
def test_a_file_that_is_no_model_of_sentencepiece(how, tmp_path):
    pieces(tmp_path, rows=340)
    plain = tmp_path / "b" / "tokenizer.model"
    plain.write_bytes(b"")
    refused(
        advice("is no SentencePiece model ({}): fetch it again, or save it with a plain"),
        union(tmp_path),
    )
    shutil.copy(MODELS / "llama.model", plain)
    if how == "plain":
        transformers.AutoTokenizer.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "b")
        plain.unlink()
    merged(union(tmp_path), tmp_path / "out")


def test_pieces_are_not_added_where_a_model_is_named(tmp_path):
    pytest.importorskip("sentencepiece")
    save(tmp_path / "a", sentencepiece_llama, "llama", 340, LLAMA)
    save(tmp_path / "b", sentencepiece_llama, "llama_other", 340, LLAMA)
    said = re.compile(advice("`source: base`, or of one expert, leaves a model's reading as it is"))
    for source, count in (("union", 1), ("a", 0), ("b", 0)):
        notes = run_recipe(union(tmp_path, source), None).notes
        assert len([note for note in notes if said.search(note)]) == count


def rewritten(folder, name, change, file="tokenizer.json"):
    path = folder / "llama" / name / file
    path.write_text(change(path.read_text()))


def stored(folder, name, change, **config):
    """The tensors of a model, changed, and its config."""
    path = folder / "llama" / name
    tensors = change(weights(path))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    own = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(own))


def test_an_added_token_of_other_settings_is_said(folder):
    given = recipe(folder, ("t0", "t1"))
    said = re.compile(r"added tokens? ha(s|ve) other settings in other models")
    assert not [note for note in plan_recipe(given)[0].notes if said.search(note)]
    turned = {'"lstrip": false': '"lstrip": true', '"lstrip":false': '"lstrip":true'}
    for old, new in turned.items():
        rewritten(folder, "t1", lambda text, old=old, new=new: text.replace(old, new))
    assert [note for note in plan_recipe(given)[0].notes if said.search(note)]


def slow(folder, name):
    """A tokenizer that transformers has in Python alone."""
    path = folder / "llama" / name
    ids = ids_of(path)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(ids))
    own = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": "<unk>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(own))


LONG = {"<|im_start|>": "t1"}
# What is done to a model, what is merged then, what is said, and what is merged in its place.
SOURCES = {
    "no tokenizer": (
        lambda folder: (folder / "llama/t0/tokenizer.json").unlink(),
        {"experts": ("t0", "t1"), "tokenizer": {"source": "t0"}},
        advice("{} has no tokenizer: name another `source` in `tokenizer`"),
        {"experts": ("t0", "t1"), "tokenizer": {"source": "t1"}},
    ),
    "a number that is taken": (
        lambda folder: rewritten(folder, "t2", lambda text: text.replace('"p": 3', '"p": 25')),
        {"experts": ("t1", "t2"), "tokenizer": {"source": "t2", "tokens": LONG}},
        advice("without moving others: take another model's tokenizer by --tokenizer"),
        {"experts": ("t1", "t2"), "tokenizer": {"source": "base", "tokens": LONG}},
    ),
    "no fast tokenizer": (
        lambda folder: slow(folder, "t0"),
        {"experts": ("t0", "t1"), "tokenizer": {"source": "t0", "tokens": LONG}},
        advice("save the model with a {}, or take another model's tokenizer by --tokenizer"),
        {"experts": ("t0", "t1"), "tokenizer": {"source": "base", "tokens": LONG}},
    ),
    "a head of other rows": (
        lambda folder: stored(
            folder, "t0", lambda own: own | {HEAD: own[HEAD][:20]}, vocab_size=None
        ),
        {"experts": ("t0",), "tensors": {"vocabulary": "base"}},
        advice("are not of one number of rows (found: {}): leave out `tokenizer`"),
        {"experts": ("t0",), "tensors": {"vocabulary": "base"}, "tokenizer": None},
    ),
    "columns": (
        lambda folder: stored(folder, "t0", lambda own: own | {"lm_head.bias": torch.zeros(1, 23)}),
        {"experts": ("t0",), "tensors": {"extra": "ignore"}},
        advice("and only rows are merged by token: leave out `tokenizer`"),
        {"experts": ("t0",), "tensors": {"extra": "ignore"}, "tokenizer": None},
    ),
    "a table that one has not": (
        lambda folder: stored(folder, "base", lambda own: own | {"lm_head.bias": torch.ones(23)}),
        {"experts": ("t1",), "tensors": {"missing": "base"}},
        advice("give the tokens rows of another model under `tokenizer: {tokens: ...}`"),
        {
            "experts": ("t1",),
            "tensors": {"missing": "base"},
            "tokenizer": {
                "source": "union",
                "tokens": {"<|im_start|>": {"of": "zero"}, "<|im_end|>": {"of": "zero"}},
            },
        },
    ),
}


@pytest.mark.parametrize(("change", "wrong", "said", "right"), SOURCES.values(), ids=SOURCES)
def test_another_source_or_none(change, wrong, said, right, folder):
    change(folder)
    with pytest.raises(InputError, match=said):
        run_recipe(recipe(folder, **wrong), folder / "wrong")
    merged(recipe(folder, **right), folder / "out")
