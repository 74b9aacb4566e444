"""What lies beside the experts' weights and is not the output's is told, with what to do."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import covmerge
from covmerge.front.api import run_recipe
from covmerge.plan.recipe import parse_recipe
from covmerge.run.judgement.settings import _of_config, other_settings
from covmerge.run.sources import open_recipe
from tests.adapters.models import save as save_adapter
from tests.advised import advice
from tests.cli.runs import covmerge as command
from tests.mergekit.token_cases import HELLO, WORDS, save_model

LOOK = advice("look which of the two the merged model should have")


@pytest.fixture
def folder(tmp_path):
    """A base and two experts with the same tokens, of which one is used as the base is."""
    for name in ("base", "same", "other"):
        model = "base" if name == "base" else "t0"
        save_model(tmp_path / name, "llama", model, replace(WORDS["base"], template=None))
    return tmp_path


def said(folder, *names, **settings):
    """Warnings and notes about experts' files, of a merge to a folder; inspect has the same."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    experts = {name: str(folder / name) for name in names}
    given = {"base": str(folder / "base"), "experts": experts, "method": "average", **settings}
    result = run_recipe(parse_recipe(given), out)
    found = [t for t in (*result.warnings, *result.notes) if "differs" in t or "its c" in t]
    told = [str(f) for f in covmerge.inspect(folder / "base", experts).findings]
    assert "chat_template" in settings or all(text in told for text in found)
    return found


def recipe_of(folder):
    experts = {"other": str(folder / "other")}
    return parse_recipe({"base": str(folder / "base"), "experts": experts, "method": "average"})


def change(file, **values):
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**content, **values}))


def test_an_expert_that_computes_otherwise(folder):
    """As Qwen2.5-Math, whose rope has another base than Qwen2.5: one of the two is wrong."""
    change(folder / "other" / "config.json", rope_theta=1e6, rms_norm_eps=1e-4)
    (text,) = said(folder, "same", "other")
    assert text.startswith("expert 'other': its config.json differs from the base's")
    assert "rms_norm_eps 0.0001 (the output: " in text
    assert "rope_parameters.rope_theta 1000000.0 (the output: 10000.0)" in text
    change(folder / "base" / "config.json", rope_theta=1e6, rms_norm_eps=1e-4)
    shutil.rmtree(folder / "out")
    covmerge.merge(folder / "base", {"other": folder / "other"}, out=folder / "out")
    tokens = torch.tensor([[1, 5, 9, 7]])
    ours, own = (LlamaForCausalLM.from_pretrained(folder / n)(tokens) for n in ("out", "other"))
    torch.testing.assert_close(ours.logits, own.logits)


def test_what_is_written_otherwise_and_is_the_same(folder):
    """By another release of transformers, or of training alone."""
    change(
        folder / "other" / "config.json",
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 4},
        **{"attention_dropout": 0.1, "use_cache": False, "transformers_version": "4.30.0"},
        **{"max_position_embeddings": 999, "use_mrope": False},
    )
    assert said(folder, "same", "other") == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 9.999999747378752e-06}),
        ({"mine": float("nan")}, {"mine": float("nan")}),
        ({"model_max_length": 5, "chunk_size_feed_forward": 0}, {"model_max_length": 6}),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "nobody_knows"])
def test_configs_that_say_the_same_in_other_words(ours, theirs, model_type, folder):
    if "factor" in theirs:
        theirs = {"rope_scaling": theirs}
    change(folder / "base" / "config.json", **ours)
    change(folder / "other" / "config.json", **theirs)
    names = ("base", "other")
    base, other = (json.loads((folder / name / "config.json").read_text()) for name in names)
    kind = {"model_type": model_type}
    assert list(_of_config("other", base | kind, other | kind)) == []


FILES = [
    ("generation_config.json", {"top_k": 7, "temperature": 0.2}, "temperature, top_k"),
    ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pooling_mode"),
]


@pytest.mark.parametrize(("file", "values", "keys"), FILES)
def test_another_use(file, values, keys, folder):
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    if "/" in file:
        modules.append(
            {
                "idx": 1,
                "name": "1",
                "path": "1_Pooling",
                "type": "sentence_transformers.models.Pooling",
            }
        )
        change(folder / "base" / file, pooling_mode="mean", word_embedding_dimension=8)
        for name in ("base", "same", "other"):
            (folder / name / "modules.json").write_text(json.dumps(modules))
    change(folder / "other" / file, **values, transformers_version="4.0")
    (text,) = said(folder, "same", "other")
    assert f"'other': its {file} differs from the base's, which the output has, in {keys}" in text
    assert re.search(LOOK, text)
    shutil.copy(folder / "other" / file, folder / "base" / file)
    assert said(folder, "other") == []
    assert json.loads((folder / "out" / file).read_text())[keys.split(", ")[0]] in values.values()


@pytest.mark.parametrize("file", ["preprocessor_config.json", "sentence_bert_config.json"])
def test_a_file_that_the_output_has_not(file, folder):
    change(folder / "other" / file, image_mean=[0.5, 0.5, 0.5])
    experts = {name: folder / name for name in ("same", "other")}
    notes = covmerge.merge(folder / "base", experts, out=folder / "out").notes
    (text,) = [note for note in notes if file in note]
    copy = advice("has {}, and the output has none: copy it into the output if it is wanted")
    assert re.search(copy, text)
    shutil.copy(folder / "other" / file, folder / "out")
    # A merge in memory has nothing beside it.
    assert not any(file in note for note in covmerge.merge(folder / "base", experts).notes)


@pytest.mark.parametrize("kind", ["a model", "an adapter"])
def test_a_chat_template_that_the_base_lacks(kind, folder):
    if kind == "an adapter":
        model = LlamaForCausalLM.from_pretrained(folder / "base")
        lora = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
        save_adapter(model, lora, folder / "chat")
    else:
        shutil.copytree(folder / "other", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(HELLO)
    (text,) = said(folder, "chat", "same")
    assert text.startswith("expert 'chat': its chat template is not the output's, which has none")
    assert re.search(advice("a recipe's `chat_template: {}` takes it"), text)
    assert said(folder, "chat", "same", chat_template="chat") == []
    assert AutoTokenizer.from_pretrained(folder / "out").chat_template == HELLO.strip()


def test_a_base_without_a_tokenizer(folder):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / file).unlink()
    (folder / "other" / "chat_template.jinja").write_text(HELLO)
    experts = {"other": folder / "other"}
    notes = covmerge.merge(folder / "base", experts, out=folder / "out").notes
    (note,) = [note for note in notes if "tokenizer" in note and note.startswith("expert")]
    said = advice("and the output has none: copy the tokenizer's files into the output")
    assert re.search(said, note)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "other" / file, folder / "out")
    assert AutoTokenizer.from_pretrained(folder / "out").chat_template == HELLO.strip()


def test_a_file_that_cannot_be_read_is_told_and_ends_nothing(folder):
    (folder / "other" / "generation_config.json").write_text("{")
    out = folder / "out"
    experts = {name: folder / name for name in ("same", "other")}
    result = covmerge.merge(folder / "base", experts, "average", out=out)
    assert [
        n for n in result.notes if "'other': settings beside its weights were not compared" in n
    ]


def test_a_file_without_permission_is_told_too(folder, monkeypatch):
    is_file = Path.is_file

    def refused(path, **given):
        if path.name == "generation_config.json":
            raise PermissionError(13, "Permission denied")
        return is_file(path, **given)

    with open_recipe(recipe_of(folder)) as checkpoints:
        monkeypatch.setattr(Path, "is_file", refused)
        (found,) = other_settings(checkpoints)
    assert "were not compared" in str(found) and "Permission denied" in str(found)


@pytest.mark.parametrize("held", ["base", "other"])
def test_what_is_in_memory_has_no_files_to_compare(held, folder):
    change(folder / "other" / "generation_config.json", top_k=7)
    given = {name: folder / name for name in ("base", "other")}
    given[held] = load_file(folder / held / "model.safetensors")
    result = covmerge.merge(given["base"], {"other": given["other"]}, "average")
    assert not any("generation_config.json" in note for note in result.notes)


def test_a_link_out_of_the_folder_is_not_followed(folder):
    (folder / "secret.json").write_text('{"top_secret": 5}')
    (folder / "other" / "generation_config.json").unlink()
    (folder / "other" / "generation_config.json").symlink_to(folder / "secret.json")
    run = command(
        *("merge", "--base", folder / "base", "--expert", f"x={folder / 'other'}", folder / "out")
    )
    assert "were not compared" in run.stdout + run.stderr
    assert "top_secret" not in run.stdout + run.stderr
    assert Path(folder / "out").is_dir()


@pytest.mark.parametrize(
    "more",
    [
        {"slices": [{"experts": {"same": [0, 1]}}, {"experts": {"other": [1, 2]}}]},
        {"moe": {"gates": "random"}},
    ],
    ids=["slices", "mixture"],
)
def test_slices_and_mixtures_of_models_that_compute_otherwise(more, folder):
    """The output has one rope for all layers, so that those of one model are not used as trained."""
    experts = {name: str(folder / name) for name in ("same", "other")}
    given = {"base": str(folder / "base"), "experts": experts, "method": "average", **more}
    assert not run_recipe(parse_recipe(given), folder / "alike").warnings
    change(folder / "other" / "config.json", rope_theta=1e6)
    (text,) = run_recipe(parse_recipe(given), folder / "out").warnings
    assert re.search(LOOK, text)
    assert text.startswith("expert 'other': its config.json differs from the base's")
    assert "rope_parameters.rope_theta 1000000.0 (the output: 10000.0)" in text


NAMED = advice(
    "No number of an adapter tells whether these are one model. If they are two, the merge is worthless: "
    "pass the base that it names. If they are one, write {} there as base_model_name_or_path"
)


def test_an_adapter_that_names_another_base(folder):
    model = LlamaForCausalLM.from_pretrained(folder / "base")
    lora = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    save_adapter(model, lora, folder / "lora")
    config = folder / "lora" / "adapter_config.json"

    def told(base="base", **how):
        shutil.rmtree(folder / "out", ignore_errors=True)
        change(config, **how)
        merged = covmerge.merge(folder / base, {"lora": folder / "lora"}, out=folder / "out")
        found = [str(f) for f in covmerge.inspect(folder / base, [folder / "lora"]).findings]
        texts = [text for text in (*merged.warnings, *merged.notes) if re.search(NAMED, text)]
        assert any(re.search(NAMED, text) for text in found) == bool(texts)
        return [(text in merged.warnings, text) for text in texts]

    # A folder may have any name: beside a name of the Hub it is a note, beside another folder a warning.
    ((warns, text),) = told(base_model_name_or_path="org/other-model")
    assert not warns
    assert f"names the base 'org/other-model', and the base here is {folder / 'base'}" in text
    ((warns, _),) = told(base_model_name_or_path="/data/other-model")
    assert warns
    change(config, base_model_name_or_path="org/other-model")
    shutil.copytree(folder / "base", folder / "other-model")
    assert not told("other-model")
    own = str(folder / "base")
    assert not told(base_model_name_or_path=own)
    for same in ("base", "org/Base", "/data/base/", "org/base@main", None, "unsloth/base-bnb-4bit"):
        assert not told(base_model_name_or_path=same)
    for same in ("/data/base/.", "/home/u@d/base", r"C:\models\base", "org/Meta-base"):
        assert not told(base_model_name_or_path=same)
        assert not told("base/model.safetensors", base_model_name_or_path=same)
    assert not told(base_model_name_or_path="/hub/models--org--base/snapshots/0123456789abcdef")
    change(folder / "base" / "config.json", _name_or_path="org/other-model")
    assert not told(base_model_name_or_path="org/other-model")
    out = folder / "adapter"  # which is loaded over the base that it names
    change(config, base_model_name_or_path="org/third")
    experts = {"lora": folder / "lora"}
    assert not covmerge.merge(folder / "base", experts, out=out, form="adapter").warnings
