"""What an inspection finds in real model files, faults planted in them included."""

import copy
import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.base.findings import Severity
from covmerge.run.experts import check_tokenizers
from covmerge.run.inspection import job
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build, fine_tuned
from tests.e2e.test_adapters import TARGETS, save_adapter
from tests.inspection import faults
from tests.inspection.faults import change

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NAMES = ("a", "b", "c")


@pytest.fixture(params=["llama", "gpt2"])
def family(request, tmp_path):
    return save(request.param, tmp_path)


@pytest.fixture
def bert(tmp_path):
    return save("bert", tmp_path)


def save(name, folder):
    base = build(name)
    base.save_pretrained(folder / "base")
    for seed, expert in enumerate(NAMES, start=1):
        fine_tuned(base, seed, scale=0.02).save_pretrained(folder / expert)
    return folder


def inspect(folder, names=NAMES, **options):
    return covmerge.inspect(folder / "base", {name: folder / name for name in names}, **options)


def test_which_method_a_merge_would_take_and_what_auto_would_do(tmp_path):
    models = save("llama", tmp_path)
    found = inspect(models)
    (text,) = (f.text for f in found.findings if "names no method" in f.text)
    assert text.startswith(
        "a merge that names no method takes auto, as on average it comes nearest"
    )
    merged = covmerge.merge(models / "base", {n: models / n for n in NAMES}, "auto")
    for layer in found.matrices:
        (matrix,) = merged.stats["tensors"][layer.tensor].get("matrices", [{}])
        told = layer.foreseen
        assert bool(told) == ("flat_share" in matrix), layer.name
        if told:
            assert told["h, flat share"] == pytest.approx(matrix["flat_share"], rel=1e-5)
            assert told["N, unlike experts"] == pytest.approx(matrix["unlike_experts"], rel=1e-5)
            assert found.as_json()["layers"][layer.name]["foreseen"] == told
    flags = ["--base", models / "base", *(f"--expert={n}={models / n}" for n in NAMES)]
    assert "What auto would do" not in command("inspect", *flags).stdout
    shown = command("inspect", *flags, "--verbose").stdout
    assert "What auto would do, medians of" in shown
    assert "takes auto, as on average it comes nearest" in words(shown)
    _, _, table = shown.partition("What auto would do")
    assert "self_attn.q_proj" in table and "mlp.down_proj" in table and "flat share" in words(table)
    # One expert is added as it is; without spectra nothing is tried, but the method is said.
    alone = inspect(models, ("a",))
    assert any("takes average, as one expert alone" in f.text for f in alone.findings)
    assert not any(layer.foreseen for layer in alone.matrices)
    few = inspect(models, spectra="none")
    assert any("takes auto" in f.text for f in few.findings)
    assert not any(layer.foreseen for layer in few.matrices)


def test_of_adapters_it_is_told_on_their_factors(tmp_path, monkeypatch):
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        save_adapter(base, tmp_path / f"e{seed}", seed=seed, targets=TARGETS["llama"])
    experts = {f"e{n}": tmp_path / f"e{n}" / "adapter" for n in (1, 2)}
    found = covmerge.inspect(tmp_path / "base", experts)
    (text,) = (f.text for f in found.findings if "names no method" in f.text)
    assert text == (
        "a merge that names no method takes auto, as on average it comes nearest to the best method "
        "for several experts"
    )
    merged = covmerge.merge(tmp_path / "base", experts)
    seen = [layer for layer in found.matrices if layer.foreseen]
    assert seen
    for layer in seen:
        (matrix,) = merged.stats["tensors"][layer.tensor]["matrices"]
        assert layer.foreseen["h, flat share"] == pytest.approx(matrix["flat_share"], rel=1e-5)


def only_fault(found, expert):
    assert {f.expert for f in found.faults} == {expert}, found.faults
    return " ".join(f.text for f in found.faults)


def test_experts_that_fit_have_no_faults(family):
    found = inspect(family)
    assert not found.faults
    assert [f for f in found.findings if f.severity is Severity.WARNING] == [
        f for f in found.findings if "bfloat16" in f.text
    ]
    assert found.compared == NAMES
    names = load_file(family / "base" / "model.safetensors")
    assert {layer.tensor for layer in found.layers} == set(names)
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    "scale, dtype", [(2e-4, "bfloat16"), (2e-2, "bfloat16"), (2e-5, "float16")]
)
def test_what_half_precision_took_of_the_experts(tmp_path, scale, dtype):
    base = build("llama").to(getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    start = base.float().state_dict()
    lost = moved = left = 0.0
    expert = copy.deepcopy(base)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in expert.named_parameters():
            step = scale * torch.randn(weight.shape, generator=draw)
            weight.copy_((start[name] + step).to(getattr(torch, dtype)))
            kept = weight - start[name]
            lost += float((kept - step).square().sum())
            moved += float(step.square().sum())
            left += float(kept.square().sum())
    expert.to(getattr(torch, dtype)).save_pretrained(tmp_path / "a")
    found = inspect(tmp_path, ["a"])
    expected = (lost / max(moved, left)) ** 0.5
    assert found.lost_when_stored()["a"] == pytest.approx(expected, rel=0.15)
    told = [f.text for f in found.findings if "half precision, which took" in f.text]
    assert len(told) == (expected > 0.1)
    assert found.as_json()["summary"]["lost_when_stored"] == found.lost_when_stored()
    shown = command(
        "inspect", "--base", tmp_path / "base", "--expert", f"a={tmp_path / 'a'}"
    ).stdout
    assert f"≈ {found.lost_when_stored()['a']:.0%}" in shown
    # Beside a base of more digits all weights differ, and nothing is known of what was there.
    base.float().save_pretrained(tmp_path / "base")
    assert inspect(tmp_path, ["a"]).lost_when_stored() == {}
    expert.float().save_pretrained(tmp_path / "a")
    assert inspect(tmp_path, ["a"]).lost_when_stored() == {}


def test_what_was_lost_is_told_of_experts_in_half_precision_throughout(tmp_path):
    base = {"layers.0.weight": torch.randn(16, 8), "layers.1.weight": torch.randn(16, 8)}
    base = {n: t.bfloat16() for n, t in base.items()} | {"empty": torch.zeros(0, 8).bfloat16()}
    moved = {n: (t.float() + 1e-3 * torch.randn(t.shape)).bfloat16() for n, t in base.items()}
    mixed = {**moved, "layers.0.weight": base["layers.0.weight"].float() + 1e-3}
    for name, tensors in (("base", base), ("half", moved), ("mixed", mixed)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found = covmerge.inspect(
        tmp_path / "base.safetensors",
        {name: tmp_path / f"{name}.safetensors" for name in ("half", "mixed")},
    )
    assert set(found.lost_when_stored()) == {"half"}
    assert [f.expert for f in found.findings if "half precision, which" in f.text] == ["half"]


def test_numbers_are_those_of_the_tensors(bert):
    found = inspect(bert)
    base, expert = (load_file(bert / n / "model.safetensors") for n in ("base", "b"))
    name = "encoder.layer.1.intermediate.dense.weight"
    (layer,) = (layer for layer in found.layers if layer.name == name)
    update = expert[name].double() - base[name].double()
    assert layer.norms["b"] == pytest.approx(float(update.norm()), rel=1e-5)
    assert layer.relative["b"] == pytest.approx(float(update.norm() / base[name].double().norm()))
    sigma = torch.linalg.svdvals(update)
    assert layer.spectra["b"].sigma[0] == pytest.approx(float(sigma[0]), rel=1e-4)
    assert layer.spectra["b"].places[-1] == len(sigma) - 1
    merged = covmerge.merge(bert / "base", {n: bert / n for n in NAMES}, "ace").stats
    diagnostics = merged["tensors"][name]["matrices"][0]
    assert layer.gate("paper").gamma == pytest.approx(diagnostics["gamma"], rel=1e-4)


def test_an_expert_of_another_base(family):
    faults.of_another_base(family / "base", family / "b")
    assert "is not a fine-tune of this base" in only_fault(inspect(family), "b")


def test_an_expert_of_another_architecture(family, tmp_path):
    other = "gpt2" if "llama" in (family / "base" / "config.json").read_text() else "llama"
    shutil.rmtree(family / "b")
    build(other).save_pretrained(family / "b")
    found = inspect(family)
    assert "they cannot be merged" in only_fault(found, "b")
    assert found.compared == ("a", "c")


def test_a_frozen_block(family):
    faults.one_frozen_block(family / "base", family / "b")
    found = inspect(family)
    (warning,) = (f for f in found.findings if "block" in f.text)
    assert (warning.expert, warning.severity) == ("b", Severity.WARNING)
    assert "did not change block 1 of 2" in warning.text
    assert all(".1." in name for name in warning.tensors)
    assert not found.faults


def test_a_tensor_with_nan(family):
    faults.one_nan(family / "base", family / "b")
    text = only_fault(inspect(family), "b")
    assert "1 NaN or Inf values, the first at [1, 2]" in text


def test_a_merged_model_with_nan(bert):
    covmerge.merge(bert / "base", {n: bert / n for n in NAMES}, "average", bert / "out")

    def spoil(tensors):
        tensors["encoder.layer.0.output.dense.weight"][0, 0] = float("inf")

    change(bert / "out", spoil)
    found = covmerge.report(bert / "out")
    (fault,) = found.inspection.faults
    assert "of the merged model holds 1 NaN or Inf" in fault.text and fault.expert is None
    assert not found.verification.ok


def test_gamma_at_its_pole():
    # The mean of log‖Δ‖² is 0 for norms of 0.5 and 2.
    experts = {
        name: {"fc.weight": torch.diag(torch.tensor([size, 0.0]))}
        for name, size in (("a", 0.5), ("b", 2.0))
    }
    base = {"fc.weight": torch.zeros(2, 2)}
    found = covmerge.inspect(base, experts)
    assert found.matrices[0].gate("paper").fired
    assert found.as_json()["layers"]["fc.weight"]["gamma"]["paper"]["gamma"] is None
    merged = covmerge.merge(base, experts, "ace").stats["tensors"]["fc.weight"]["matrices"][0]
    assert merged["gamma"] is None and merged["gate_fired"]


def test_swapped_query_and_key_in_one_tensor(tmp_path):
    folder = save("gpt2", tmp_path)
    faults.swapped_query_and_key(folder / "base", folder / "b")
    text = only_fault(inspect(folder), "b")
    assert "'transformer.h.0.attn.c_attn.weight' is not the base's" in text
    assert text.count("Swapped") == 1


def test_swapped_query_and_key(bert):
    names = [f"encoder.layer.0.attention.self.{part}.weight" for part in ("query", "key")]
    faults.swapped_query_and_key(bert / "base", bert / "b")
    found = inspect(bert)
    text = only_fault(found, "b")
    for one, other in (names, reversed(names)):
        assert f"'{one}' is not the base's" in text
        assert f"it is the base's '{other}'" in text


def test_a_resized_vocabulary(family):
    tensors = load_file(family / "b" / "model.safetensors")
    name = next(n for n in tensors if "embed_tokens" in n or "wte" in n)
    faults.a_resized_vocabulary(family / "base", family / "b")
    text = only_fault(inspect(family), "b")
    assert f"its vocabulary was resized: '{name}' has 67 rows, the base 64" in text
    assert '{"vocabulary": "base"}' in text
    allowed = inspect(family, tensors={"vocabulary": "base"})
    assert not allowed.faults
    told = "the rows of the base are merged. Its 3 rows beyond are not counted below"
    assert any(told in f.text for f in allowed.findings)


def test_missing_and_extra_tensors(bert):
    def edit(tensors):
        del tensors["encoder.layer.0.output.dense.bias"]
        tensors["encoder.layer.0.output.gate.weight"] = torch.ones(4, 4)

    change(bert / "b", edit)
    text = only_fault(inspect(bert), "b")
    assert "lacks 1 of the base's tensors (encoder.layer.0.output.dense.bias)" in text
    assert "has 1 tensor that the base lacks (encoder.layer.0.output.gate.weight)" in text


def test_the_same_expert_twice_and_one_that_was_never_trained(bert):
    shutil.copytree(bert / "a", bert / "again")
    found = inspect(bert, ("a", "again", "base"))
    assert any("'a' and 'again' changed the base alike" in f.text for f in found.findings)
    assert "equals the base in every tensor" in only_fault(found, "base")


def test_tokenizers(bert):
    tokens = {"model": {"vocab": {"[PAD]": 0, "cat": 1, "dog": 2}}, "added_tokens": []}
    other = copy.deepcopy(tokens)
    other["model"]["vocab"] = {"[PAD]": 0, "cat": 2, "dog": 1}
    other["added_tokens"] = [{"id": 3, "content": "<think>"}]
    for name, content in (("base", tokens), ("a", tokens), ("b", other)):
        (bert / name / "tokenizer.json").write_text(json.dumps(content))
    (warning,) = (f for f in inspect(bert).findings if "tokenizer" in f.text)
    assert warning.expert == "b"
    assert "1 token added (such as '<think>'), 2 tokens with another number" in warning.text


@pytest.mark.parametrize(
    "name, own, other, told",
    [
        # A unigram's tokens are pairs with a score; what else a stranger writes there is none.
        (
            "tokenizer.json",
            {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": 3},
            {"model": {"vocab": [["b", -1.0], 7, [], None]}, "added_tokens": [5]},
            "1 token missing (such as 'a'), 1 token with another number (such as 'b')",
        ),
        ("tokenizer.json", {"model": {}}, [], "is another file than the base's"),
        ("vocab.txt", "a b", "b a", "is another file than the base's"),
        ("vocab.txt", "a b", "a b", None),
    ],
)
def test_vocabularies_of_other_kinds(tmp_path, name, own, other, told):
    for folder, content in (("base", own), ("b", other)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(json.dumps(content))
    found = [f.text for f in check_tokenizers(tmp_path / "base", {"b": tmp_path / "b"})]
    assert len(found) == bool(told) and all(told in text for text in found)


@pytest.mark.parametrize("whole", [False, True])
def test_models_that_adapters_were_merged_into_are_known_by_their_rank(bert, whole):
    model = peft.get_peft_model(
        build("bert"), peft.LoraConfig(r=2, target_modules=["query", "value", "key", "dense"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    shutil.rmtree(bert / "b")
    (model.merge_and_unload() if whole else model).save_pretrained(bert / "b")
    found = inspect(bert)
    notes = [(f.expert, "(2 of 16)" in f.text) for f in found.findings if "low rank" in f.text]
    assert notes == ([("b", True)] if whole else [])
    assert found.total().untouched[1] > 0.05


def test_memory_is_that_of_the_largest_tensors_not_of_the_model(bert):
    seen = inspect(bert, spectra="none")
    assert not any(layer.spectra for layer in seen.layers)
    with pytest.raises(covmerge.errors.ResourceError, match="needs"):
        inspect(bert, max_memory="1MB")


def test_where_all_spectra_would_be_long_some_are_taken(bert, monkeypatch):
    everything = {layer.name for layer in inspect(bert, spectra="all").matrices if layer.spectra}
    monkeypatch.setattr(job, "_SPECTRAL_FLOPS", 2e6)
    found = inspect(bert)
    some = [layer.name for layer in found.matrices if layer.spectra]
    assert 1 < len(some) < len(everything)
    assert f"taken of {len(some)} of {len(everything)} tensors" in str(found.findings)
    assert some[0] == found.matrices[0].name and "layer.1" in some[-1]
    with pytest.raises(covmerge.errors.InputError, match="not of 'most'"):
        inspect(bert, spectra="most")


def test_sources_that_cannot_be_opened_are_errors(bert, tmp_path):
    with pytest.raises(covmerge.errors.InputError, match="no such file or folder"):
        covmerge.inspect(bert / "base", {"a": tmp_path / "nothing"})


def test_from_the_command_line(bert):
    flags = ["--base", bert / "base", *(f"--expert={n}={bert / n}" for n in NAMES)]
    shown = command("inspect", *flags).stdout
    assert max(map(len, shown.splitlines()[1:])) <= 80
    assert "attention.self.query" in shown and "▁" in shown and "\x1b" not in shown
    found = command("inspect", *flags, "--json", "--spectra=none").json
    assert found["summary"]["update_norm"].keys() == set(NAMES)
    page = bert / "look.html"
    command("inspect", *flags, "--html", page)
    assert "Before a merge: a, b, c" in page.read_text() and "<svg" in page.read_text()
    shutil.rmtree(bert / "c")
    shutil.copytree(bert / "base", bert / "c")
    assert "'c' equals the base" in words(command("inspect", *flags, code=1).stdout)


MIXTURE = {"moe": {"gates": "random"}, "rules": [{"match": "*", "use": "base"}]}
STACK = {
    "slices": [{"experts": {"a": [0, 1]}}, {"experts": {"b": [0, 2]}}],
    "method": "task_arithmetic",
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("more", [MIXTURE, STACK], ids=["mixture", "slices"])
def test_experts_that_have_no_part_in_some_layers(more, tmp_path):
    """Each is measured where it is merged, and not said to have left the other layers unchanged."""
    models = save("llama", tmp_path)
    recipe = {"base": "./base", "experts": {name: f"./{name}" for name in "ab"}, **more}
    (models / "recipe.yml").write_text(json.dumps(recipe))
    merged = words(command("merge", models / "recipe.yml", models / "out", "--report").stdout)
    assert "did not change" not in merged and (models / "out" / "report.html").is_file()
    said = command("inspect", models / "recipe.yml", "--json").json
    assert not any("did not change" in finding["text"] for finding in said["findings"])
    command("compare", models / "recipe.yml", "--methods", "average,ties")
    base, a, b = (load_file(models / name / "model.safetensors") for name in ("base", "a", "b"))
    moved = {n: [float((of[n] - base[n]).double().norm()) for of in (a, b)] for n in base}
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for block in range(2):
        for part, short in names.items():
            of_a, of_b = moved[f"model.layers.{block}.mlp.{part}.weight"]
            if "moe" in more:
                where = f"model.layers.{block}.block_sparse_moe.experts"
                first, second = (
                    said["layers"][f"{where}.{index}.{short}.weight"] for index in (0, 1)
                )
            else:
                first = said["layers"][f"model.layers.0.mlp.{part}.weight"]
                second = said["layers"][f"model.layers.{block + 1}.mlp.{part}.weight"]
                of_a = moved[f"model.layers.0.mlp.{part}.weight"][0]
            assert first["update_norm"] == pytest.approx({"a": of_a, "b": 0.0}, rel=1e-5)
            assert second["update_norm"] == pytest.approx({"a": 0.0, "b": of_b}, rel=1e-5)
    if "slices" in more:  # shares of the whole model are of the layers that each expert has
        totals = said["summary"]
        for place, name, theirs in ((0, "a", "layers.0."), (1, "b", "layers.")):
            ends = ["embed_tokens"] if name == "a" else ["lm_head", "model.norm"]
            has = [n for n in base if theirs in n or any(end in n for end in ends)]
            moves = sum(moved[n][place] ** 2 for n in has)
            whole = sum(float(base[n].double().norm()) ** 2 for n in has)
            assert totals["relative_norm"][name] == pytest.approx((moves / whole) ** 0.5, rel=1e-5)
            assert totals["untouched"][name] < 0.01


def test_a_comparison_where_an_expert_lacks_tensors(tmp_path):
    models = save("llama", tmp_path)
    path = models / "a" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "layers.1.mlp" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    experts = {name: models / name for name in "ab"}
    found = covmerge.compare(
        models / "base", experts, ["average", "ties"], tensors={"missing": "present"}
    )
    for row in found.rows:
        assert set(row.retention) == {"a", "b"}
        assert row.retention_by_layer["model.layers.1.mlp.up_proj.weight"]["a"] is None
