import json

import torch
from safetensors.torch import load_file, save_file

from tests.cli.runs import covmerge, flags, words


def test_good(models):
    covmerge("merge", *flags(models), models / "out")
    ran = covmerge("verify", models / "out")
    for name in ("files", "coverage", "finite", "differs from base", "copied", "rounding", "heads"):
        assert f"{name} ok" in words(ran.stdout)
    assert ran.stdout.endswith(f"{models}/out: every check passed\n")
    report = covmerge("verify", models / "out", "--json").json
    assert report["ok"]
    assert report["folder"] == str(models / "out")


def test_damaged(models):
    covmerge("merge", *flags(models), models / "out")
    file = models / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    ran = covmerge("verify", models / "out", code=1)
    assert "finite FAILED layers.0.mlp.up_proj.weight" in words(ran.stdout)
    assert ran.stdout.endswith("2 of 7 checks failed\n")
    report = covmerge("verify", models / "out", "--json", code=1).json
    assert not report["ok"]
    assert {check["name"] for check in report["checks"] if not check["ok"]} == {
        "files",
        "finite",
    }


def test_not_an_output(models):
    ran = covmerge("verify", models, code=2)
    assert ran.stderr.startswith(f"error: {models} has no covmerge.json")
    assert ran.stdout == ""
    (models / "covmerge.json").write_text(json.dumps({"tensors": {}}))
    ran = covmerge("verify", models, "--json", code=2)
    assert "cannot be read as a covmerge manifest" in ran.stderr
    assert ran.stdout == ""


def test_what_was_added_is_not_passed_over(models):
    covmerge("merge", *flags(models), models / "out")
    (models / "out" / "chat_template.jinja").write_text("{{ evil }}")
    said = words(covmerge("verify", models / "out").stdout)
    assert "chat_template.jinja was added since" in said
    assert said.endswith("every check passed, but see what is said of files")
