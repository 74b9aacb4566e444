"""`verify --deep` finds what hashes cannot: an output that its sources do not give."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import InputError
from covmerge.files.checkpoints.hashes import hash_file
from covmerge.files.stores.local import LocalFolder
from covmerge.run.recompute import recompute
from tests.advised import advice
from tests.cli.runs import covmerge as cli
from tests.cli.runs import save_plain, words
from tests.e2e.following import told
from tests.verification.test_files import save_models


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    base, experts = save_models(folder, 3)
    covmerge.merge(base, experts, "ace", folder / "ace")
    covmerge.merge(base, experts, "ties", folder / "ties", out_dtype="bfloat16")
    covmerge.extract(base, experts["e0"], folder / "adapter", 2)
    return folder


def forge(folder, name, edit):
    """Change a tensor, and its hashes with it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = edit(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = json.loads((folder / "covmerge.json").read_text())
    manifest["files"]["model.safetensors"] = hash_file(
        LocalFolder(folder), "model.safetensors"
    ).as_json()
    (folder / "covmerge.json").write_text(json.dumps(manifest))


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["average", "actmat", "tsv_m", "dare_ties", "emr", "consensus"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_is_what_its_sources_give(tmp_path, method, dtype):
    base, experts = save_models(tmp_path, 2)
    covmerge.merge(base, experts, method, tmp_path / "out", out_dtype=dtype)
    check = recompute(tmp_path / "out", tensors=99)
    assert check.ok
    assert (
        check.detail
        == "5 of 5 merged tensors are what the sources give by the float64 reference implementations"
    )


@pytest.mark.parametrize("kind", ["ace", "ties"])
def test_an_output_that_its_sources_do_not_give(merged, tmp_path, kind):
    out = shutil.copytree(merged / kind, tmp_path / "out")
    ran = cli("verify", out, "--deep", "--tensors=2")
    assert "recomputed ok 2 of 5 merged tensors are what the sources give" in words(ran.stdout)

    def edit(weight):
        changed = weight.clone()
        changed[5, 7:9] = changed[5, 7:9].flip(0)
        return changed

    forge(out, "h.3.proj.weight", edit)
    assert cli("verify", out, "--json").json["ok"]  # the hashes are right
    report = cli("verify", out, "--deep", "--json", "--tensors=5", code=1).json
    (failed,) = [check for check in report["checks"] if not check["ok"]]
    assert failed["name"] == "recomputed"
    assert "'h.3.proj.weight' is off by" in failed["detail"]
    assert "h.2" not in failed["detail"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("updates", [-3, 3])
def test_one_element_of_many(tmp_path, dtype, updates):
    """Moved by as little as three updates, it is lost in what storing all of a matrix changes."""
    draw, moved = torch.Generator().manual_seed(0), 0.002
    base = 0.02 * torch.randn(512, 512, generator=draw)
    for name in ("base", "a", "b"):
        update = moved * torch.randn(512, 512, generator=draw) if name != "base" else 0
        (tmp_path / name).mkdir()
        save_file(
            {"h.0.fc.weight": (base + update).to(dtype)}, tmp_path / name / "model.safetensors"
        )
    experts = {name: tmp_path / name for name in "ab"}
    covmerge.merge(tmp_path / "base", experts, "average", tmp_path / "out")
    assert recompute(tmp_path / "out").ok

    def edit(weight):
        changed = weight.clone()
        changed[3, 5] += updates * moved
        return changed

    forge(tmp_path / "out", "h.0.fc.weight", edit)
    detail = recompute(tmp_path / "out").detail
    assert detail.startswith("not what the sources give") and "element [3, 5] by 0.00" in detail


def test_two_layers_that_were_swapped(merged, tmp_path):
    out = shutil.copytree(merged / "ace", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    for one, other in ((0, 3), (3, 0)):
        forge(out, f"h.{one}.proj.weight", lambda _, n=other: tensors[f"h.{n}.proj.weight"])
    assert covmerge.verify(out).ok
    detail = recompute(out, tensors=5).detail
    assert "h.0.proj" in detail and "h.3.proj" in detail


def test_sources_that_are_gone_or_others(merged, tmp_path):
    models = shutil.copytree(merged, tmp_path / "models")
    manifest = (models / "ace" / "covmerge.json").read_text()
    (models / "ace" / "covmerge.json").write_text(manifest.replace(str(merged), str(models)))
    cli("verify", models / "ace", "--deep")
    path = models / "e1.safetensors"
    tensors = load_file(path)
    tensors["h.1.proj.weight"][0, 0] += 1
    save_file(tensors, path)
    told = cli("verify", models / "ace", "--deep", code=2).stderr
    assert "expert e1 is not what was merged" in told
    assert re.search(
        advice("Put the source back, or verify without --deep"), " ".join(told.split())
    )
    cli("verify", models / "ace")
    shutil.copy(merged / "e1.safetensors", path)
    cli("verify", models / "ace", "--deep")
    path.unlink()
    assert "e1.safetensors" in cli("verify", models / "ace", "--deep", code=2).stderr


def test_sources_that_were_given_as_relative_paths(merged, tmp_path, monkeypatch):
    models = shutil.copytree(merged, tmp_path / "models")
    manifest = (models / "ace" / "covmerge.json").read_text()
    (models / "ace" / "covmerge.json").write_text(manifest.replace(f"{merged}/", ""))
    monkeypatch.chdir(models)
    cli("verify", models / "ace", "--deep")
    monkeypatch.chdir(tmp_path)
    told = cli("verify", models / "ace", "--deep", code=2).stderr
    assert "run this in the folder of the merge" in told


def test_what_cannot_be_computed_again(merged, tmp_path):
    with pytest.raises(InputError, match="is an adapter"):
        recompute(merged / "adapter")
    state = {"w": torch.eye(3)}
    covmerge.merge(state, {"a": {"w": 2 * torch.eye(3)}}, "average", tmp_path / "out")
    with pytest.raises(InputError, match="state dict"):
        recompute(tmp_path / "out")


def test_what_cannot_be_computed_again_here(tmp_path, monkeypatch):
    monkeypatch.chdir(save_plain(tmp_path))
    given = ["--base", "base.safetensors", "--expert", "a=a.safetensors", "--method", "average"]
    cli("merge", *given, "--as", "adapter", "--rank", "2", "adapter")
    said = advice("and only merged models are computed again: verify it without --deep")
    told(said, "verify", "--deep", "adapter")
    cli("verify", "adapter")
    cli("merge", *given, "out")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    said = advice("as they were given to it: run this in the folder of the merge. {}")
    told(said, "verify", "--deep", "../out")
    monkeypatch.chdir(tmp_path)
    cli("verify", "--deep", "out")


def test_an_output_that_cannot_be_read_fails_and_is_not_called_a_source(merged, tmp_path):
    out = shutil.copytree(merged / "ace", tmp_path / "out")
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    report = cli("verify", out, "--deep", "--json", code=1).json
    found = {check["name"]: (check["ok"], check["made"]) for check in report["checks"]}
    assert found == {"files": (False, True), "coverage": (False, True), "recomputed": (True, False)}
