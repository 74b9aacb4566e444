"""The output's tokenizer files and chat template, and tokenizers of other kinds."""

import json
import shutil

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file

from covmerge.errors import InputError, RecipeError
from covmerge.front.api import plan_recipe, run_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.vocabulary.files import FORMATS, template_of
from tests.adapters.models import save
from tests.mergekit.token_cases import HELLO, WORDS, ids_of, save_model

CHAT = [
    {"role": "user", "content": " a "},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


@pytest.fixture
def models(tmp_path):
    for name in ("base", "t0", "t1", "t2"):
        save_model(tmp_path / name, "llama", name, WORDS[name])
    return tmp_path


BASE = {"source": "base"}


def recipe(models, experts=("t0", "t1"), **given):
    paths = {name: str(models / name) for name in experts}
    return parse_recipe(
        {"base": str(models / "base"), "experts": paths, "method": "average", **given}
    )


def rendered(folder, chat=CHAT, **given):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(chat, tokenize=False, **given)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("auto", "<s>[user]  a [assistant] b[user] c"),  # of t0 and t1, but for blanks around it
        ("t0", "<s>[user]  a [assistant] b[user] c"),
        ("base", "base:  a "),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", " a ;b;c;"),
        (
            "chatml",
            "<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_chat_templates(template, text, models):
    run_recipe(recipe(models, tokenizer=BASE, chat_template=template), models / "out")
    assert rendered(models / "out", add_generation_prompt=True) == text
    assert "chat_template" not in json.loads((models / "out/tokenizer_config.json").read_text())
    # All else is the base's.
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (models / "out" / name).read_bytes() == (models / "base" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "alpaca",
            "\n\n### Instruction:\na\n\n### Response:\nb\n\n### Instruction:\nc### Response:\n",
        ),
        (
            "exaone",
            "[|system|][|endofturn|]\n[|user|] a \n[|assistant|]b[|endofturn|]\n[|user|]c\n[|assistant|]",
        ),
        (
            "llama3",
            "<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s> [INST]  a  [/INST] b</s> [INST] c [/INST]"),
    ],
)
def test_formats(name, text, models):
    given = {"chat_template": FORMATS[name], "add_generation_prompt": True}
    assert rendered(models / "base", **given) == text
    system = [{"role": "system", "content": "S"}, *CHAT]
    assert "S" in rendered(models / "base", system, **given)


def test_a_template_replaces_all_that_the_base_has(models):
    base = models / "base"
    (base / "chat_template.jinja").write_text("x{{ messages }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert template_of(base) == "x{{ messages }}"
    run_recipe(recipe(models, ("t0",), chat_template="chatml"), models / "out")
    assert (models / "out" / "chat_template.jinja").read_text() == FORMATS["chatml"]
    assert not (models / "out" / "additional_chat_templates").exists()
    run_recipe(recipe(models, ("t0",)), models / "plain")
    assert (models / "plain" / "additional_chat_templates" / "tools.jinja").is_file()


def test_of_several_templates_the_default_is_the_models(models):
    file = models / "t2" / "tokenizer_config.json"
    named = [{"name": "tools", "template": "{{ t }}"}, {"name": "default", "template": HELLO}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    assert template_of(models / "t2") == HELLO


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "chatmel",
            r"chat_template is 'chatmel'; it is one of auto, base, .* Did you mean 'chatml'",
        ),
        ("t9", "chat_template is 't9'"),
    ],
)
def test_templates_that_are_refused(template, said, models):
    with pytest.raises(RecipeError, match=said):
        recipe(models, chat_template=template)


def test_a_model_without_a_template(models):
    with pytest.raises(InputError, match="chat_template is that of 't2', which has none"):
        plan_recipe(recipe(models, ("t0", "t2"), chat_template="t2"))
    for name in ("base", "t0"):
        (models / name / "tokenizer_config.json").unlink()
    for name in ("base", "t0", "t2"):
        (models / name / "tokenizer.json").write_text('{"of": "no kind"}')  # and is not looked into
    given = recipe(models, ("t0",), chat_template="auto")
    assert "no chat template: none of the models has one" in run_recipe(given, None).notes


def test_added_tokens_are_in_the_config_where_the_bases_are(models):
    file = models / "base" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    one = {"content": "</s>", "special": True, "lstrip": False, "normalized": False}
    config |= {"added_tokens_decoder": {"2": {**one, "rstrip": False, "single_word": False}}}
    config["mine"] = "kept"
    file.write_text(json.dumps(config))
    (models / "base" / "added_tokens.json").write_text("{}")
    result = run_recipe(recipe(models, tokenizer={"source": "union"}), models / "out")
    told = json.loads((models / "out" / "tokenizer_config.json").read_text())
    assert told["added_tokens_decoder"]["24"]["content"] == "<|im_end|>"
    assert told["mine"] == "kept"
    theirs, ours = (
        json.loads((models / own / "tokenizer.json").read_text()) for own in ("base", "out")
    )
    assert [one["content"] for one in ours.pop("added_tokens")[-2:]] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    theirs.pop("added_tokens")
    assert ours == theirs
    assert not (models / "out" / "added_tokens.json").exists()
    assert any("2 tokens are added to the tokenizer of the base" in note for note in result.notes)
    assert len(transformers.AutoTokenizer.from_pretrained(models / "out")) == 25


def test_files_of_older_tokenizers(models):
    """GPT-2's vocab.json and merges.txt: the union is written as a tokenizer.json."""
    base = models / "base"
    (base / "tokenizer.json").unlink()
    tokens = {token: number for number, token in enumerate(WORDS["base"].tokens)}
    (base / "vocab.json").write_text(json.dumps(tokens))
    (base / "merges.txt").write_text("#version: 0.2\na b\nc d\ne f\ng h\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>", "eos_token": "</s>"}
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    run_recipe(recipe(models, ("t1",), tokenizer={"source": "union"}), models / "out")
    assert not (models / "out" / "vocab.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "out")
    ids = tokenizer("abk<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "k", "<|im_end|>"]
    found = load_file(models / "out" / "model.safetensors")["lm_head.weight"]
    theirs = load_file(models / "t1" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(found[ids[-1]], theirs[ids_of(models / "t1")["<|im_end|>"]])


def test_code_of_a_tokenizer_is_never_run(models):
    ran = models / "ran"
    for name in ("base", "t1"):
        (models / name / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
        file = models / name / "tokenizer_config.json"
        config = {**json.loads(file.read_text()), "tokenizer_class": "Mine"}
        file.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}))
    run_recipe(recipe(models, tokenizer={"source": "union"}), models / "out")
    assert not ran.exists()
    assert set(ids_of(models / "out")) == {*WORDS["t1"].tokens}
    (models / "t1" / "tokenizer.json").unlink()
    (models / "t1" / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(
        InputError, match="transformers cannot load its tokenizer without running code"
    ):
        plan_recipe(recipe(models, tokenizer={"source": "union"}))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_text("{"), "not valid JSON"),
        (lambda file: file.write_text('{"model": {}, "model": {}}'), "has the key 'model' twice"),
        (
            lambda file: file.write_text('{"version": "1.0"}'),
            "transformers cannot load its tokenizer",
        ),
        (lambda file: (file.unlink(), file.symlink_to("/etc/hostname")), "outside its folder"),
        (
            lambda file: file.write_text(file.read_text().replace('"p": 18', '"p": 2000000000')),
            "one of them the number 2000000000|cannot load",
        ),
    ],
)
def test_tokenizers_of_strangers(change, said, models):
    change(models / "t1" / "tokenizer.json")
    with pytest.raises(InputError, match=said):
        plan_recipe(recipe(models, tokenizer={"source": "t1"}))


def test_a_tokenizer_that_changes_before_it_is_written(models, monkeypatch):
    given = recipe(models, tokenizer={"source": "t1"})
    from covmerge.front import job

    def changed(*_):
        shutil.copy(models / "t2" / "tokenizer.json", models / "t1" / "tokenizer.json")
        return False

    monkeypatch.setattr(job, "check_not_input", changed)
    with pytest.raises(InputError, match=r"t1/tokenizer.json changed while it was in use"):
        run_recipe(given, models / "out")
    assert not (models / "out").exists()


def test_adapters(models):
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "base")
    save(
        model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False), models / "lora"
    )
    run_recipe(recipe(models, ("lora", "t1"), tokenizer={"source": "union"}), models / "out")
    found, ids = load_file(models / "out" / "model.safetensors"), ids_of(models / "out")
    rows = {
        n: load_file(models / n / "model.safetensors")["lm_head.weight"] for n in ("base", "t1")
    }
    torch.testing.assert_close(found["lm_head.weight"][3], (rows["base"][3] + rows["t1"][3]) / 2)
    torch.testing.assert_close(found["lm_head.weight"][ids["<|im_end|>"]], rows["t1"][24])
    fresh = transformers.AutoModelForCausalLM.from_pretrained(models / "base")
    save(
        fresh, LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False), models / "head"
    )
    with pytest.raises(
        InputError, match=r"'head' .* updates 'lm_head.weight', whose rows are other"
    ):
        plan_recipe(recipe(models, ("head", "t1"), tokenizer={"source": "union"}))
    run_recipe(recipe(models, ("head", "t1"), tokenizer=BASE), None)
