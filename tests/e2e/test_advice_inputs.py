"""What errors and notes advise about experts that do not fit their base: followed to the right output."""

import re
import shutil

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CovmergeError
from tests.adapters.models import bert, gpt2, llama, make, mixtral
from tests.advised import advice, rules_in
from tests.cli.runs import covmerge as command
from tests.cli.runs import save_plain, statistics_for
from tests.e2e.following import told
from tests.e2e.models import save_family

W = torch.diag(torch.arange(1.0, 9))
NAME, HEAD = "layers.0.mlp.up_proj.weight", "readout.weight"
BASE = {NAME: W, "layers.0.norm.weight": torch.ones(8)}
A = {NAME: W + 0.01, "layers.0.norm.weight": torch.full((8,), 1.01)}
Q = "model.layers.0.self_attn.q_proj.weight"


def refused(said, base, expert, method="average", **how):
    with pytest.raises(CovmergeError, match=said) as error:
        covmerge.merge(base, {"a": expert}, method, **how)
    return str(error.value)


def check(base, expert, right, **how):
    found = covmerge.merge(base, {"a": expert}, "average", **how).tensors
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def rule_in(text):
    return rules_in(text)[0]


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    made = make(llama, LoraConfig(r=2, target_modules=["q_proj"]), folder / "a")
    torch.manual_seed(0)
    llama().save_pretrained(folder / "base")
    return made


def test_another_kind_of_model(lora, tmp_path):
    bert().save_pretrained(tmp_path / "bert")
    said = advice("Check the paths: every expert must be fine-tuned from the base.")
    base = lora.folder.parent / "base"
    refused(said, base, tmp_path / "bert")
    check(base, lora.folder, {Q: lora.merged[Q]})


def test_an_adapter_of_another_base(lora, tmp_path):
    torch.manual_seed(0)
    gpt2().save_pretrained(tmp_path / "gpt2")
    base = lora.folder.parent / "base"
    refused(advice("that {} lacks: {}. Is it an adapter of this base?"), BASE, lora.folder)
    llama(hidden_size=32).save_pretrained(tmp_path / "wide")
    said = advice(
        "it is no adapter of this base. Name the base that it was trained on, or leave it out"
    )
    refused(said, tmp_path / "wide", lora.folder)
    check(base, lora.folder, {Q: lora.merged[Q]})


def test_a_head_with_factors_only(lora):
    base = lora.folder.parent / "base"
    rules = [{"match": Q, "use": "head"}]
    said = advice("has only factors of its update: leave it to the base with {}, or merge it")
    text = refused(said, base, lora.folder, rules=rules)
    check(base, lora.folder, {Q: lora.base[Q]}, rules=[rule_in(text)])
    check(base, lora.folder, {Q: lora.merged[Q]})


def test_an_update_of_codes(lora):
    base = {
        name: t for name, t in load_file(lora.folder.parent / "base" / "model.safetensors").items()
    }
    codes = base | {Q: torch.ones(16, 16, dtype=torch.int8)}
    said = advice("nothing can be added to codes. Give the base in a floating-point dtype")
    refused(said, codes, lora.folder)
    check(base, lora.folder, {Q: lora.merged[Q]})


def test_experts_in_one_tensor(tmp_path):
    """As transformers builds a model: packed in memory, and saved so."""
    model = mixtral()
    model.save_pretrained(tmp_path / "base")
    apart = load_file(tmp_path / "base" / "model.safetensors")
    for parameter in model.parameters():
        parameter.data += 1e-3
    packed = {name: t for name, t in model.state_dict().items()}
    save_file(packed, tmp_path / "a.safetensors")
    said = advice(
        "base's config.json: pass the base's folder. Or pass the packed one as transformers saves a new "
    )
    refused(said, apart, tmp_path / "a.safetensors")
    new = type(model)(model.config).to(model.dtype)
    new.load_state_dict(model.state_dict())
    new.save_pretrained(tmp_path / "new")
    right = load_file(tmp_path / "new" / "model.safetensors")
    assert right.keys() == apart.keys()
    check(tmp_path / "base", tmp_path / "a.safetensors", right)
    check(apart, tmp_path / "new", right)


def test_renaming_as_the_error_says():
    strange = {f"net.{name}": tensor for name, tensor in A.items()}
    said = advice(
        "Rename the expert's tensors to the base's names, or pass the base that it was trained from"
    )
    refused(
        said,
        BASE | {"more.fc.weight": W},
        {n.replace("layers", "x"): t for n, t in strange.items()},
    )
    check(BASE, A, A)


def test_a_part_that_the_base_lacks_is_named_by_a_rule():
    tower = {f"visual.{n}.fc.weight": torch.ones(20, 20) for n in range(3)}
    said = advice("such as {}; `*` stands for any part of a name. If it is {}: ")
    text = refused(said, BASE, A | tower, tensors={"extra": "ignore"})
    rule = rule_in(text)
    check(BASE, A | tower, A, rules=[rule | {"match": rule["match"].replace("0", "*")}])


# Heads and embeddings that are tied.


def test_a_head_that_is_not_stored(tmp_path):
    said = advice(
        'If it is to be the embedding, set "{}": true in its config.json; else save the model'
    )
    for name in ("base", "a"):
        llama().save_pretrained(tmp_path / name)
    file = tmp_path / "base" / "model.safetensors"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if n != "lm_head.weight"}, file, {"format": "pt"})
    allow = {"allow": ["not-a-fine-tune"]}
    refused(said, tmp_path / "base", tmp_path / "a", **allow)
    save_file(whole, file, {"format": "pt"})
    covmerge.merge(tmp_path / "base", {"a": tmp_path / "a"}, "average", **allow)


# Notes and warnings.


def notes_of(base, experts, method="average", **how):
    result = covmerge.merge(base, experts, method, **how)
    return [*result.notes, *result.warnings]


def said_by(said, notes):
    return any(re.search(said, note) for note in notes)


def test_equal_experts_are_told(tmp_path):
    for name in ("a", "again"):
        save_file(A, tmp_path / f"{name}.safetensors")
    a, again = (tmp_path / f"{name}.safetensors" for name in ("a", "again"))
    said = advice(
        "one model under {} names, which counts as often: leave out all but one, or choose its"
    )
    b = {name: tensor - 0.02 for name, tensor in BASE.items()}
    told = covmerge.merge(BASE, {"a": a, "again": again, "b": b}, "average", tmp_path / "out")
    assert said_by(said, [*told.notes, *told.warnings])
    both = covmerge.merge(BASE, {"a": a, "again": again, "b": b}, "average").tensors
    weighed = covmerge.merge(BASE, {"a": A, "b": b}, "average", weights={"a": 2}).tensors
    torch.testing.assert_close(both[NAME], weighed[NAME])


def test_a_rule_that_fits_nothing_is_told():
    said = advice("did you mean '{}'?")
    wrong = [{"match": "norm.wieght", "use": "base"}]
    (note,) = (n for n in notes_of(BASE, {"a": A}, rules=wrong) if "applies to no tensor" in n)
    assert said_by(said, [note])
    meant = note.split("did you mean '")[1].split("'")[0]
    notes = notes_of(BASE, {"a": A}, rules=[{"match": meant, "use": "base"}])
    assert not any("applies to no tensor" in note for note in notes)


def test_a_rule_behind_another_that_takes_all_its_tensors_is_told():
    said = advice(
        "the rule for '{}' decides nothing, as rules before it apply to all its tensors: "
        "if it is to decide, put it before"
    )
    rules = [{"match": "*", "method": "average"}, {"match": "*norm*", "use": "base"}]
    assert said_by(said, notes_of(BASE, {"a": A}, rules=rules))
    assert not said_by(said, notes_of(BASE, {"a": A}, rules=rules[::-1]))


def test_float64_is_told():
    said = advice(
        "{} stored in float64 and computed in float32 ({}): --dtype float64 keeps all digits"
    )
    base, a = ({n: t.double() for n, t in own.items()} for own in (BASE, A))
    a[NAME] = base[NAME] + 1e-9
    assert said_by(said, notes_of(base, {"a": a}))
    found = covmerge.merge(base, {"a": a}, "average", dtype="float64")
    assert not said_by(said, found.notes)
    torch.testing.assert_close(found.tensors[NAME], a[NAME], rtol=0, atol=1e-15)


def test_statistics_that_nobody_reads_are_told(tmp_path):
    save_plain(tmp_path)
    stats = statistics_for("regmean", tmp_path)
    experts = {n: tmp_path / f"{n}.safetensors" for n in "ab"}
    said = advice("does not look at statistics of experts, and {} {} some: leave them out")
    base = tmp_path / "base.safetensors"
    result = covmerge.merge(base, experts, "average", statistics=stats)
    assert said_by(said, result.notes)
    assert not said_by(said, covmerge.merge(base, experts, "average").notes)
    named = re.search(r"or name a method that does \(([\w+]+)", " ".join(result.notes))[1]
    result = covmerge.merge(base, experts, named, statistics=stats, tensors={"few_rows": "allow"})
    assert not said_by(said, result.notes)


# What `inspect` finds.


INSPECTED = {
    "fewer tensors": (
        BASE | {"more.weight": torch.ones(2, 8)},
        A,
        advice(": choose what that means by --tensors missing=base, or `present`"),
        {"missing": "base"},
    ),
    "more tensors": (
        BASE,
        A | {"more.weight": torch.ones(2, 8)},
        advice(": leave them out by --tensors extra=ignore"),
        {"extra": "ignore"},
    ),
    "more rows": (
        BASE | {"embed_tokens.weight": torch.ones(4, 8)},
        A | {"embed_tokens.weight": 1.2 * torch.ones(5, 8)},
        advice(
            "; if the first rows mean the same {}, merge the base's by --tensors vocabulary=base"
        ),
        {"vocabulary": "base"},
    ),
}


@pytest.mark.parametrize(("base", "expert", "said", "tensors"), INSPECTED.values(), ids=INSPECTED)
def test_what_an_inspection_advises(base, expert, said, tensors):
    texts = [finding.text for finding in covmerge.inspect(base, {"a": expert}).findings]
    assert any(re.search(said, text) for text in texts), texts
    check(base, expert, {NAME: A[NAME]}, tensors=tensors)
    texts = [f.text for f in covmerge.inspect(base, {"a": expert}, tensors=tensors).findings]
    assert not any(re.search(said, text) for text in texts)


def test_a_number_that_is_not_finite():
    broken = {name: tensor.clone() for name, tensor in A.items()}
    broken["layers.0.norm.weight"][3] = float("nan")
    said = advice(", or leave the tensor to the base with {}")
    text = refused(said, BASE, broken)
    check(BASE, broken, {NAME: A[NAME]}, rules=[rule_in(text)])


def test_what_is_measured_needs_a_base(tmp_path):
    save_file(A, tmp_path / "a.safetensors")
    save_file(BASE, tmp_path / "b.safetensors")
    experts = {name: f"./{name}.safetensors" for name in "ab"}
    text = f"base: null\nexperts: {experts}\nmethod: linear\n"
    file = tmp_path / "recipe.yml"
    file.write_text(text)
    said = advice("are updates of one: give a base. For a report, merge again with one")
    told(said, "compare", file, "--methods", "linear")
    command("merge", file, tmp_path / "out")
    told(said, "report", tmp_path / "out")
    file.write_text(text.replace("base: null", "base: ./b.safetensors"))
    command("compare", file, "--methods", "average", "--allow", "unchanged-expert")
    command("merge", file, tmp_path / "out", "--overwrite", "--allow", "unchanged-expert")
    command("report", tmp_path / "out")


def masks(folder):
    experts = {"a": A, "b": {name: tensor - 0.02 for name, tensor in BASE.items()}}
    save_file(BASE, folder / "base.safetensors")
    covmerge.merge(folder / "base.safetensors", experts, "emr", folder / "out", overwrite=True)
    return folder / "out"


def test_the_base_of_masks(tmp_path):
    out = masks(tmp_path)
    save_file(BASE | {NAME: torch.ones(4, 8)}, tmp_path / "other.safetensors")
    said = advice("in the merged model: pass the base that was merged over")
    with pytest.raises(CovmergeError, match=f"{said}|is not the base that"):
        covmerge.load_expert(out, "a", tmp_path / "other.safetensors")
    found = covmerge.load_expert(out, "a", tmp_path / "base.safetensors")
    assert found.keys() == A.keys()


def test_masks_that_are_damaged_are_merged_again(tmp_path):
    out = masks(tmp_path)
    file = next((out / "masks").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    said = advice("is not the file that the merge wrote{}: merge again")
    with pytest.raises(CovmergeError, match=said):
        covmerge.load_expert(out, "a", tmp_path / "base.safetensors")
    found = covmerge.load_expert(masks(tmp_path), "a", tmp_path / "base.safetensors")
    assert found.keys() == A.keys()


def test_tied_tensors_that_differ(tmp_path):
    """As transformers reads them: each by itself, once the config says so."""
    torch.manual_seed(0)
    for name in ("base", "a"):
        model = llama(tie_word_embeddings=False)
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = (
            load_file(file)
            if name == "base"
            else {
                n: t + 0.001 * torch.randn(t.shape)
                for n, t in load_file(tmp_path / "base/model.safetensors").items()
            }
        )
        save_file(weights, file, {"format": "pt"})
        config = tmp_path / name / "config.json"
        config.write_text(
            config.read_text().replace(
                '"tie_word_embeddings": false', '"tie_word_embeddings": true'
            )
        )
    given = (tmp_path / "base", {"a": tmp_path / "a"}, "average", tmp_path / "out")
    try:
        covmerge.merge(*given)
    except CovmergeError as error:
        said = advice(
            'If they are meant to differ, set "tie_word_embeddings": false in its config.json'
        )
        assert re.search(said, str(error)), error
        for name in ("base", "a"):
            config = tmp_path / name / "config.json"
            config.write_text(
                config.read_text().replace(
                    '"tie_word_embeddings": true', '"tie_word_embeddings": false'
                )
            )
        covmerge.merge(*given)
    found = load_file(tmp_path / "out" / "model.safetensors")
    right = load_file(tmp_path / "a" / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(found[name], right[name])


def test_a_base_that_is_a_file_alone(tmp_path):
    """`base.pt` has no config.json, with which transformers loads the output."""
    base, experts = save_family("llama", tmp_path, experts=1)
    torch.save(load_file(base / "model.safetensors"), tmp_path / "base.pt")
    said = advice(
        "for transformers pass the model's folder as the base, or copy them into the output"
    )
    given = {"base": tmp_path / "base.pt", "experts": experts, "out": tmp_path / "out"}
    assert said_by(said, covmerge.merge(**given).notes)
    shutil.copy(base / "config.json", tmp_path / "out")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = covmerge.merge(base, experts, out=tmp_path / "with")
    assert not said_by(said, found.notes)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "with")
