"""Verification finds what is planted, and says which tensor it is."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, InputError
from tests.checkpoints.hub_server import COMMIT, connect, serve
from tests.cli.runs import save_plain
from tests.e2e.models import save_family


@pytest.fixture
def output(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    covmerge.merge(base, experts, out=tmp_path / "out", method="actmat")
    return tmp_path / "out"


def outcome(folder):
    return {check.name: check for check in covmerge.verify(folder).checks}


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_untouched_output_passes(output):
    report = covmerge.verify(output)
    assert report.ok
    report.raise_if_failed()
    json.dumps(report.summary())
    assert repr(report) == f"<Verification: {output}: every check passed>"
    assert list(report.to_dataframe().columns) == ["check", "result", "detail"]
    assert report._repr_html_().count("<tr>") == 1 + len(report.checks)


def test_nan(output):
    change(output, "encoder.layer.0.output.dense.weight", lambda w: w * float("nan"))
    check = outcome(output)["finite"]
    assert not check.ok
    assert "encoder.layer.0.output.dense.weight" in check.detail
    report = covmerge.verify(output)
    with pytest.raises(CheckFailed, match="finite"):
        report.raise_if_failed()
    assert "checks failed>" in repr(report) and ("finite", "FAILED") in {
        row[:2] for row in report.table().rows
    }


def test_another_shape(output):
    change(output, "pooler.dense.bias", lambda b: b[:3].clone())
    assert "'pooler.dense.bias' is float32 [3]" in outcome(output)["coverage"].detail


def test_a_missing_and_an_unknown_tensor(output):
    tensors = load_file(output / "model.safetensors")
    tensors["stranger"] = tensors.pop("pooler.dense.bias")
    save_file(tensors, output / "model.safetensors")
    detail = outcome(output)["coverage"].detail
    assert "'stranger' is not in the manifest" in detail
    assert "'pooler.dense.bias' is missing" in detail


def test_output_equal_to_the_base(tmp_path):
    base, _ = save_family("bert", tmp_path, experts=1)
    shutil.copytree(base, tmp_path / "copy")
    with pytest.raises(CheckFailed, match="every tensor equals the base's: what was allowed"):
        covmerge.merge(
            base, {"same": tmp_path / "copy"}, out=tmp_path / "out", allow=["unchanged-expert"]
        )
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_copied_tensor_that_changed(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    covmerge.merge(
        base, experts, out=tmp_path / "out", rules=[{"match": "pooler.*", "use": "base"}]
    )
    change(tmp_path / "out", "pooler.dense.bias", lambda b: b + 1)
    check = outcome(tmp_path / "out")["copied"]
    assert not check.ok
    assert "pooler.dense.bias" in check.detail


def test_without_the_base_recorded_norms_serve(output, tmp_path):
    shutil.rmtree(tmp_path / "base")
    found = outcome(output)
    assert found["differs from base"].ok
    assert "recorded norms" in found["differs from base"].detail
    assert "not compared" in found["copied"].detail


def test_a_base_of_the_hub_is_taken_at_the_commit_that_was_merged_over(tmp_path, monkeypatch):
    save_plain(tmp_path)
    (tmp_path / "upload").mkdir()
    (tmp_path / "base.safetensors").rename(tmp_path / "upload" / "model.safetensors")
    rules = [{"match": "embed*", "use": "base"}]
    with serve(tmp_path / "upload") as hub:
        connect(monkeypatch, hub, tmp_path / "cache")
        experts = [tmp_path / "a.safetensors"]
        covmerge.merge("org/name@v1", experts, "average", tmp_path / "out", rules=rules)
        hub.revisions.remove("v1")
        report = covmerge.verify(tmp_path / "out")
        assert report.ok
        assert (
            outcome(tmp_path / "out")["differs from base"].detail
            == "3 of 4 tensors differ from the base's"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
        hub.gated = True
        found = outcome(tmp_path / "out")
        assert "recorded norms" in found["differs from base"].detail
        assert f"org/name@{COMMIT} is gated" in found["copied"].detail


def test_a_lost_head(tmp_path):
    base = {"fc.weight": torch.zeros(2, 2)}
    expert = {"fc.weight": torch.eye(2), "classifier.weight": torch.ones(3, 2)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(expert, tmp_path / "a.safetensors")
    covmerge.merge(
        tmp_path / "base.safetensors",
        {"a": tmp_path / "a.safetensors"},
        method="average",
        out=tmp_path / "out",
    )
    assert outcome(tmp_path / "out")["heads"].ok
    (tmp_path / "out" / "heads" / "a.safetensors").unlink()
    assert not outcome(tmp_path / "out")["heads"].ok


def test_a_folder_that_is_no_output(tmp_path):
    with pytest.raises(InputError, match=r"no covmerge.json"):
        covmerge.verify(tmp_path)
    (tmp_path / "covmerge.json").write_text("[1]")
    with pytest.raises(InputError, match="cannot be read as a covmerge manifest"):
        covmerge.verify(tmp_path)


def test_masks_that_are_gone_or_changed(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    covmerge.merge(base, experts, "emr", tmp_path / "out")
    assert outcome(tmp_path / "out")["masks"].ok
    name = next(iter(experts))
    path = tmp_path / "out" / "masks" / f"{name}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not outcome(tmp_path / "out")["masks"].ok
    shutil.rmtree(tmp_path / "out" / "masks")
    check = outcome(tmp_path / "out")["masks"]
    assert not check.ok and "masks" in check.detail


def test_a_comparison_is_verified_model_by_model(tmp_path):
    base, experts = save_family("bert", tmp_path, experts=2)
    covmerge.compare(base, experts, ["average", "ties"], tmp_path / "study")
    with pytest.raises(InputError, match=r"holds a comparison: verify one of its models.*average"):
        covmerge.verify(tmp_path / "study")
    assert covmerge.verify(tmp_path / "study" / "ties").ok


@pytest.fixture
def over_another(tmp_path):
    """Merge over a base, and put an expert where that was: the output, and its base's place."""

    def made(**settings):
        base, experts = save_family("bert", tmp_path, experts=2)
        covmerge.merge(base, experts, out=tmp_path / "out", method="average", **settings)
        shutil.rmtree(base)
        shutil.copytree(next(iter(experts.values())), base)
        return tmp_path / "out", base

    return made


@pytest.mark.parametrize(
    "settings", [{}, {"tensors": {"embeddings": "base"}}], ids=["all", "copied"]
)
def test_another_model_where_the_base_was_is_not_held_against_the_output(over_another, settings):
    out, base = over_another(**settings)
    checks = outcome(out)
    assert all(check.ok for check in checks.values())
    assert not checks["copied"].made
    assert f"the base at {base} is another than was merged" in checks["copied"].detail
    assert "by recorded norms" in checks["differs from base"].detail


def test_another_base_is_refused_and_the_right_one_is_not(over_another, tmp_path):
    out, base = over_another()
    with pytest.raises(InputError, match=r"is not the base that .* was merged over: pass that one"):
        covmerge.verify(out, base=covmerge.open_checkpoint(base))
    shutil.rmtree(base)
    save_family("bert", tmp_path / "again", experts=2)
    right = tmp_path / "again" / base.name
    (right / "README.md").write_text("What lies beside the weights may change.")
    assert covmerge.verify(out, base=right).ok
    report = covmerge.verify(out, base=covmerge.open_checkpoint(right))
    assert report.ok and "by recorded norms" not in str([own.detail for own in report.checks])


def test_one_is_no_plural(tmp_path):
    save_file({"w": torch.zeros(2, 2)}, tmp_path / "base.safetensors")
    save_file({"w": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    covmerge.merge(
        tmp_path / "base.safetensors", [tmp_path / "a.safetensors"], "average", tmp_path / "out"
    )
    found = outcome(tmp_path / "out")
    assert found["coverage"].detail == "its one tensor is there, and no other"
    assert found["differs from base"].detail == "1 of 1 tensor differs from the base's"
