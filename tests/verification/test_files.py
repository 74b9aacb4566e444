"""Every byte of an output is known by a hash: what changed is found, and named."""

import hashlib
import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import covmerge
from covmerge.errors import CheckFailed, InputError
from covmerge.files.checkpoints.hashes import hash_file
from covmerge.files.stores.local import LocalFolder
from covmerge.front.publish import prepare


def save_models(folder, experts=2):
    """A base with companion files, and experts with a task head each."""
    generator = torch.Generator().manual_seed(0)
    base = {f"h.{n}.proj.weight": torch.randn(128, 96, generator=generator) for n in range(4)}
    base["h.0.norm.weight"] = torch.ones(96)
    (folder / "base").mkdir(parents=True)
    save_file(base, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text('{"hidden_size": 96}')
    (folder / "base" / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "base" / "1_Pooling").mkdir()
    (folder / "base" / "1_Pooling" / "config.json").write_text('{"pooling": "mean"}')
    paths = {}
    for number in range(experts):
        own = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in base.items()}
        own["classifier.weight"] = torch.randn(3, 96, generator=generator)
        paths[f"e{number}"] = folder / f"e{number}.safetensors"
        save_file(own, paths[f"e{number}"])
    return folder / "base", paths


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Outputs of every kind; tests work on copies."""
    folder = tmp_path_factory.mktemp("outputs")
    base, experts = save_models(folder)
    covmerge.merge(base, experts, "average", folder / "plain", shard_size="150KB")
    covmerge.merge(base, experts, "emr", folder / "masks")
    covmerge.extract(base, experts["e0"], folder / "adapter", 2)
    covmerge.compare(base, experts, ["average"], folder / "study")
    (folder / "study" / "average").rename(folder / "compared")
    return folder


KINDS = ("plain", "masks", "adapter", "compared")


@pytest.fixture
def output(merged, tmp_path):
    def copy(kind):
        return shutil.copytree(merged / kind, tmp_path / kind)

    return copy


def files(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def outcome(folder):
    """What is said of the files."""
    report = covmerge.verify(folder)
    (check,) = [check for check in report.checks if check.name == "files"]
    assert check.ok or not report.ok
    return check


def test_what_is_not_as_it_was_written_is_not_pushed(output):
    folder = output("plain")
    prepare(folder, "org/name")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckFailed, match=r"files: tokenizer\.json is not as it was written"):
        prepare(folder, "org/name")


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_and_every_tensor_has_its_hash(merged, kind):
    folder = merged / kind
    recorded = json.loads((folder / "covmerge.json").read_text())["files"]
    assert [*sorted(recorded)] == [name for name in files(folder) if name != "covmerge.json"]
    for name, record in recorded.items():
        content = (folder / name).read_bytes()
        assert record["sha256"] == hashlib.sha256(content).hexdigest()
        if name.endswith(".safetensors"):
            assert record["tensors"] == {
                key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
                for key, tensor in load_file(folder / name).items()
            }
        else:
            assert "tensors" not in record
    assert outcome(folder).ok


def test_all_parts_of_an_output_are_among_them(merged):
    recorded = json.loads((merged / "plain" / "covmerge.json").read_text())["files"]
    assert {
        "1_Pooling/config.json", "README.md", "config.json", "tokenizer.json",
        "heads/e0.safetensors", "heads/e1.safetensors", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    } == recorded.keys()  # fmt: skip
    recorded = json.loads((merged / "masks" / "covmerge.json").read_text())["files"]
    assert {"masks/e0.safetensors", "masks/rescalers.json"} < recorded.keys()
    recorded = json.loads((merged / "adapter" / "covmerge.json").read_text())["files"]
    assert {"adapter_model.safetensors", "adapter_config.json"} < recorded.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_any_file_is_found_and_named(output, kind):
    folder = output(kind)
    for name in files(folder):
        if name in ("covmerge.json", "README.md"):
            continue
        path = folder / name
        content = path.read_bytes()
        for place in (9, len(content) // 2):
            damaged = bytearray(content)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            check = outcome(folder)
            assert not check.ok and name in check.detail
        path.write_bytes(content)
    assert outcome(folder).ok


def test_a_changed_tensor_is_named_and_no_other(output):
    folder = output("plain")
    path = folder / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-40_000:] = bytes(40_000)
    path.write_bytes(content)
    assert outcome(folder).detail == (
        "model-00001-of-00002.safetensors is not as it was written: 'h.2.proj.weight'"
    )


def test_two_layers_whose_places_were_swapped(output):
    folder = output("compared")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    one, two = header["h.1.proj.weight"], header["h.3.proj.weight"]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(content[:8] + text.ljust(length) + content[8 + length :])
    assert load_file(path).keys() == header.keys() - {"__metadata__"}
    detail = outcome(folder).detail
    assert (
        detail == "model.safetensors is not as it was written: 'h.1.proj.weight', 'h.3.proj.weight'"
    )


def test_a_changed_header_alone_is_said(output):
    folder = output("compared")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "tf"})
    assert outcome(folder).detail == (
        "model.safetensors is not as it was written: its header differs, its tensors do not"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_or_no_file_is_named(output, tmp_path, kind):
    folder = output(kind)
    for turn, name in enumerate(files(folder)):
        if name == "covmerge.json":
            continue
        path = folder / name
        moved = path.rename(tmp_path / "moved")
        check = outcome(folder)
        assert check.ok == (name == "README.md") and f"{name} is missing" in check.detail
        # In turn, for all of them at every file would take long.
        lays = (path.mkdir, lambda p=path, m=moved: p.symlink_to(m))
        lays += (lambda p=path: p.symlink_to(p), lambda p=path: os.mkfifo(p))
        lays += (lambda p=path: p.symlink_to("/dev/zero"),)
        lays[turn % len(lays)]()
        check = outcome(folder)
        assert check.ok == (name == "README.md") and name in check.detail
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        moved.rename(path)
    assert outcome(folder).ok


@pytest.mark.parametrize("content", ["{}", '{"hidden_size": 97}', "", "\x00" * 19])
def test_a_config_that_was_replaced(output, content):
    folder = output("plain")
    (folder / "config.json").write_text(content)
    assert "config.json is not as it was written" in outcome(folder).detail


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model.safetensors",
        "model-00001-of-00001.safetensors",
        "pytorch_model.bin.index.json",
        "adapter_config.json",
        "heads/stranger.safetensors",
    ],
)
def test_weights_that_could_be_loaded_in_place_of_these(output, name):
    folder = output("plain")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / name)
    check = outcome(folder)
    assert not check.ok
    assert f"{name} is not of this merge, and could be loaded in its place" in check.detail


def test_what_people_add_and_edit_is_said_and_no_failure(output):
    folder = output("plain")
    for name in ("report.html", "evaluation.json", "modeling.py", "1_Pooling/model.safetensors"):
        (folder / name).write_text("x")
    (folder / "README.md").write_text("# My model\n")
    report = covmerge.verify(folder)
    assert report.ok
    assert outcome(folder).detail == (
        "8 files of 9 are as they were written; README.md was edited since; "
        "1_Pooling/model.safetensors was added since; modeling.py was added since"
    )


def test_an_output_of_an_older_covmerge_is_not_said_to_be_checked(output):
    folder = output("plain")
    manifest = json.loads((folder / "covmerge.json").read_text())
    del manifest["files"]
    (folder / "covmerge.json").write_text(json.dumps(manifest))
    report = covmerge.verify(folder)
    assert report.ok
    check = report.checks[0]
    assert (check.name, check.made) == ("files", False)
    assert "no hashes are recorded" in check.detail
    assert report.summary()["checks"][0]["made"] is False
    tensors = load_file(folder / "model-00001-of-00002.safetensors")
    tensors["h.0.proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    assert [c.name for c in covmerge.verify(folder).checks if not c.ok] == ["finite"]


def test_paths_out_of_the_folder_are_not_read(output, tmp_path):
    folder = output("plain")
    manifest = json.loads((folder / "covmerge.json").read_text())
    for name in ("../secret", "/etc/passwd", "a/b/c", "..", ""):
        changed = {**manifest, "files": {**manifest["files"], name: {"sha256": "0" * 64}}}
        (folder / "covmerge.json").write_text(json.dumps(changed))
        try:
            assert not covmerge.verify(folder).ok
        except InputError as error:
            assert "cannot be read as a covmerge manifest" in str(error)


def test_hashes_are_those_of_the_file_read_in_blocks(tmp_path):
    tensors = {
        "large": torch.randn(3000, 1100),
        "small": torch.ones(3, dtype=torch.bool),
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    seen = {name: [] for name in tensors}
    found = hash_file(
        LocalFolder(tmp_path),
        "m.safetensors",
        lambda header, _, block: seen[header.name].append(block),
    )
    content = (tmp_path / "m.safetensors").read_bytes()
    assert found.sha256 == hashlib.sha256(content).hexdigest()
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found.tensors[name] == hashlib.sha256(raw).hexdigest()
        whole = seen[name][0] if name == "scalar" else torch.cat(seen[name])
        assert torch.equal(whole, tensor)
    assert len(seen["large"]) > 1
