"""What the page is told: enough to predict what a report of the merge then says."""

import json

import peft
import pytest
import torch
from safetensors.torch import save_file

import covmerge as library
from covmerge.errors import InputError
from covmerge.front import api
from covmerge.front.viewer import ViewJob
from covmerge.front.viewer.scene import fixed_part
from covmerge.plan.recipe import parse_recipe
from tests.cli.runs import covmerge
from tests.e2e.models import build, save_family
from tests.measures.test_quadratics import kept
from tests.report.merges import checkpoints

# transformers' own, when PEFT wraps a model.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def scene_of(path):
    return ViewJob(path).run()


def predicted(scene, weights):
    """By layer and expert, from what the page is sent."""
    told = json.loads(json.dumps(scene.as_json()))
    w = torch.tensor([weights.get(name, 0.0) for name in told["columns"]], dtype=torch.float64)
    found = {}
    for layer in told["layers"]:
        forms = [None if form is None else square(form) for form in layer["forms"]]
        found[layer["name"]] = {
            name: None if form is None else kept(form, expert, w)
            for expert, (name, form) in enumerate(zip(told["experts"], forms, strict=True))
        }
    return found


def square(lower):
    size = len(lower)
    form = [[lower[max(t, u)][min(t, u)] for u in range(size)] for t in range(size)]
    return torch.tensor(form, dtype=torch.float64)


def recipe_of(scene, method, weights):
    experts = {n: {"source": scene.sources[n], "weight": w} for n, w in weights.items()}
    parameters = {"scale": 1.0} if method == "task_arithmetic" else {}
    fixed = fixed_part(scene.recipe, scene.sources[""])
    return parse_recipe({**fixed, "experts": experts, "method": method, "parameters": parameters})


def reported(out):
    return {layer.name: dict(layer.retention) for layer in library.report(out).inspection.matrices}


def agree(found, expected):
    assert found.keys() == expected.keys()
    for name, own in found.items():
        # Where the merged model took part in another merge, a report counts it among the experts.
        others = {expert: expected[name][expert] for expert in own}
        assert own == pytest.approx(others, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_as_merged_and_any_sum_are_what_a_report_says(family, tmp_path):
    base, experts = save_family(family, tmp_path)
    library.merge(base, experts, "ties", tmp_path / "out")
    scene = scene_of(tmp_path / "out")
    assert not scene.as_json()["exact"]
    agree(predicted(scene, {"merged": 1.0}), reported(tmp_path / "out"))
    weights = {name: 0.3 + 0.4 * place for place, name in enumerate(scene.inspection.compared)}
    weights["merged"] = 0.5
    api.run_recipe(recipe_of(scene, "task_arithmetic", weights), tmp_path / "summed")
    agree(predicted(scene, weights), reported(tmp_path / "summed"))


def test_a_recipe_begins_with_its_own_weights(tmp_path):
    checkpoints(tmp_path, {"a": 0.1, "b": 0.2}, blocks=2)
    lines = ["base: ./base.safetensors", "experts:", "  a: {source: ./a.safetensors, weight: 2.0}"]
    lines += ["  b: ./b.safetensors", "method: task_arithmetic", "parameters: {scale: 0.4}"]
    (tmp_path / "recipe.yml").write_text("\n".join(lines))
    scene = scene_of(tmp_path / "recipe.yml")
    told = scene.as_json()
    assert told["exact"]
    assert scene.merged is None
    assert (told["start"]["weights"], told["start"]["scale"]) == ({"a": 2.0, "b": 1.0}, 0.4)
    assert scene.sources == {
        key: str(tmp_path / f"{key or 'base'}.safetensors") for key in ("", "a", "b")
    }


def test_adapters_are_measured_by_their_factors(tmp_path):
    """And a merged adapter among them."""
    build("bert").save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["query", "dense"], init_lora_weights=False)
        peft.get_peft_model(build("bert"), config).save_pretrained(tmp_path / name)
    experts = {name: tmp_path / name for name in ("a", "b")}
    library.merge(tmp_path / "base", experts, "auto", tmp_path / "out", form="adapter")
    scene = scene_of(tmp_path / "out")
    agree(predicted(scene, {"merged": 1.0}), reported(tmp_path / "out"))
    assert "does not tell how good a merge is" in scene.as_json()["findings"][-1]["text"]
    api.run_recipe(recipe_of(scene, "average", {"a": 1.0, "b": 3.0}), tmp_path / "mean")
    agree(predicted(scene, {"a": 0.25, "b": 0.75}), reported(tmp_path / "mean"))


def test_a_name_that_an_expert_has_is_not_the_merged_models(tmp_path):
    base, experts = checkpoints(tmp_path, {"merged": 0.1, "b": 0.2}, blocks=1)
    library.merge(base, experts, "average", tmp_path / "out")
    assert scene_of(tmp_path / "out").merged == "merged-2"


@pytest.mark.parametrize(
    "more",
    [
        {"slices": [{"experts": {"a": [0, 1]}}, {"experts": {"b": [0, 1]}}], "method": "average"},
        {"moe": {"gates": "random"}, "rules": [{"match": "*", "use": "base"}]},
    ],
)
def test_slices_and_mixtures_are_looked_at_by_other_commands(more, tmp_path):
    save_family("llama", tmp_path, experts=2)
    experts = {"a": "./expert1", "b": "./expert2"}
    recipe, out = tmp_path / "recipe.yml", tmp_path / "out"
    recipe.write_text(json.dumps({"base": "./base", "experts": experts, **more}))
    covmerge("merge", recipe, out)
    for path, advised in ((recipe, "inspect"), (out, "report")):
        with pytest.raises(InputError, match=f"look at it by `covmerge {advised} ") as error:
            scene_of(path)
        _, command, *_ = str(error.value).split("`")
        covmerge(*command.split()[1:])


def test_nothing_that_can_be_weighed_is_refused(tmp_path):
    for name in ("base", "a"):
        save_file(
            {"norm.weight": torch.full((4,), float(len(name)))}, tmp_path / f"{name}.safetensors"
        )
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("base: ./base.safetensors\nexperts: {a: ./a.safetensors}\n")
    with pytest.raises(InputError, match="no tensor is a matrix"):
        scene_of(recipe)
    recipe.write_text(
        "base: ./base.safetensors\nexperts: {a: ./a.safetensors}\n"
        "slices: [{experts: {a: [0, 1]}}]\nmethod: passthrough\n"
    )
    with pytest.raises(InputError):
        scene_of(recipe)
