"""The model of one expert: of its own base and merge, whatever their files are called, or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CovmergeError
from tests.advised import advice

NAME = "fc.weight"
W = torch.randn(6, 5, generator=torch.manual_seed(0))


def save(path, weight, **others):
    save_file({NAME: weight, **others}, path)
    return path


@pytest.fixture
def emr(tmp_path):
    """A merge of two experts to files, and the model of the first."""
    base = save(tmp_path / "base.safetensors", W)
    experts = {"a": {NAME: W + 0.1}, "b": {NAME: W - 0.2 * torch.eye(6, 5)}}
    covmerge.merge(base, experts, "emr", tmp_path / "out")
    return tmp_path / "out", base, covmerge.load_expert(tmp_path / "out", "a", base)


def elsewhere(folder, weight, how):
    """The same tensors as other files."""
    match how:
        case "file":
            return save(folder / "other.safetensors", weight)
        case "torch":
            torch.save({NAME: weight}, folder / "other.bin")
            return folder / "other.bin"
        case "folder":
            (folder / "other").mkdir()
            save(folder / "other" / "model.safetensors", weight)
            return folder / "other"
    return {NAME: weight}


@pytest.mark.parametrize("how", ["file", "torch", "folder", "memory"])
def test_a_base_is_known_by_its_values(how, emr, tmp_path):
    out, base, right = emr
    same = elsewhere(tmp_path, W, how)
    assert torch.equal(covmerge.load_expert(out, "a", same)[NAME], right[NAME])
    (tmp_path / "wrong").mkdir()
    said = advice("{} is not the base that {} was merged over: pass that one")
    with pytest.raises(CovmergeError, match=said):
        covmerge.load_expert(out, "a", elsewhere(tmp_path / "wrong", W + 1e-3, how))
    assert torch.equal(covmerge.load_expert(out, "a", base)[NAME], right[NAME])


@pytest.mark.parametrize("part", ["weights", "head"])
def test_weights_of_another_merge(part, emr, tmp_path):
    out, base, _ = emr
    if part == "head":
        experts = {
            n: {NAME: W + 0.1 * i, "head.weight": torch.ones(i, 5)} for i, n in ((2, "a"), (3, "b"))
        }
        rules = [{"match": "head.weight", "use": "head"}]
        covmerge.merge(base, experts, "emr", out, rules=rules, overwrite=True)
    file = out / ("model.safetensors" if part == "weights" else "heads/a.safetensors")
    kept = file.read_bytes()
    save_file({name: tensor + 1e-3 for name, tensor in load_file(file).items()}, file)
    said = advice("of {} is not the file that the merge wrote: merge again")
    with pytest.raises(CovmergeError, match=said):
        covmerge.load_expert(out, "a", base)
    file.write_bytes(kept)  # as another merge writes it
    covmerge.load_expert(out, "a", base)


def test_a_base_that_is_not_recorded(emr, tmp_path):
    """As an older covmerge wrote it."""
    out, base, right = emr
    manifest = json.loads((out / "covmerge.json").read_text())
    del manifest["base_probe"]
    (out / "covmerge.json").write_text(json.dumps(manifest))
    said = advice("does not say what base the masks are over: merge again")
    with pytest.raises(CovmergeError, match=said):
        covmerge.load_expert(out, "a", base)
    shutil.rmtree(out)
    covmerge.merge(base, {"a": {NAME: W + 0.1}, "b": {NAME: W - 0.2 * torch.eye(6, 5)}}, "emr", out)
    assert torch.equal(covmerge.load_expert(out, "a", base)[NAME], right[NAME])


@pytest.mark.parametrize("record", ['{"sha256": "0"}', '{"rescaler": -1.0, "sha256": "0"}'])
def test_damaged_rescalers(record, emr):
    out, base, right = emr
    file = out / "masks" / "rescalers.json"
    kept = file.read_text()
    file.write_text(f'{{"a": {record}}}')
    missing = advice("has no rescaler of '{}': merge again")
    wrong = advice("the rescaler of '{}' is {}: merge again")
    with pytest.raises(CovmergeError, match=f"{missing}|{wrong}"):
        covmerge.load_expert(out, "a", base)
    file.write_text(kept)
    assert torch.equal(covmerge.load_expert(out, "a", base)[NAME], right[NAME])


def test_an_expert_beyond_the_dtype_of_the_merge(tmp_path):
    """γ is 1.5: the expert's own norm is in one tensor that was elected, and one that was not."""
    base = {n: torch.zeros(2, 2) for n in ("x.weight", "y.weight")}
    a = {"x.weight": torch.full((2, 2), -3e4), "y.weight": torch.full((2, 2), 6e4)}
    b = {"x.weight": torch.full((2, 2), 5e4), "y.weight": torch.full((2, 2), 6e4)}
    covmerge.merge(base, {"a": a, "b": b}, "emr", tmp_path / "half", out_dtype="float16")
    said = advice(
        "overflow the dtype of the merged model ({}): merge to another dtype (--out-dtype float32)"
    )
    with pytest.raises(CovmergeError, match=said):
        covmerge.load_expert(tmp_path / "half", "a", base)
    covmerge.merge(base, {"a": a, "b": b}, "emr", tmp_path / "out", out_dtype="float32")
    found = covmerge.load_expert(tmp_path / "out", "a", base)
    torch.testing.assert_close(found["y.weight"], torch.full((2, 2), 1.5 * 6e4))
