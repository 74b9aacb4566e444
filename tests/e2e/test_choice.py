"""Where no method is named: one expert alone by its weight, several by auto."""

import copy
import json
import re
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.base.settings import TAKEN, choose
from covmerge.errors import RecipeError
from covmerge.plan.recipe import json_schema
from tests.cli.runs import covmerge as command
from tests.cli.runs import words
from tests.e2e.models import build, fine_tuned
from tests.e2e.test_adapters import TARGETS, save_adapter

# PEFT's own, about its use of transformers and about Conv1D.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")


@pytest.fixture(
    params=["gpt2", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("llama", "bert"))]
)
def models(request, tmp_path):
    base = build(request.param)
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        save_adapter(base, tmp_path / f"e{seed}", seed=seed, targets=TARGETS[request.param])
    return tmp_path


def lora(folder, *numbers):
    return {f"e{n}": folder / f"e{n}" / "adapter" for n in numbers}


def full(folder, *numbers):
    return {f"e{n}": folder / f"e{n}" / "full" for n in numbers}


def test_one_adapter_folded_is_what_peft_makes_of_it(models):
    out = models / "out"
    shown = command("merge", "--base", models / "base", f"--expert=e1={lora(models, 1)['e1']}", out)
    assert "as one expert alone is added to its base, by its weight" in words(shown.stdout)
    merged, wanted = (
        load_file(path / "model.safetensors") for path in (out, models / "e1" / "full")
    )
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)


def test_all_that_tells_of_the_choice_tells_what_is_taken():
    """Help, docstrings, schema and docs; the run's own line comes of the same place."""
    assert (
        f"`{choose(1)[0]}` of one expert alone" in TAKEN and f"`{choose(2)[0]}` of several" in TAKEN
    )
    shown = [
        " ".join(words(command("merge", "--help").stdout).replace("│", " ").split()),
        json.dumps(json_schema(), ensure_ascii=False),
        covmerge.merge.__doc__,
        covmerge.merge_layer.__doc__,
        Path("docs/full-models.md").read_text("utf-8"),
    ]
    for text in shown:
        assert TAKEN.replace("`", "") in " ".join(text.replace("`", "").split())
    for page in ("README.md", "docs/choosing.md"):  # in their own words
        text = " ".join(Path(page).read_text("utf-8").split())
        assert f"merged by [`{choose(2)[0]}`]" in text and re.search(
            r"\b[Aa] single (one|expert) is added to its base", text
        )
    told = [*Path("docs").glob("*.md"), *Path("examples").glob("*.yml"), Path("README.md")]
    told += Path("src/covmerge").rglob("*.py")
    assert not [path for path in told if re.search(r"\belse `?ace\b", path.read_text("utf-8"))]


def test_the_help_and_the_readme_show_how_to_fold_an_adapter():
    shown = words(command("merge", "--help").stdout)
    assert "covmerge merge --base B --expert lora=./lora OUT" in shown


def test_one_full_model_is_itself(models):
    merged = covmerge.merge(models / "base", full(models, 1)).tensors
    for name, value in load_file(models / "e1" / "full" / "model.safetensors").items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)


def test_one_half_precision_model_is_itself_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        base = {"fc.weight": torch.randn(64, 64, generator=generator).to(dtype)}
        step = 0.01 * torch.randn(64, 64, generator=generator)
        expert = {"fc.weight": (base["fc.weight"].float() + step).to(dtype)}
        assert torch.equal(covmerge.merge(base, [expert]).tensors["fc.weight"], expert["fc.weight"])


@pytest.mark.parametrize(
    ("of", "method", "why"),
    [
        (lambda f: lora(f, 1, 2), "auto", "nearest to the best method for several experts"),
        (lambda f: full(f, 1, 2), "auto", "nearest to the best method for several experts"),
        (
            lambda f: {**lora(f, 1), **full(f, 2)},
            "auto",
            "nearest to the best method for several experts",
        ),
        (lambda f: lora(f, 2), "average", "one expert alone"),
    ],
)
def test_what_is_chosen_is_said_everywhere_and_is_that_method(models, of, method, why):
    base, experts, out = models / "base", of(models), models / "out"
    flags = ["--base", base, *(f"--expert={name}={path}" for name, path in experts.items())]
    planned = words(command("merge", *flags, "--dry-run").stdout)
    assert f"by {method}" in planned and why in planned
    shown = words(command("merge", *flags, out).stdout)
    assert f"by {method}" in shown and why in shown
    manifest = json.loads((out / "covmerge.json").read_text())
    assert manifest["recipe"]["method"] == method
    assert why in manifest["chosen"] and any(why in note for note in manifest["notes"])
    card = (out / "README.md").read_text()
    assert why in card and f"- {method}\n" in card
    named = covmerge.merge(base, experts, method)
    chosen = covmerge.merge(base, experts)
    assert chosen.recipe.method == method and not any(why in note for note in named.notes)
    for name, value in named.tensors.items():
        assert torch.equal(chosen.tensors[name], value)


def test_adapters_to_one_adapter(models):
    result = covmerge.merge(models / "base", lora(models, 1, 2), out=models / "out", form="adapter")
    assert result.recipe.method == "auto"
    one = covmerge.merge(models / "base", lora(models, 1), out=models / "one", form="adapter")
    assert one.recipe.method == "average"
    config = json.loads((models / "base" / "config.json").read_text())["model_type"]
    folded = peft.PeftModel.from_pretrained(copy.deepcopy(build(config)), models / "one")
    wanted = load_file(models / "e1" / "full" / "model.safetensors")
    for name, value in folded.merge_and_unload().state_dict().items():
        if name in wanted:
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_a_merge_resumes_only_by_the_method_that_was_chosen(models):
    class Progress:
        def start(self, total): ...

        def advance(self, what, size, *, resumed=False):
            raise KeyboardInterrupt

        def finish(self): ...

    base, out = models / "base", models / "out"
    with pytest.raises(KeyboardInterrupt):
        covmerge.merge(base, lora(models, 1, 2), out=out, progress=Progress())
    with pytest.raises(covmerge.errors.InputError, match=r"method was .auto. and is now .ace.\."):
        covmerge.merge(base, lora(models, 1, 2), "ace", out, resume=True)
    resumed = covmerge.merge(base, lora(models, 1, 2), out=out, resume=True)
    assert resumed.recipe.method == "auto"


def test_parameters_of_another_method_than_the_chosen_one():
    base = {"fc.weight": torch.eye(4)}
    with pytest.raises(
        RecipeError, match=r"average was chosen, as one expert alone.*: method=\"NAME\""
    ):
        covmerge.merge(base, [{"fc.weight": 2 * torch.eye(4)}], eps=1e-3)


def test_one_layer():
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(6, 8, generator=generator) / 10
    assert torch.equal(covmerge.merge_layer([d]), d)
    assert torch.equal(covmerge.merge_layer([d, -d, d]), covmerge.merge_layer([d, -d, d], "auto"))
    factors = [
        covmerge.LowRank(
            torch.randn(6, 2, generator=generator), torch.randn(2, 8, generator=generator)
        )
        for _ in range(2)
    ]
    one = covmerge.merge_layer(factors[:1])
    assert isinstance(one, covmerge.LowRank)
    torch.testing.assert_close(one.dense(), factors[0].dense(), rtol=1e-5, atol=1e-6)
    both = covmerge.merge_layer(factors)
    assert torch.equal(both.dense(), covmerge.merge_layer(factors, "auto").dense())


def test_a_full_fine_tune_of_a_tied_model(tmp_path):
    base = build("gpt2")
    base.save_pretrained(tmp_path / "base")
    fine_tuned(base, 1).save_pretrained(tmp_path / "e")
    merged = covmerge.merge(tmp_path / "base", [tmp_path / "e"], out=tmp_path / "out")
    assert merged.verification.ok and merged.warnings == ()
