"""`covmerge report`, and `covmerge merge --report`; what the page says is tested in tests/report."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from covmerge.front.reporting.job import FILE_NAME
from tests.cli.runs import covmerge as command
from tests.cli.runs import flags, words
from tests.report.pages import parse


def test_command(models):
    out = models / "out"
    ran = command("merge", *flags(models), out, "--report")
    assert f"Report: {out / FILE_NAME}" in ran.stdout
    assert "time" in parse((out / FILE_NAME).read_text()).text
    ran = command("report", out)
    assert words(ran.stdout).startswith("2 experts of 'base.safetensors' became one model by auto;")
    assert ran.stdout.endswith(f"Report: {out / FILE_NAME}\n")
    assert "Times are measured while merging" in (out / FILE_NAME).read_text()
    command("verify", out)  # the page is no part of the model
    ran = command("report", out, "--html", models / "a.html", "--spectra", "none")
    assert "spectra" not in [
        f.attributes["id"] for f in parse((models / "a.html").read_text()).all("figure")
    ]


@pytest.mark.usefixtures("no_pictures")
def test_command_json(models):
    out = models / "out"
    ran = command("merge", *flags(models), "--method=ace", out, "--report", "--json")
    assert ran.json["report"] == str(out / FILE_NAME)
    (out / FILE_NAME).unlink()
    ran = command("report", out, "--json")
    assert ran.json["manifest"]["recipe"]["method"] == "ace"
    assert set(ran.json["inspection"]["summary"]["retention"]) == {"a", "b"}
    assert not (out / FILE_NAME).exists()
    command("report", out, "--json", "--html", models / "a.html")
    assert (models / "a.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_command_refuses(models):
    ran = command("report", models, code=2)
    assert "has no covmerge.json" in ran.stderr
    out = models / "out"
    command("merge", *flags(models), out)
    (out / FILE_NAME).write_text("mine")
    ran = command("report", out, code=2)
    assert "is no report of covmerge: pass --overwrite" in ran.stderr
    command("report", out, "--overwrite")


@pytest.mark.usefixtures("no_pictures")
def test_command_of_a_damaged_output(models):
    out = models / "out"
    command("merge", *flags(models), out)
    tensors = load_file(out / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"] = torch.zeros(8, 8)
    tensors["layers.0.input_layernorm.weight"] += 1.0
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, out / "model.safetensors")
    ran = command("report", out, code=1)
    assert "fails its verification" in ran.stderr
    assert "Do not use it" in (out / FILE_NAME).read_text()
