"""Recipes that are refused with an advice, and the same as it says, which are merged."""

import json
import re
import shlex
import shutil

import pytest
import torch
import yaml
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.adapters.models import llama
from tests.adapters.models import save as save_adapter
from tests.advised import advice
from tests.cli.runs import covmerge, flags, save_plain, words, write_recipe
from tests.e2e.following import told
from tests.e2e.models import save_family
from tests.e2e.test_advised_settings import tokenizer
from tests.mergekit.models import save_models
from tests.quantised.models import moved

PAIR = "base: ./base\nexperts: {a: ./a, b: ./b}\n"
TWO = f"{PAIR}method: average\n"
ONE = "base: ./base\nexperts: {a: ./a}\nmethod: average\n"
RUN = "run: {folder: ./run}\n"
TASK = f"{PAIR}method: task_arithmetic\n"
LAYERS = "{base: [0, 2], experts: {a: [0, 2], b: [0, 2]}}"
MODELS = ", ".join(f"{{model: ./{name}, parameters: {{weight: 1}}}}" for name in "ab")
SLERP = "merge_method: slerp\nbase_model: ./base\nmodels: [{model: ./a}]\n%s\n"
LINEAR = f"merge_method: linear\nmodels: [{MODELS}]\n"
UNION = "tokenizer: {source: union, tokens: {x: %s}}\n"
SLICE = "{sources: [{model: ./a, layer_range: %s}]}"
STACK = "merge_method: passthrough\nslices: [%s]\n"
T5, ONES = "models: [{model: ./t5/t0}, {model: ./t5/t1}]", "parameters: {weight: 1}"
MODULES = f"""merge_method: linear
modules:
  shared: {{{T5}, %s}}
  encoder: {{{T5}, %s}}
  decoder: {{%s, {ONES}}}
"""
ISO = MODULES.replace("linear\n", "iso_c\nbase_model: ./t5/base\n").replace(f", {ONES}", "")
SCALED = "[0, 1], parameters: {scale: [{filter: layers.0., value: 1}, {value: 1}]}"
BASES = """merge_method: task_arithmetic
slices:
- {base_model: ./base, sources: [{model: ./base, layer_range: [0, 1]}, {model: ./a, layer_range: [0, 1]}]}
- {base_model: %s, sources: [{model: ./base, layer_range: [1, 2]}, {model: ./a, layer_range: [1, 2]}]}
parameters: {weight: 1}
"""
STACKS = "base: ./t5/base\nexperts: {a: ./t5/t0}\nmethod: average\n"
TIES = f"{PAIR}method: ties\nparameters: {{density: {{by_depth: [0.2, 0.6]}}%s}}\n"
DELLA = f"""{PAIR}method: generalized_task_arithmetic
parameters: {{sparsify: ranked, density: 0.5, epsilon: %s}}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = llama(num_hidden_layers=2)
    base.save_pretrained(folder / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    for seed, name in enumerate("ab", 1):
        moved(base, seed).save_pretrained(folder / name)
        (folder / "run" / f"checkpoint-{seed - 1}").parent.mkdir(exist_ok=True)
        moved(base, seed).save_pretrained(folder / "run" / f"checkpoint-{seed - 1}")
    for name in ("base", "a", "b"):
        tokenizer([f"t{n}" for n in range(30)]).save_pretrained(folder / name)
    save_adapter(llama(num_hidden_layers=2), lora, folder / "lora")
    save_models(folder)
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MERGED = set()  # recipes that were merged, each once
RECIPES = {
    "two names of what is merged": (
        f"{TWO}{RUN}",
        advice("{}: 'run' and 'experts' both say what is merged: leave out one of them"),
        TWO,
    ),
    "a decay": (
        "run: {folder: ./run, weights: ema}\n",
        advice(
            "'weights: ema' needs a 'decay' (--decay), such as 0.8: what a checkpoint counts for"
        ),
        "run: {folder: ./run, weights: ema, decay: 0.8}\n",
    ),
    "a step of 0": (
        "run: {folder: ./run, weights: step}\n",
        advice("gives {}/checkpoint-0 no weight: take fewer ('last'), or 'weights: equal'"),
        "run: {folder: ./run, weights: step, last: 1}\n",
        "run: {folder: ./run, weights: equal}\n",
    ),
    "no layers": (
        f"{TWO}slices: [{{base: [2, 2], experts: {{a: [0, 2], b: [0, 2]}}}}]\n",
        advice("{} has no layers; write [first, end), such as [0, 8]"),
        f"{TWO}slices: [{LAYERS}]\n",
    ),
    "an expert in no slice": (
        f"{TWO}slices: [{{base: [0, 2], experts: {{a: [0, 2]}}}}]\n",
        advice("the expert '{}' is in no slice: remove it, or give it layers"),
        f"{TWO}slices: [{LAYERS}]\n",
        f"{ONE}slices: [{{base: [0, 2], experts: {{a: [0, 2]}}}}]\n",
    ),
    "no condition": (
        f"{TWO}rules: [{{use: base}}]\n",
        advice("the rule has no condition; add 'match' or 'role'"),
        f"{TWO}rules: [{{match: '*norm*', use: base}}]\n",
        f"{TWO}rules: [{{role: norm, use: base}}]\n",
    ),
    "no effect": (
        f"{TWO}rules: [{{match: '*norm*'}}]\n",
        advice("the rule has no effect; add 'method' or 'use'"),
        f"{TWO}rules: [{{match: '*norm*', method: ties}}]\n",
    ),
    "two effects": (
        f"{TWO}rules: [{{match: '*norm*', use: base, method: ties}}]\n",
        advice("the rule has two effects; remove 'method' or 'use'"),
        f"{TWO}rules: [{{match: '*norm*', use: base}}]\n",
    ),
    "a matrix method for a norm": (
        f"{TWO}rules: [{{match: '*norm*', method: actmat}}]\n",
        advice("and method '{}' merges matrices: use `average` or `base` for it"),
        f"{TWO}rules: [{{match: '*norm*', method: average}}]\n",
        f"{TWO}rules: [{{match: '*norm*', use: base}}]\n",
    ),
    "upper and lower case": (
        TWO.replace("b: ./b", "A: ./b"),
        advice("{} and {} differ only in case; rename one of them"),
        TWO,
    ),
    "a date": (
        f"{TASK}parameters: {{scale: !x 1}}\n",
        advice("the tag {} is refused; write a plain value"),
        f"{TASK}parameters: {{scale: 1}}\n",
    ),
    "an octal number": (
        f"{TASK}parameters: {{scale: 01}}\n",
        advice("is another number in YAML 1.1 than in 1.2: write it without the zero, or quote"),
        f"{TASK}parameters: {{scale: 1}}\n",
    ),
    "a pattern": (
        f"{TWO}rules: [{{match: *norm, use: base}}]\n",
        advice("the alias '*{}' has no anchor before it; if it is a pattern, quote it"),
        f"{TWO}rules: [{{match: '*norm*', use: base}}]\n",
    ),
    "a pattern that is no alias": (
        f"{TWO}rules: [{{match: *.mlp.*, use: base}}]\n",
        advice("; quote a pattern that starts with '*' or '&', as in match: '*.mlp.*'"),
        f"{TWO}rules: [{{match: '*.mlp.*', use: base}}]\n",
    ),
    "a key": (
        TWO.replace("{a: ./a", "{1: ./a"),
        advice("the key {}is not text; put it in quotes"),
        TWO.replace("{a: ./a", "{'1': ./a"),
    ),
    "a step": (
        f"{TWO}after: [[rescale]]\n",
        advice("{} is not a step: write its name, or {name: {parameters}}"),
        f"{TWO}after: [rescale]\n",
        f"{TWO}after: [{{rescale: {{}}}}]\n",
    ),
    "a form of values": (
        f"{TASK}parameters: {{scale: {{by_name: [0.1]}}}}\n",
        advice(
            "{} is {}; write {match: PATTERN, value: VALUE}, or {value: VALUE} for all other tensors"
        ),
        f"{TASK}parameters: {{scale: {{by_name: [{{match: '*mlp*', value: 0.1}}, {{value: 1.0}}]}}}}\n",
    ),
    "a form in a form": (
        f"{TASK}parameters: {{scale: {{by_name: [{{value: {{by_name: [{{value: 1.0}}]}}}}]}}}}\n",
        advice("{}.value is `{}` again; write its entries into this list"),
        f"{TASK}parameters: {{scale: {{by_name: [{{value: 1.0}}]}}}}\n",
    ),
    "no base": (
        "base: null\nexperts: {a: ./a, b: ./b}\nmethod: ties\n",
        advice(
            "and the recipe has none: pass --base SOURCE, or take a method of the models themselves"
        ),
        TWO,
        "base: null\nexperts: {a: ./a, b: ./b}\nmethod: linear\n",
    ),
    "an adapter without a base": (
        "base: null\nexperts: {a: ./lora, b: ./b}\nmethod: linear\n",
        advice("expert '{}' is an adapter, and the recipe has no base that it is of: give one"),
        "base: ./base\nexperts: {a: ./lora, b: ./b}\nmethod: linear\nallow: [not-a-fine-tune]\n",
    ),
    "parameters without a method": (
        f"{PAIR}parameters: {{scale: 0.3}}\n",
        advice(
            "No method is named, and {} was chosen, as {}. Name the method that the parameters are for: "
            "--method NAME"
        ),
        f"{TASK}parameters: {{scale: 0.3}}\n",
    ),
    "the first of several rows": (
        f"{TWO}{UNION % '{of: a, id: 1, token: x}'}",
        advice("'token' and 'id' both name the row; remove one of them"),
        f"{TWO}{UNION % '{of: a, id: 1}'}",
    ),
    "a row of zero": (
        f"{TWO}{UNION % '{of: zero, id: 1}'}",
        advice("a row of `zero` is of no token; remove 'token' or 'id'"),
        f"{TWO}{UNION % '{of: zero}'}",
    ),
    "a name that means something": (
        TWO.replace("b: ./b", "union: ./b") + UNION % "a",
        advice("an expert is called '{}', which means something else in `tokenizer`: rename it"),
        TWO + UNION % "{of: a, id: 1}",
    ),
    "a template that is an expert": (
        TWO.replace("b: ./b", "chatml: ./b") + "chat_template: chatml\n",
        advice("chat_template {} is the name of an expert too: rename the expert"),
        f"{TWO}chat_template: chatml\n",
    ),
    # mergekit's.
    "what mergekit passes over": (
        f"{LINEAR}nonsense: 1\n",
        advice("{} mergekit passes over it; --lenient does, with a warning"),
        f"--lenient {LINEAR}nonsense: 1\n",
    ),
    "a method of nobody": (
        LINEAR.replace("linear", "liner"),
        advice("it is one of mergekit's ({}) or of covmerge's (`covmerge methods`)."),
        LINEAR,
    ),
    "two tokenizers": (
        f"{LINEAR}tokenizer: {{source: union}}\ntokenizer_source: union\n",
        advice("`tokenizer` and `tokenizer_source` both name a tokenizer; remove one of them"),
        f"{LINEAR}tokenizer_source: union\n",
    ),
    "a tokenizer of none": (
        f"{LINEAR}tokenizer_source: ./base\n",
        advice("which is none of the models that are merged: name one"),
        f"{LINEAR}tokenizer_source: ./a\n",
    ),
    "a token of none": (
        f"{LINEAR}tokenizer: {{source: union, tokens: {{x: {{force: true}}}}}}\n",
        advice("no `source` says whose row the token gets: name a model, or remove the token"),
        f"{LINEAR}tokenizer: {{source: union, tokens: {{t3: {{source: ./a}}}}}}\n",
        f"{LINEAR}tokenizer: {{source: union}}\n",
    ),
    "a range": (
        STACK % (SLICE % "[0]"),
        advice("layer_range is {}; it is [first, end), such as [0, 8]"),
        STACK % (SLICE % "[0, 2]"),
    ),
    "a value beside filters": (
        LINEAR.replace("weight: 1}", "weight: [{filter: mlp, value: 1}, 1]}", 1),
        advice("`{}` has {} beside filters; write {value: {}}"),
        LINEAR.replace("weight: 1}", "weight: [{filter: mlp, value: 1}, {value: 1}]}", 1),
    ),
    "a module that says nothing of a parameter": (
        ISO % ("parameters: {scale: 0.5}", "parameters: {}", T5),
        advice("`{}` is said of some modules alone ({}): say it of all"),
        ISO % (*["parameters: {scale: 0.5}"] * 2, f"{T5}, parameters: {{scale: 0.5}}"),
    ),
    "filters of one module": (
        MODULES
        % ("parameters: {weight: [{filter: layer_norm, value: 1}, {value: 0.5}]}", ONES, T5),
        advice(
            "leave them out, print the recipe (`covmerge import-mergekit`) and write them into its"
        ),
        MODULES % (ONES, ONES, T5),
    ),
    "layers of one module": (
        MODULES % (ONES, ONES, "slices: [{sources: [{model: ./t5/t0, layer_range: [0, 2]}]}]"),
        advice(
            "layers of one of several modules are not stacked anew: write `models`, which takes each"
        ),
        MODULES % (ONES, ONES, T5),
    ),
    "another order in one module": (
        MODULES % (ONES, ONES, "models: [{model: ./t5/t1}, {model: ./t5/t0}]"),
        advice("two modules name the same models in another order: name them in one order in all"),
        MODULES % (ONES, ONES, T5),
    ),
    "the number of a layer": (
        STACK % f"{SLICE % '[0, 1]'}, {SLICE % SCALED}",
        advice(
            "and here names are the output's, where that layer has another: write a slice for it"
        ),
        STACK % f"{SLICE % '[0, 1]'}, {SLICE % '[0, 1], parameters: {scale: 1}'}",
    ),
    "two bases": (
        BASES % "./b",
        advice("Make it the same in all, or the recipe's `base_model`"),
        BASES % "./base",
        f"base_model: ./base\n{BASES % './base'}".replace("base_model: ./base, ", ""),
    ),
    "many aliases": (
        f"{TWO}tags: [&a x, {', '.join(['*a'] * 1100)}]\n",
        advice("more than {} aliases; write the values out"),
        TWO,
    ),
    "an alias in an alias": (
        "base: &b ./base\nexperts: &e {a: ./a, b: *b}\nmethod: average\n",
        advice("the alias '*{}' lies inside an anchored value; write it out"),
        "base: &b ./base\nexperts: &e {a: ./a, b: ./base}\nmethod: average\nallow: [unchanged-expert]\n",
    ),
    "several stacks of layers": (
        f"{STACKS}slices: [{{base: [0, 2], experts: {{a: [0, 2]}}}}]\n",
        advice("and slices are of one: leave out `slices`, and merge its parts by `rules`"),
        f"{STACKS}rules: [{{match: 'encoder.*', use: base}}]\n",
    ),
    "a density by name": (
        TIES % "",
        advice("rank each tensor by itself with `trim: tensor`, or give one value"),
        TIES % ", trim: tensor",
        f"{PAIR}method: ties\nparameters: {{density: 0.5}}\n",
    ),
    "an epsilon": (
        DELLA % 0.6,
        advice("must stay within (0, 1): choose a smaller epsilon"),
        DELLA % 0.1,
    ),
    "no value": (
        LINEAR.replace("parameters: {weight: 1}", "parameters: {}", 1),
        advice(": say it there, as in `{model: ..., "),
        LINEAR,
    ),
    "no value for all models": (
        SLERP % "",
        advice(": say it, as in `"),
        SLERP % "parameters: {t: 1.0}",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_as_it_is_advised(name, here):
    wrong, said, *right = RECIPES[name]
    file = here / "recipe.yml"
    file.write_text(wrong)
    if said is not None:
        told(said, "merge", file, here / "out")
    for number, text in enumerate(text for text in right if text not in MERGED):
        MERGED.add(text)
        more = ["--lenient"] if text.startswith("--lenient ") else []
        file.write_text(text.removeprefix("--lenient "))
        covmerge("merge", file, here / f"out{number}", *more)


def stacked(layers, **keys):
    sources = [{"model": "./a", "layer_range": layers}]
    return {"merge_method": "passthrough", "slices": [{"sources": sources}]} | keys


def followed(said, file, wrong, right, out="out"):
    """Refuse one recipe with an advice that has a command, run that, and merge the other."""
    file.write_text(json.dumps(wrong))
    typed = re.search(r"`covmerge ([^`]*)`", told(said, "merge", file, out).string)[1]
    places = {"OUT": "folded", "MODEL": "./base", "lora=ADAPTER": "lora=./lora", "BASE": "./base"}
    covmerge(*(places.get(word, word) for word in shlex.split(typed)))
    file.write_text(json.dumps(right))
    covmerge("merge", file, out)
    return load_file(f"{out}/model.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"


def test_a_base_with_an_adapter_is_folded(here):
    said = advice(
        "fold it into the model first (`covmerge merge --base {} --expert lora={} OUT`), and"
    )
    one = {
        "merge_method": "task_arithmetic",
        "models": [{"model": "./a", "parameters": {"weight": 1}}],
    }
    allow = {"base_model": "./base+./lora"} | one
    found = followed(said, here / "recipe.yml", allow, {"base_model": "./folded"} | one)
    torch.testing.assert_close(found[Q], load_file("a/model.safetensors")[Q])


def test_adapters_of_several_models_are_folded(here):
    said = advice(
        "fold each into its own first (`covmerge merge --base MODEL --expert lora=ADAPTER OUT`)"
    )
    both = [{"model": f"{m}+./lora", "parameters": {"weight": 1}} for m in ("./base", "./a")]
    one = [{"model": m, "parameters": {"weight": 1}} for m in ("./folded", "./a")]
    wrong, right = ({"merge_method": "linear", "models": own} for own in (both, one))
    found = followed(said, here / "recipe.yml", wrong, right)
    own = [load_file(f"{name}/model.safetensors")[Q] for name in ("folded", "a")]
    torch.testing.assert_close(
        found[Q].float(), sum(t.float() for t in own) / 2, rtol=0.01, atol=1e-3
    )


def test_an_adapter_in_slices_is_folded(here):
    said = advice(
        "fold it into its base first (`covmerge merge --base BASE --expert lora=ADAPTER OUT`)"
    )
    part = {"base": [0, 2], "experts": {"a": [0, 2]}}
    wrong = {"base": "./base", "experts": {"a": "./lora"}, "method": "average", "slices": [part]}
    found = followed(said, here / "recipe.yml", wrong, wrong | {"experts": {"a": "./folded"}})
    torch.testing.assert_close(found[Q], load_file("folded/model.safetensors")[Q])


def test_models_without_numbers_have_no_slices(here):
    for name, value in (("base", 1.0), ("a", 1.01)):
        save_file({"fc.weight": value * torch.eye(4)}, f"{name}.safetensors")
    given = {"base": "./base.safetensors", "experts": {"a": "./a.safetensors"}, "method": "average"}
    file = here / "recipe.yml"
    file.write_text(json.dumps(given | {"slices": [{"base": [0, 1], "experts": {"a": [0, 1]}}]}))
    said = advice(
        "has no layers to take slices of: none of its names has a number. Leave out `slices`"
    )
    told(said, "merge", file, "out")
    file.write_text(json.dumps(given))
    covmerge("merge", file, "out")


def test_statistics_in_slices(here):
    part = {"base": [0, 2], "experts": {"a": [0, 2]}}
    given = {"base": "./base", "experts": {"a": "./a"}, "method": "average"}
    file = here / "recipe.yml"
    stats = {"experts": {"a": {"source": "./a", "statistics": "./a.covstats.safetensors"}}}
    file.write_text(json.dumps(given | {"slices": [part]} | stats))
    said = advice(
        "go by the names of whole models, and the recipe has slices: leave out one of them"
    )
    told(said, "merge", file, "out")
    file.write_text(json.dumps(given | {"slices": [part]}))
    covmerge("merge", file, "out")


def test_filters_of_one_module_are_written_into_the_printed_recipe(here):
    file = here / "recipe.yml"
    file.write_text(MODULES % ("parameters: {weight: 2, normalize: false}", ONES, T5))
    printed = yaml.safe_load(covmerge("import-mergekit", file).stdout)
    by_name = printed["parameters"]["weight"]["by_name"]
    by_name.insert(0, {"match": "shared.*", "value": 0.25})
    file.write_text(yaml.safe_dump(printed))
    covmerge("merge", file, "out")
    found, one, two = (
        load_file(f"{name}/model.safetensors")["shared.weight"]
        for name in ("out", "t5/t0", "t5/t1")
    )
    torch.testing.assert_close(found, 0.25 * (one + two))


def test_stages(here):
    """Several recipes in a file, as mergekit has them."""
    file = here / "stages.yml"
    two = [json.dumps(stacked([0, 2], name=name)) for name in "xy"]
    file.write_text("\n---\n".join(two))
    said = advice("none is the output {}. Leave it out, or the `name` of one")
    told(said, "merge", file, "out", "--stages", "dir")
    covmerge("merge", file, "--stages", "dir")
    file.write_text("\n---\n".join([two[0], json.dumps(stacked([0, 1]))]))
    said = advice(
        "has a recipe without a name, which makes the output, and none is given: end the command"
    )
    told(said, "merge", file, "--stages", "other")
    covmerge("merge", file, "out", "--stages", "other")
    said = advice(
        "Several, as stages of mergekit's, are merged by `covmerge merge FILE OUT`; a dry run, and"
    )
    told(said, "plan", file)
    file.write_text(json.dumps(stacked([0, 2])))
    covmerge("plan", file)
    file.write_text(two[0].replace('"x"', '"a/b"') + "\n---\n" + two[1])
    said = advice(
        "and a folder is called so: use up to {} letters, digits, '.', '_' or '-', and no '.' at"
    )
    told(said, "merge", file, "--stages", "third")


def test_a_finished_stage_is_merged_anew(here):
    file = here / "stages.yml"
    first, second = stacked([0, 2], name="x"), stacked([0, 1])
    file.write_text(f"{json.dumps(first)}\n---\n{json.dumps(second)}")
    covmerge("merge", file, "out")
    other = stacked([0, 1], name="x")
    file.write_text(f"{json.dumps(other)}\n---\n{json.dumps(second)}")
    said = advice("{} is a finished stage of another recipe ({}): --overwrite merges it anew")
    shutil.rmtree(here / "out")
    told(said, "merge", file, "out", "--resume")
    stored = here / "out.stages" / "x" / "model.safetensors"
    file.write_text(f"{json.dumps(first)}\n---\n{json.dumps(second)}")
    stored.write_bytes(stored.read_bytes()[:-1] + b"\1")
    said = advice("that is not as it was written: {}. --overwrite merges it anew")
    told(said, "merge", file, "out", "--resume")
    file.write_text(f"{json.dumps(other)}\n---\n{json.dumps(second)}")
    covmerge("merge", file, "out", "--overwrite")
    assert not any("layers.1." in name for name in load_file("out.stages/x/model.safetensors"))


def test_a_stage_of_sources_that_changed_is_merged_anew(here):
    shutil.copytree(here / "a", here / "c")
    file, (one, two) = (
        here / "stages.yml",
        (stacked([0, n], name=name) for n, name in [(2, "x"), (1, None)]),
    )
    one["slices"][0]["sources"][0]["model"] = "./c"
    two["slices"][0]["sources"][0]["model"] = "x"
    file.write_text(f"{json.dumps(one)}\n---\n{json.dumps({k: v for k, v in two.items() if v})}")
    covmerge("merge", file, "out")
    shutil.rmtree(here / "out")
    changed = {name: 2 * tensor for name, tensor in load_file("c/model.safetensors").items()}
    save_file(changed, "c/model.safetensors", metadata={"format": "pt"})
    said = advice("{} is a finished stage of other sources: --overwrite merges it anew ({})")
    told(said, "merge", file, "out", "--resume")
    covmerge("merge", file, "out", "--overwrite")
    torch.testing.assert_close(load_file("out/model.safetensors")[Q], changed[Q])


def test_a_path_is_relative_to_the_recipe(here):
    (here / "sub").mkdir()
    file = here / "sub" / "recipe.yml"
    file.write_text(TWO.replace("./base", "t5/base").replace("./a, b: ./b", "../t5/t0"))
    said = advice("but not beside the recipe; write a path relative to {}, or add a revision")
    told(said, "merge", file, "out")
    file.write_text(TWO.replace("./base", "../t5/base").replace("./a, b: ./b", "../t5/t0"))
    covmerge("merge", file, "out")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "slices: [{experts: {a: [0, 1]}}, {experts: {b: [0, 1]}}]",
            advice("'slices' make a model of its own, and --as adapter updates the base"),
        ),
        (
            "moe: {gates: random}",
            advice("'moe' makes a model of its own, and --as adapter updates the base"),
        ),
        ("base: null", advice("--as adapter updates a base, and the recipe has none")),
    ],
)
def test_a_model_of_its_own_is_no_adapter(more, said, tmp_path):
    save_family("llama", tmp_path, experts=2)
    recipe, out = tmp_path / "recipe.yml", tmp_path / "out"
    given = {"base": "./base", "experts": {"a": "./expert1", "b": "./expert2"}, "method": "average"}
    recipe.write_text(json.dumps(given | yaml.safe_load(more)))
    ran = covmerge("merge", recipe, out, "--as", "adapter", code=2)
    assert re.search(said, words(ran.stderr))
    covmerge("merge", recipe, out)


def test_lenient_is_about_mergekits_recipes(tmp_path):
    save_plain(tmp_path)
    recipe, out = write_recipe(tmp_path, "method: ties"), tmp_path / "out"
    ran = covmerge("merge", recipe, out, "--lenient", code=2)
    said = advice("{} is no recipe of mergekit's, and --lenient is about those: leave it out")
    assert re.search(said, words(ran.stderr))
    covmerge("merge", recipe, out)
    ran = covmerge("merge", *flags(tmp_path), tmp_path / "flags", "--lenient", code=2)
    said = advice("--lenient is about recipes of mergekit's, and none is given: leave it out")
    assert re.search(said, words(ran.stderr))
    covmerge("merge", *flags(tmp_path), tmp_path / "flags")
