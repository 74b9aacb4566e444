"""Every flag of `covmerge merge` on tiny real checkpoints."""

import json
import shlex
import shutil
from collections import Counter

import torch
import transformers
from safetensors.torch import load_file

from covmerge.plan.recipe import load
from covmerge.run import sources as run_sources
from tests.cli.runs import covmerge, flags, save_plain, words, write_recipe
from tests.e2e.models import fine_tuned, save_family
from tests.e2e.test_resume import interrupt_after

UP = "layers.0.mlp.up_proj.weight"


def manifest(out):
    return json.loads((out / "covmerge.json").read_text())


def merged(out, name=UP):
    return load_file(out / "model.safetensors")[name]


def sources(folder, names=("base", "a", "b"), tensor=UP):
    return [load_file(folder / f"{name}.safetensors")[tensor] for name in names]


def test_from_flags(models):
    asked = ["merge", *flags(models), "--method", "average", models / "out"]
    ran = covmerge(*asked)
    a, b = sources(models, ["a", "b"])
    assert torch.allclose(merged(models / "out"), (a + b) / 2, atol=1e-6)
    text = words(ran.stdout)
    assert f"Merged a, b on {models}/base.safetensors by average: {models}/out" in text
    assert f"covmerge verify {models}/out" in text
    assert "taken average for 4 tensors" in text
    assert "--methods average,auto,tsv_m,iso_c" in text
    more = words(covmerge(*asked, "--overwrite", "--verbose").stdout)
    assert "average (norm)" in more and "average (norm)" not in text
    assert "verified coverage, finite, differs from base, copied, rounding, heads" in more
    assert "from transformers" not in text  # there is no config.json
    assert "note there is no config.json" in text
    assert ran.stderr == ""


def test_the_command_that_scores_it_beside_others_is_run(models, monkeypatch):
    (models / "your_eval.py").write_text("print(0.5)")
    monkeypatch.chdir(models)
    given = ["--method=ties", "--set", "density=0.3", "--weight", "a=2", models / "an out"]
    ran = covmerge("merge", *flags(models), "--tensors", "embeddings=base", *given)
    (line,) = (line for line in ran.stdout.splitlines() if "--score" in line)
    program, *asked = shlex.split(line)
    assert program == "covmerge"
    covmerge(*asked)
    own = models / "an out-scored" / "ties-density=0.3"
    for name in (UP, "embed_tokens.weight"):
        assert torch.equal(merged(own, name), merged(models / "an out", name))


def test_the_diagnostics(models):
    text = words(
        covmerge("merge", *flags(models), "--method=ace", "--verbose", models / "out").stdout
    )
    assert "γ gate fired in " in text
    assert " of 2 matrices" in text
    assert "jitter none was needed" in text
    assert "unchanged none" in text
    assert "rounding storing loses 0.00%" in text
    assert "overlapping;" in text
    assert " measured, " in text


def test_one_expert_under_two_names_is_said(models):
    said = "experts 'a' and 'again' are one model under 2 names"
    shutil.copy(models / "a.safetensors", models / "copy.safetensors")
    for again in ("a", "copy"):  # the plan knows places, the merge hashes
        twice = f"--expert=again={models / again}.safetensors"
        given = [*flags(models), twice, "--method=average"]
        assert (said in words(covmerge("merge", *given, "--dry-run").stdout)) == (again == "a")
        covmerge("merge", *given, models / again)
        notes = manifest(models / again)["notes"]
        assert [said in note for note in notes].count(True) == 1


def test_weight_and_set(models):
    weighted = models / "weighted"
    covmerge("merge", *flags(models), "--weight", "a=3", "--method=average", weighted)
    base, a, b = sources(models)
    assert torch.allclose(merged(weighted), (3 * a + b) / 4, atol=1e-6)
    out = models / "scaled"
    covmerge("merge", *flags(models), "--method=task_arithmetic", "--set", "scale=0.5", out)
    assert torch.allclose(merged(out), base + 0.5 * (a + b - 2 * base), atol=1e-6)


def test_tensors_dtype_and_out_dtype(models):
    options = ["--tensors", "embeddings=base", "--dtype", "float64", "--out-dtype", "bfloat16"]
    ran = covmerge("merge", *flags(models), *options, "--verbose", models / "out")
    embedding = "embed_tokens.weight"
    (base,) = sources(models, ["base"], embedding)
    assert torch.equal(merged(models / "out", embedding), base.bfloat16())
    recipe = manifest(models / "out")["recipe"]
    assert (recipe["dtype"], recipe["output"]["dtype"]) == ("float64", "bfloat16")
    assert "rounding storing loses 0.00%" not in words(ran.stdout)


def test_shard_size(models):
    covmerge("merge", *flags(models), "--shard-size", "1kB", models / "out")
    assert len(list((models / "out").glob("*.safetensors"))) > 1


def test_threads_device_and_memory_in_the_json(models):
    before = torch.get_num_threads()
    options = ["--threads", 1, "--device", "cpu", "--max-memory", "100GB"]
    ran = covmerge("merge", *flags(models), *options, "--json", models / "out")
    assert torch.get_num_threads() == before
    assert set(ran.json) == {
        *("path", "method", "run", "totals", "heads", "warnings", "notes", "verification")
    }
    assert ran.json["path"] == ran.json["verification"]["folder"] == str(models / "out")
    run = ran.json["run"]
    assert (run["threads"], run["device"], run["resumed_items"]) == (1, "cpu", 0)
    assert run["wall_seconds"] >= run["seconds"]
    assert ran.json["totals"]["by_rule"] == manifest(models / "out")["totals"]["by_rule"]
    assert ran.stderr == ""


def test_from_a_recipe_and_the_flags_over_it(models):
    recipe = write_recipe(models, "method: ace\nparameters: {eps: 1e-3}")
    covmerge("merge", recipe, models / "plain")
    assert manifest(models / "plain")["recipe"]["parameters"] == {"eps": 1e-3}
    ran = covmerge("merge", recipe, models / "over", "--method", "actmat", "--weight", "b=2")
    over = manifest(models / "over")["recipe"]
    assert (over["method"], over["parameters"]) == ("actmat", {})
    assert over["experts"]["b"]["weight"] == 2.0
    assert ran.stderr.startswith("note: --method actmat drops ace's parameters")


def test_overwrite(models):
    out = models / "out"
    covmerge("merge", *flags(models), "--method=average", out)
    first = merged(out)
    ran = covmerge("merge", *flags(models), "--method=task_arithmetic", out, code=2)
    assert "pass --overwrite" in ran.stderr
    assert torch.equal(merged(out), first)
    covmerge("merge", *flags(models), "--method=task_arithmetic", out, "--overwrite")
    assert not torch.equal(merged(out), first)


def test_resume(models):
    experts = {name: models / f"{name}.safetensors" for name in ("a", "b")}
    # `--resume` continues what the Python API left, and says how much was there.
    interrupt_after(models, models / "base.safetensors", experts, items=2)
    ran = covmerge("merge", *flags(models), models / "out", code=2)
    assert "--resume to go on" in ran.stderr
    ran = covmerge("merge", *flags(models), models / "out", "--resume")
    assert "of 4 items were done by an earlier run" in words(ran.stdout)
    covmerge("merge", *flags(models), models / "undisturbed")
    assert torch.equal(merged(models / "out"), merged(models / "undisturbed"))


def test_transformers_loads_what_the_report_says(tmp_path):
    base, experts = save_family("llama", tmp_path, experts=2)
    named = [f"--expert={name}={path}" for name, path in experts.items()]
    ran = covmerge("merge", "--base", base, *named, tmp_path / "out dir")
    text = words(ran.stdout)
    assert f"covmerge verify '{tmp_path}/out dir'" in text
    assert f'LlamaForCausalLM.from_pretrained("{tmp_path}/out dir")' in text
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out dir")
    assert words(covmerge("verify", tmp_path / "out dir").stdout).endswith("every check passed")


def test_heads_are_reported(tmp_path):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    base = transformers.BertModel(config)
    base.save_pretrained(tmp_path / "base")
    named = []
    for name, labels in (("topic", 3), ("tone", 2)):
        config.num_labels = labels
        expert = transformers.BertForSequenceClassification(config)
        expert.bert.load_state_dict(fine_tuned(base, seed=labels, scale=0.005).state_dict())
        expert.save_pretrained(tmp_path / name)
        named.append(f"--expert={name}={tmp_path / name}")
    arguments = ["merge", "--base", tmp_path / "base", *named]
    shown = words(covmerge(*arguments, "--dry-run").stdout)
    kept = "heads kept topic (2 tensors), tone (2 tensors), one file each under heads/"
    assert kept in shown
    heads = covmerge(*arguments, "--dry-run", "--json").json["heads"]
    assert heads == {n: ["classifier.bias", "classifier.weight"] for n in ("tone", "topic")}
    assert kept in words(covmerge(*arguments, tmp_path / "out").stdout)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path):
    from safetensors.torch import save_file

    name = "evil\x1b[2J[red].weight"
    for file, scale in (("base", 1.0), ("a", 1.5), ("b", 2.0)):
        save_file({name: scale * torch.eye(4)}, tmp_path / f"{file}.safetensors")
    ran = covmerge("merge", *flags(tmp_path), "--method=ace", "--set", "tau=0", tmp_path / "out")
    assert "\x1b" not in ran.stdout
    assert "evil\ufffd[2J[red].weight" in ran.stdout
    save_file({name: torch.full((4, 4), torch.nan)}, tmp_path / "b.safetensors")
    ran = covmerge("merge", *flags(tmp_path), tmp_path / "out2", code=2)
    assert "evil\ufffd[2J[red].weight" in ran.stderr
    assert "\x1b" not in ran.stderr


def test_expert_named_like_a_recipe_is_fine(tmp_path):
    save_plain(tmp_path, experts=["on", "1e-5"])
    ran = covmerge(
        "merge", *flags(tmp_path, ["on", "1e-5"]), tmp_path / "out", "--json", "--method=average"
    )
    assert list(manifest(tmp_path / "out")["recipe"]["experts"]) == ["on", "1e-5"]
    assert ran.json["verification"]["ok"]


def test_a_recipe_with_flags_is_read_and_planned_once(models, monkeypatch):
    counted = Counter()
    for module, name in ((load, "_text"), (load, "_validate"), (run_sources, "build_plans")):
        monkeypatch.setattr(module, name, counting(counted, getattr(module, name)))
    covmerge(
        "merge", write_recipe(models), models / "out", "--dtype=float64", "--tensors=missing=base"
    )
    # As the file says it, and with the flags over it.
    assert counted == {"_text": 1, "_validate": 2, "build_plans": 1}


def counting(counted, function):
    def called(*args, **kwargs):
        counted[function.__name__] += 1
        return function(*args, **kwargs)

    return called
