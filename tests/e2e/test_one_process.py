"""A pipeline that trains, merges and saves in one process, with the models as they are in memory."""

import copy
import json
import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import covmerge
from covmerge.errors import CheckpointError, InputError, RecipeError, TensorError
from tests.adapters.models import llama
from tests.advised import advice
from tests.e2e.models import TEXT


def classifier(labels=2):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **TEXT,
            num_hidden_layers=1,
            intermediate_size=24,
            max_position_embeddings=16,
            num_labels=labels,
        )
    )


def trained(model, seed, *, size=0.01):
    """The same model after a small step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def test_a_model_that_was_never_saved_is_of_its_class(tmp_path):
    """Its config says no class, or that of the checkpoint that it began with."""
    base, *experts = classifier(), trained(classifier(), 1), trained(classifier(3), 2)
    assert base.config.architectures is None
    assert not [n for n in covmerge.merge(base, experts).notes if "name rules" in n]
    base.config.architectures = ["BertForMaskedLM"]
    result = covmerge.merge(base, experts)
    assert result.heads.keys() == {"expert1", "expert2"}
    assert not [note for note in result.notes if "name rules" in note]
    saved = result.save(tmp_path / "merged")
    config = json.loads((saved.path / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    loaded = AutoModelForSequenceClassification.from_pretrained(saved.path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in result.tensors.items())


@pytest.mark.parametrize("wrapped", [False, True])
def test_ties_of_a_model_that_was_never_saved(tmp_path, wrapped):
    base = llama(tie_word_embeddings=True)
    apart = llama(tie_word_embeddings=False)
    apart.load_state_dict(base.state_dict())
    trained(apart, 1)
    result = covmerge.merge(
        torch.compile(base, backend="eager") if wrapped else base, [apart], "average"
    )
    assert any("the output does not tie them" in note for note in result.notes)
    saved = result.save(tmp_path / "merged")
    assert not json.loads((saved.path / "config.json").read_text())["tie_word_embeddings"]
    loaded = AutoModelForCausalLM.from_pretrained(saved.path)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(loaded.state_dict()[name], apart.state_dict()[name])


def test_a_saved_model_says_where_its_tokenizer_is_to_come_from(tmp_path):
    result = covmerge.merge(classifier(), [trained(classifier(), 1)]).save(tmp_path / "merged")
    said = advice("the output has its config and no tokenizer; put one beside it, `tokenizer.save_")
    (note,) = [note for note in result.notes if "tokenizer" in note]
    assert re.search(said, note)
    (result.path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nword\n")
    transformers.BertTokenizer(str(result.path / "vocab.txt")).save_pretrained(result.path)
    assert covmerge.verify(result.path).ok
    assert transformers.AutoTokenizer.from_pretrained(result.path).tokenize("word") == ["word"]


def test_what_storing_loses_is_warned_of_in_memory_too(tmp_path):
    """As on disk: a base in bfloat16 takes nothing of a small step in float32."""
    base, experts = classifier().bfloat16(), [trained(classifier(), n, size=1e-6) for n in (1, 2)]
    for result in (
        covmerge.merge(base, experts, "average"),
        covmerge.merge(base, experts, "average", tmp_path / "merged"),
    ):
        (warned,) = result.warnings
        assert re.search(advice("of the merged update's norm: store it in float32"), warned)
        assert 'out_dtype="float32"' in warned
    assert "see what is said of rounding" in repr(result.verification)
    kept = covmerge.merge(base, experts, "average", out_dtype="float32")
    assert not kept.warnings and kept.stats["totals"]["rounding_loss"] < 1e-3
    for name, tensor in kept.tensors.items():
        wanted = sum(expert.state_dict()[name] for expert in experts) / 2
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-7)


def adapted(model, seed):
    """A LoRA as PEFT trains it."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, about transformers
@pytest.mark.parametrize("as_transformers", [False, True])
def test_what_is_trained_beside_an_adapter_is_not_dropped(as_transformers, any_peft):
    base = llama()
    model = adapted(copy.deepcopy(base), 1)
    if as_transformers:
        model = copy.deepcopy(base)
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    covmerge.merge(base, [model], "average")
    norm = next(p for name, p in model.named_parameters() if name.endswith("model.norm.weight"))
    norm.requires_grad_(True)
    norm.data += 0.5
    said = advice(
        "beside its adapter, which is no part of it: pass model.merge_and_unload() to merge"
    )
    with pytest.raises(CheckpointError, match=said) as error:
        covmerge.merge(base, [model], "average")
    assert "model.norm.weight" in str(error.value) and "peft_config['default']" in str(error.value)
    pair = (get_peft_model_state_dict(model), model.peft_config["default"])
    without = covmerge.merge(base, [pair], "average").tensors
    torch.testing.assert_close(without["model.norm.weight"], base.state_dict()["model.norm.weight"])
    if not as_transformers:
        whole = covmerge.merge(base, [model.merge_and_unload()], "average").tensors
        torch.testing.assert_close(whole.pop("model.norm.weight"), norm.data)
        for name, tensor in whole.items():
            torch.testing.assert_close(tensor, without[name])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, about transformers
def test_a_pair_takes_the_peft_config_of_its_model():
    """As the error says that a state dict with an adapter inside gives."""
    base = llama()
    model = adapted(copy.deepcopy(base), 1)
    with pytest.raises(
        InputError, match=advice("(get_peft_model_state_dict(model), its peft_config)")
    ):
        covmerge.merge(base, [model.state_dict()])
    own = covmerge.merge(base, [(get_peft_model_state_dict(model), model.peft_config)]).tensors
    wanted = covmerge.merge(base, [model]).tensors
    assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    tensors = get_peft_model_state_dict(model, adapter_name="default")
    with pytest.raises(
        CheckpointError, match=advice("pass that of its own, model.peft_config[NAME]")
    ):
        covmerge.merge(base, [(tensors, model.peft_config)])
    covmerge.merge(base, [(tensors, model.peft_config["default"])])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, about transformers
def test_an_adapter_in_a_model_of_another_base_stops_a_merge(tmp_path):
    """Of one in files nobody can tell."""
    base, other = llama(), llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    right, wrong = adapted(copy.deepcopy(base), 1), adapted(copy.deepcopy(other), 2)
    experts = {"right": right, "wrong": wrong}
    said = advice("with the base's (median of {}). Pass the base that it was trained over")
    with pytest.raises(InputError, match=said) as error:
        covmerge.merge(base, experts)
    assert str(error.value).startswith("not-a-fine-tune: expert 'wrong'")
    (fault,) = covmerge.inspect(base, experts).faults
    assert fault.name == "not-a-fine-tune" and fault.expert == "wrong"
    covmerge.merge(other, {"wrong": wrong})
    covmerge.merge(base, experts, allow=["not-a-fine-tune"])
    covmerge.merge(base.bfloat16(), {"right": right}, out_dtype="float32")
    right.merge_adapter()
    covmerge.merge(base, {"right": right}, out_dtype="float32")
    covmerge.merge(base, experts, form="adapter", out=tmp_path / "adapter")


def state(value=0.0):
    return {"fc.weight": torch.full((4, 4), 1.0) + value * torch.eye(4)}


def test_a_result_that_was_changed_is_not_saved_as_it_was(tmp_path):
    said = advice("changed since the merge: merge again, or write the tensors yourself")

    def refused(result):
        with pytest.raises(InputError, match=said) as error:
            result.save(tmp_path / "merged")
        assert "'fc.weight'" in str(error.value)

    result = covmerge.merge(state(), [state(1), state(2)])
    result.tensors["fc.weight"].mul_(2)
    refused(result)
    result = covmerge.merge(state(), [state(1), state(2)])
    kept = result.tensors["fc.weight"]
    result.tensors["fc.weight"] = torch.zeros(4, 4)
    refused(result)
    del result.tensors["fc.weight"]
    refused(result)
    result.tensors["fc.weight"] = kept
    assert result.save(tmp_path / "merged").verification.ok


class Holder:
    """As a Trainer of transformers, or a module of Lightning that is none of torch."""

    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize(
    ("given", "said", "instead"),
    [
        (
            {"model": state(2), "epoch": 3},
            advice("where its tensors lie below '{}', pass that entry alone"),
            state(2),
        ),
        ({**state(2), "step": 3}, advice("leave it out, and pass tensors alone"), state(2)),
        (
            {"fc.weight": state(2)["fc.weight"].numpy()},
            advice("pass torch.from_numpy of each array"),
            state(2),
        ),
        (Holder(torch.nn.Linear(4, 4)), advice("pass the model in it, its `model`"), None),
        (
            None,
            advice("is None: pass a folder, a file, org/name, a state dict or a module"),
            state(2),
        ),
        (
            {"fc.weight": torch.ones(4, 4, device="meta")},
            advice("is on the device meta, which holds no values: load its weights first"),
            state(2),
        ),
    ],
)
def test_what_is_no_state_dict_is_told_what_to_pass(given, said, instead):
    with pytest.raises(InputError, match=said):
        covmerge.merge(state(), [given, state(1)], "average")
    if instead is not None:
        covmerge.merge(state(), [instead, state(1)], "average")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_a_model_that_torch_quantised():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    packed = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), dtype=torch.qint8)
    with pytest.raises(
        CheckpointError, match=advice("pass the model as it was before it was quantised")
    ):
        covmerge.merge(plain, [packed], "average")


def test_an_output_folder_in_the_place_of_the_method(tmp_path):
    for where in (tmp_path / "merged", str(tmp_path / "merged")):
        with pytest.raises(RecipeError, match=advice("which reads like a folder: pass it as out=")):
            covmerge.merge(state(), [state(1)], where)
    covmerge.merge(state(), [state(1)], out=where)


def test_one_layer_of_what_is_no_list_of_tensors():
    one = torch.eye(2)
    for given in (torch.stack([one, one]), {"a": one}, "ab"):
        with pytest.raises(TensorError, match=advice("pass a list, one tensor an expert")):
            covmerge.merge_layer(given, "average")
    covmerge.merge_layer([one, one], "average")
    with pytest.raises(TensorError, match=advice("pass a tensor, as torch.as_tensor gives it")):
        covmerge.merge_layer([one.numpy(), one.numpy()], "average")
    covmerge.merge_layer([torch.as_tensor(one.numpy())] * 2, "average")


def test_sources_of_a_recipe_are_paths_and_no_models(tmp_path):
    model = torch.nn.Linear(4, 4)
    said = advice(
        "in memory, and a recipe names files: save it (`model.save_pretrained(FOLDER)`), and"
    )
    for given in ({"base": model, "experts": {"a": "a"}}, {"base": "b", "experts": {"a": model}}):
        with pytest.raises(RecipeError, match=said) as error:
            covmerge.search({**given, "method": {"search": ["ties", "average"]}}, len, tmp_path)
        assert len(str(error.value)) < 300
    files = [tmp_path / f"{name}.safetensors" for name in "bac"]
    for number, file in enumerate(files):
        save_file(state(number), file)
    base, one, two = files
    scales = {"scale": {"search": [0.5, 1.0]}}
    recipe = {"base": base, "experts": {"a": one, "c": {"source": two}}, "parameters": scales}
    recipe["method"] = "task_arithmetic"
    found = covmerge.search(recipe, lambda folder: 1.0, tmp_path / "found", trials=2)
    assert found.path == tmp_path / "found"
    best = covmerge.load_recipe(tmp_path / "found" / "best.yml")
    assert best.base == str(base) and best.experts["a"].source == str(one)


def test_a_source_that_was_in_memory_is_not_there_later(tmp_path):
    said = advice("which was in memory then: pass it again, or save it to a folder, and merge that")
    result = covmerge.merge(state(), [state(1)], out=tmp_path / "merged")
    for use in (
        lambda: covmerge.run_recipe(result.recipe, None),
        lambda: covmerge.report(tmp_path / "merged"),
    ):
        with pytest.raises(InputError, match=said):
            use()
    save_file(state(), tmp_path / "base.safetensors")
    save_file(state(1), tmp_path / "one.safetensors")
    files = tmp_path / "base.safetensors", [tmp_path / "one.safetensors"]
    again = covmerge.merge(*files, out=tmp_path / "of-files")
    covmerge.run_recipe(again.recipe, None)
    covmerge.report(tmp_path / "of-files")


def test_a_function_that_scores_is_told_what_to_give(tmp_path):
    def nothing(folder):
        return None

    with pytest.warns(UserWarning, match="have it give a number, or"):
        covmerge.compare(state(), [state(1)], ["average"], tmp_path / "a", score=nothing)
    with pytest.warns(UserWarning, match=advice("gave {} tasks: have it give {}")):
        covmerge.compare(state(), [state(1)], ["average"], tmp_path / "b", score=lambda f: {})
    found = covmerge.compare(
        state(), [state(1)], ["average"], tmp_path / "c", score=lambda folder: {"a": 1}, bounds=True
    )
    said = advice("or save a model in memory")
    assert [note for note in found.notes if re.search(said, note)]


def test_a_progress_that_cannot_show_it():
    with pytest.raises(InputError, match="progress: a bool cannot show it: pass a function"):
        covmerge.merge(state(), [state(1)], progress=True)


def test_a_classifier_again(tmp_path):
    """Of a merge that has its base's head: as docs/full-models.md has it, and in memory."""
    base, one, two = classifier(), trained(classifier(), 1), trained(classifier(3), 2)
    result = covmerge.merge(base, {"one": one, "two": two})
    result.save(tmp_path / "merged")
    own = one.state_dict()
    heads = [name for name in own if name.startswith("classifier.")]
    wanted = {**result.tensors, **{name: own[name] for name in heads}}

    def again(**more):
        made = {"merged": tmp_path / "merged"}
        return covmerge.merge(one, made, "passthrough", tensors={"missing": "base"}, **more)

    said = advice(
        "is a merge with the task head of its base in {}, which nobody trained: each expert's"
    )
    (warned,) = again().warnings
    assert re.search(said, warned)
    rules = [{"match": name, "use": "base"} for name in heads]
    assert json.dumps(rules) in warned
    found = again(rules=rules)
    assert not found.warnings
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, wanted[name])
    held = result.tensors | result.heads["one"]
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
    one.load_state_dict(held)


def test_an_output_is_verified_against_models_in_memory(tmp_path):
    base, one = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    one.load_state_dict(base.state_dict())
    trained(one, 1)
    result = covmerge.merge(base, [one], out=tmp_path / "merged")
    covmerge.merge(base, [one]).save(tmp_path / "saved")
    for folder in (tmp_path / "merged", tmp_path / "saved"):
        for given in (base, base.state_dict()):
            checks = {check.name: check for check in covmerge.verify(folder, base=given).checks}
            assert checks["copied"].made and all(check.ok for check in checks.values())
        assert not next(c for c in covmerge.verify(folder).checks if c.name == "copied").made
    with pytest.raises(InputError, match="is not the base that"):
        covmerge.verify(tmp_path / "merged", base=one)
    assert not covmerge.verify(
        tmp_path / "saved", base=one
    ).ok  # its hash is not known: values tell
    with pytest.raises(
        InputError, match=advice("pass the folder of an output, as result.path is of a")
    ):
        covmerge.verify(result)
    assert covmerge.verify(result.path).ok
