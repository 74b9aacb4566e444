"""Faults that make a merge worthless stop it, by name, before anything is published."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.errors import InputError, RecipeError
from covmerge.files.checkpoints.journal import Journal
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build, fine_tuned
from tests.inspection import faults
from tests.inspection.faults import change

NAMES = ("a", "b")


@pytest.fixture
def models(tmp_path):
    """A base, and two experts that fit it."""
    return save("bert", tmp_path)


def save(name, folder):
    base = build(name)
    base.save_pretrained(folder / "base")
    for seed, expert in enumerate(NAMES, start=1):
        fine_tuned(base, seed, scale=0.002).save_pretrained(folder / expert)
    return folder


def experts(folder):
    return {name: folder / name for name in NAMES}


def flags(folder):
    return ["--base", folder / "base", *(f"--expert={n}={folder / n}" for n in NAMES)]


def nothing_is_left(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "base"]


def stopped(folder, name, **given):
    """Every kind of merge stops; return what the last said."""
    runs = {
        "to disk": lambda: covmerge.merge(
            folder / "base", experts(folder), "average", folder / "out", **given
        ),
        "in memory": lambda: covmerge.merge(folder / "base", experts(folder), "ties", **given),
        "compared": lambda: covmerge.compare(
            folder / "base", experts(folder), ["average", "ace"], folder / "out", **given
        ),
        "to an adapter": lambda: covmerge.merge(
            folder / "base",
            experts(folder),
            "average",
            folder / "out",
            form="adapter",
            rank=2,
            **given,
        ),
    }
    for what, run in runs.items():
        with pytest.raises(InputError) as caught:
            run()
        text = str(caught.value)
        assert f"{name}: expert 'b': " in text and f'allow=["{name}"]' in text, (what, text)
        nothing_is_left(folder)
    return text


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_an_expert_of_another_base(family, tmp_path):
    models = save(family, tmp_path)
    faults.of_another_base(models / "base", models / "b")
    text = stopped(models, "not-a-fine-tune")
    assert "is not a fine-tune of this base" in text and "times their norm" in text
    assert "expert 'a'" not in text


def test_swapped_query_and_key(models):
    faults.swapped_query_and_key(models / "base", models / "b")
    text = stopped(models, "swapped-tensors")
    assert "it is the base's 'encoder.layer.0.attention.self.key.weight'" in text


def test_swapped_query_and_key_in_one_tensor(tmp_path):
    models = save("gpt2", tmp_path)
    faults.swapped_query_and_key(models / "base", models / "b")
    text = stopped(models, "swapped-tensors")
    assert "its q is the base's 'transformer.h.0.attn.c_attn.weight' (k)" in text


def test_an_expert_that_was_never_trained(models):
    shutil.rmtree(models / "b")
    shutil.copytree(models / "base", models / "b")
    assert "equals the base in every tensor" in stopped(models, "unchanged-expert")


def test_an_expert_that_is_the_base_in_half_precision(models):
    """Its rounding is no update: a warning says so, and of a frozen block."""
    build("bert").to(torch.bfloat16).save_pretrained(models / "b")
    warnings = covmerge.merge(models / "base", experts(models)).warnings
    assert any(
        "'b': differs from the base by no more than the rounding" in text for text in warnings
    )
    alike = build("bert")
    with (
        torch.no_grad()
    ):  # errors of equal entries are equal, and may be larger than their deviation
        alike.encoder.layer[0].output.LayerNorm.weight.fill_(1 + 2**-8 - 2**-20)
    alike.save_pretrained(models / "base")
    alike.to(torch.bfloat16).save_pretrained(models / "b")
    found = covmerge.inspect(models / "base", {"b": models / "b"}).findings
    assert any("no more than the rounding" in finding.text for finding in found)
    build("bert").save_pretrained(models / "base")
    frozen = fine_tuned(build("bert"), 1, scale=0.02)
    frozen.encoder.layer[1].load_state_dict(build("bert").encoder.layer[1].state_dict())
    frozen.to(torch.bfloat16).save_pretrained(models / "b")
    warnings = covmerge.merge(models / "base", experts(models)).warnings
    assert any("'b': did not change block 1 of 2" in text for text in warnings)


def test_an_adapter_beside_the_base_itself(models):
    """The model is read: the reason says what was not."""
    shutil.rmtree(models / "b")
    shutil.copytree(models / "base", models / "b")
    shutil.copy(models / "a" / "model.safetensors", models / "b" / "adapter_model.safetensors")
    text = stopped(models, "unchanged-expert")
    assert "model.safetensors was read, and not adapter_model.safetensors)" in text


def test_all_experts_equal_the_base(models):
    for name in NAMES:
        shutil.rmtree(models / name)
        shutil.copytree(models / "base", models / name)
    with pytest.raises(InputError, match=r"unchanged-expert: expert 'a'.*\n.*'b'"):
        covmerge.merge(models / "base", experts(models), "average", models / "out")
    nothing_is_left(models)


def test_a_whole_model_extracted_over_a_wrong_base(models):
    faults.of_another_base(models / "base", models / "b")
    with pytest.raises(InputError, match="not-a-fine-tune"):
        covmerge.extract(models / "base", models / "b", models / "out", rank=2)
    nothing_is_left(models)
    given = {"rank": 2, "allow": ["not-a-fine-tune"]}
    assert covmerge.extract(models / "base", models / "b", models / "out", **given).warnings


def test_what_is_allowed_is_a_warning_and_recorded(models):
    faults.of_another_base(models / "base", models / "b")
    out = models / "out"
    refused = command("merge", *flags(models), "--method=average", out, code=2)
    assert "not-a-fine-tune: expert 'b'" in words(refused.stderr)
    nothing_is_left(models)
    allow = "--allow=not-a-fine-tune"
    ran = command("merge", *flags(models), "--method=average", allow, out)
    assert "warning" in ran.stdout and "which is allowed" in words(ran.stdout)
    manifest = json.loads((out / "covmerge.json").read_text())
    assert manifest["recipe"]["allow"] == ["not-a-fine-tune"]
    assert "expert 'b': is not a fine-tune" in manifest["warnings"][0]
    compared = command("compare", *flags(models), "--methods=average", allow)
    assert "which is allowed" in words(compared.stdout)


def test_an_unknown_name_is_an_error_with_the_nearest(models):
    with pytest.raises(RecipeError, match="Did you mean 'not-a-fine-tune'"):
        covmerge.merge(models / "base", experts(models), allow=["not-a-finetune"])
    error = command("merge", *flags(models), "--allow=swapped", models / "out", code=2).stderr
    assert "Did you mean 'swapped-tensors'?" in words(error)


def test_a_resumed_merge_judges_the_same(models, monkeypatch):
    faults.of_another_base(models / "base", models / "b")
    append, written = Journal.append, []

    def until_most_are_done(self, entry):
        append(self, entry)
        written.append(entry)
        if len(written) == 20:
            raise KeyboardInterrupt

    run = (models / "base", experts(models), "average", models / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", until_most_are_done)
        with pytest.raises(KeyboardInterrupt):
            covmerge.merge(*run)
    with pytest.raises(InputError) as resumed:
        covmerge.merge(*run, resume=True)
    with pytest.raises(InputError) as whole:
        covmerge.merge(*run)
    assert str(resumed.value) == str(whole.value)
    nothing_is_left(models)


def test_warnings_are_said(models):
    faults.one_frozen_block(models / "base", models / "b")
    change(
        models / "a", lambda tensors: further(tensors, load_file(models / "base" / faults.WEIGHTS))
    )
    result = covmerge.merge(models / "base", experts(models), "average", models / "out")
    text = " ".join(result.warnings)
    assert "expert 'b': did not change block 1 of 2" in text
    assert "'a' moved" in text and "times as far as 'b'" in text


def further(tensors, base, times=20.0):
    for name, tensor in tensors.items():
        tensors[name] = base[name] + times * (tensor - base[name])


# What must not be refused.


def test_an_expert_that_was_trained_hard(tmp_path):
    """Of a step as long as the weights, W_t has a cosine of 0.7 with W_0."""
    generator = torch.Generator().manual_seed(0)

    def drawn():
        return {f"layers.{n}.fc.weight": torch.randn(16, 16, generator=generator) for n in range(4)}

    base, step = drawn(), drawn()
    hard = {name: base[name] + step[name] for name in base}
    assert covmerge.merge(base, [hard, hard], "average").warnings == ()


def test_a_layer_that_was_trained_anew_is_a_warning(models):
    name = "encoder.layer.1.output.dense.weight"

    def anew(tensors):
        tensors[name] = torch.randn(tensors[name].shape) * tensors[name].std()

    change(models / "b", anew)
    result = covmerge.merge(models / "base", experts(models), "average", models / "out")
    (warning,) = (w for w in result.warnings if name in w)
    assert "is not the base's" in warning and '"use": "base"' in warning
    found = covmerge.inspect(models / "base", experts(models))
    assert not found.faults and any(name in f.text for f in found.findings)


def test_layers_that_are_zero_in_the_base():
    base = {"layers.0.fc.weight": torch.zeros(4, 4), "layers.1.fc.weight": torch.eye(4)}
    expert = {name: value + 0.1 for name, value in base.items()}
    assert covmerge.merge(base, [expert], "average").warnings == ()


def test_values_whose_squares_overflow_float32():
    base = {"fc.weight": torch.full((4, 4), 1e19)}
    experts = [{"fc.weight": base["fc.weight"] * (1 + 2.0**-n)} for n in (8, 9)]
    assert torch.isfinite(covmerge.merge(base, experts, "average").tensors["fc.weight"]).all()


def test_an_expert_of_which_only_the_head_was_trained():
    base = {"model.layers.0.fc.weight": torch.eye(4)}
    probe = {**base, "classifier.weight": torch.ones(2, 4)}
    other = {"model.layers.0.fc.weight": 1.1 * torch.eye(4), "classifier.weight": torch.ones(3, 4)}
    (warning,) = covmerge.merge(base, {"a": probe, "b": other}, "average").warnings
    assert "'a'" in warning and "only its task head is its own" in warning


def test_weights_that_were_multiplied_go_along_the_base_and_are_no_fine_tune(models):
    change(models / "b", lambda tensors: tensors.update({n: 1000 * w for n, w in tensors.items()}))
    assert "update of 999 times their norm" in stopped(models, "not-a-fine-tune")


def test_rows_of_another_vocabulary_are_a_warning(models):
    name = "embeddings.word_embeddings.weight"

    def roll(tensors):
        tensors[name] = tensors[name].roll(7, 0)

    change(models / "b", roll)
    result = covmerge.merge(models / "base", experts(models), "average")
    (warning,) = (text for text in result.warnings if "vocabulary" in text)
    assert f"'{name}' (cosine" in warning and '{"embeddings": "base"}' in warning
    found = covmerge.inspect(models / "base", experts(models)).findings
    assert any("another vocabulary" in finding.text for finding in found)
    usual = covmerge.merge(models / "base", {"a": models / "a"}, "average")
    assert not any("vocabulary" in text for text in usual.warnings)
