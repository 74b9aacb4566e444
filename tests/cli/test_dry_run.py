import re
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from covmerge.front.api import plan_recipe
from covmerge.front.cli import machine, show
from covmerge.plan.recipe import load_recipe, parse_recipe
from covmerge.run.engine.inputs import Sources
from covmerge.run.sources import open_recipe
from tests.advised import advice
from tests.cli.runs import covmerge, flags, words, write_recipe
from tests.e2e.models import save_family

Usage = namedtuple("Usage", "total used free")
# What conftest.py makes less of.
MEASURED = {
    name: getattr(machine, name)
    for name in ("_PRODUCT_SIDE", "_EIGEN_SIDE", "_SECONDS", "_HASHED_BYTES")
}


def test_the_plan_is_shown_and_nothing_is_written(models):
    before = sorted(models.iterdir())
    text = words(covmerge("merge", *flags(models), "--dry-run", models / "out").stdout)
    assert "Nothing is written" in text
    assert "linear auto 2 512 B" in text
    assert "embedding average (embeddings: auto) 1 512 B" in text
    assert "work reads 3.17 kB, writes 1.06 kB, " in text
    assert "FLOP in float32" in text
    assert "peak memory" in text
    assert "largest " in text
    assert "while merged" in text
    assert "disk 1.06 kB needed, " in text
    assert " free at /" in text
    assert "a rough estimate from a short test" in text
    assert "note there is no config.json" in text
    assert sorted(models.iterdir()) == before


def test_as_json(models):
    ran = covmerge("merge", *flags(models), "--dry-run", "--json", models / "deep" / "er")
    plan = ran.json
    assert ran.stderr == ""
    assert (plan["tensors"], plan["write_bytes"], plan["read_bytes"]) == (4, 1056, 3168)
    memory = plan["memory"]
    assert memory["peak"] == memory["resident"] + memory["workspace"] + memory["in_flight"]
    assert plan["disk"]["needed"] == 1056
    assert plan["disk"]["free"] > 1056
    assert plan["disk"]["folder"] == str(models)  # the nearest that exists
    assert plan["estimate"]["seconds"] >= 0
    assert plan["estimate"]["flops_per_second"] > 1e6
    assert plan["estimate"]["read_bytes_per_second"] > 0


def test_out_may_be_left_out(models):
    assert "disk 1.06 kB needed time" in words(
        covmerge("merge", *flags(models), "--dry-run").stdout
    )
    plan = covmerge("merge", write_recipe(models), "--dry-run", "--json").json
    assert plan["disk"] == {"needed": 1056, "free": None, "folder": None}


def test_it_measures_with_the_threads_asked_for(models, monkeypatch):
    seen = []
    timed = machine._timed
    monkeypatch.setattr(
        machine, "_timed", lambda *a: seen.append(torch.get_num_threads()) or timed(*a)
    )
    before = torch.get_num_threads()
    covmerge("merge", *flags(models), "--dry-run", "--threads", 1)
    # Products, a piece of the average of embeddings, and eigenproblems.
    assert (seen, torch.get_num_threads()) == ([1, 1, 1], before)


def test_a_device_that_is_not_there(models):
    ran = covmerge("merge", *flags(models), "--dry-run", "--device", "cuda:99", code=2)
    assert "--device cuda:99 cannot be used here" in ran.stderr
    ran = covmerge("merge", *flags(models), "--dry-run", "--device", "gpu", code=2)
    assert "--device gpu cannot be used here: it is cpu, cuda, cuda:1, mps, or auto" in ran.stderr


def test_a_device_is_chosen(models):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ran = covmerge("merge", *flags(models), models / "out", "--device", "auto", "--json")
    assert ran.json["run"]["device"] == device


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--json"], []])
def test_a_full_disk_is_met_before_any_work(models, monkeypatch, options):
    before = sorted(models.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 1000, 1000))
    ran = covmerge("merge", *flags(models), models / "out", *options, code=2)
    assert ran.stderr.startswith("error: no room for the output: 1.06 kB needed, 1.00 kB free at ")
    if "--json" in options:
        assert ran.json["disk"]["free"] == 1000
    assert sorted(models.iterdir()) == before


def test_another_output_folder_has_room(models, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    free = {models: 1000, elsewhere: 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free[path]))
    refused = covmerge("merge", *flags(models), models / "out", code=2)
    assert re.search(advice("free some space or choose another output folder"), refused.stderr)
    covmerge("merge", *flags(models), elsewhere / "out")


def test_what_a_resumed_merge_has_reserved_is_not_asked_for_again(models, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 1000, 1000))
    covmerge("merge", *flags(models), models / "out", "--dry-run", "--resume")


def test_a_plan_that_cannot_be_made(models):
    ran = covmerge("merge", *flags(models), "--dry-run", "--method", "acee", code=2)
    assert ran.stderr == "error: there is no method 'acee'. Did you mean 'ace'?\n"
    assert ran.stdout == ""
    ran = covmerge("merge", *flags(models), "--dry-run", "--max-memory", "1MB", code=2)
    assert "are allowed (--max-memory)" in ran.stderr


def test_sources_on_the_hub_are_not_measured(models):
    plan, _ = plan_recipe(load_recipe(write_recipe(models)))
    recipe = parse_recipe({"base": "org/base", "experts": {"a": "org/a"}})
    speed = machine.measure_speed(recipe, plan, Sources({}), "cpu", None)
    assert (speed.read, speed.read_from, speed.by_entry) == (None, None, {})


def test_a_piece_is_done_of_each_method_that_goes_entry_by_entry(models):
    recipe = load_recipe(write_recipe(models, "method: ties\nparameters: {density: 0.5}"))
    with open_recipe(recipe) as opened:
        plan, checkpoints = opened.plan(recipe)
        speed = machine.measure_speed(recipe, plan, checkpoints.sources(), "cpu", 1)
    assert {*speed.by_entry} == {"ties"} and speed.by_entry["ties"] > 0
    assert speed.eigen is None  # the plan has none
    free = replace(speed, begun=0.0, hashed=float("inf"), read=None)
    spent = [speed.by_entry[item.tensor.operation.method] * item.read_bytes for item in plan.items]
    assert free.seconds(plan) == pytest.approx(sum(spent))
    hashed = replace(free, begun=2.0, hashed=1e3)
    sources = sum(item.read_bytes for item in plan.items)
    assert hashed.seconds(plan) == pytest.approx(
        2.0 + (sources + 2 * plan.write_bytes) / 1e3 + sum(spent)
    )


def test_a_piece_that_cannot_be_merged_is_named(models):
    tensors = load_file(models / "a.safetensors")
    tensors["embed_tokens.weight"][0, 0] = float("nan")
    save_file(tensors, models / "a.safetensors")
    arguments = ["merge", *flags(models), "--dry-run"]
    text = words(covmerge(*arguments).stdout)
    assert "the merge will fail as it did: 'embed_tokens.weight' of expert 'a' holds 1 NaN" in text
    problem = covmerge(*arguments, "--json").json["estimate"]["problem"]
    assert problem in covmerge("merge", *flags(models), models / "out", code=2).stderr


def test_a_piece_is_small(models, monkeypatch):
    plan, _ = plan_recipe(
        load_recipe(write_recipe(models, "method: ties\nparameters: {density: 0.5}"))
    )
    (whole,) = plan.global_passes
    monkeypatch.setattr(machine, "_PIECE_BYTES", 1)
    piece = machine._pieces(plan)["ties"]
    (item,) = piece.items
    assert item.read_bytes == min(item.read_bytes for item in whole.items)
    (counted,) = piece.global_passes
    assert [item.key for item in counted.items] == [item.key] and len(whole.items) > 1
    plan, _ = plan_recipe(load_recipe(write_recipe(models, "method: ace")))
    assert {*machine._pieces(plan)} == {"average"}  # of what is no matrix


def test_products_and_eigenproblems_are_counted_apart_and_a_busy_machine_is_named(models):
    plan, _ = plan_recipe(load_recipe(write_recipe(models, "method: tsv_m")))
    eigen = sum(item.eigen_flops for item in plan.items)
    assert 0 < eigen < plan.flops
    free = machine.Speed(flops=1e3, eigen=1e2, share=1.0, read=None, read_from=None)
    assert free.seconds(plan) == pytest.approx((plan.flops - eigen) / 1e3 + eigen / 1e2)
    busy = replace(free, share=0.25)
    assert busy.seconds(plan) == free.seconds(plan)
    assert "25% of the processors' time" in show._time(plan, busy) and "busy" not in show._time(
        plan, free
    )


def test_real_model(tmp_path, monkeypatch):
    for name, value in MEASURED.items():
        monkeypatch.setattr(machine, name, value)
    base, experts = save_family("gpt2", tmp_path, experts=2)
    named = [f"--expert={name}={path}" for name, path in experts.items()]
    arguments = ["merge", "--base", base, *named, "--dry-run"]
    text = covmerge(*arguments).stdout
    assert "conv1d" in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert covmerge(*arguments, "--json").json["family"] == "gpt2"
