import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import covmerge
from covmerge.base.types import TensorHeader
from covmerge.errors import InputError
from covmerge.files.checkpoints.layout import plan_layout
from covmerge.files.stores.local import LocalFolder
from covmerge.run.export.files import write_indices, write_manifest


def save_heads(folder):
    """A base and two experts, of which each has a task head of its own."""
    base = {"fc.weight": torch.eye(4)}
    shared = torch.randn(4, 3)
    heads = {
        "code-v1.5": {"score.weight": shared.t(), "score.bias": torch.zeros(3)},
        "math": {"score.weight": shared, "other.weight": shared},
    }
    experts = {
        name: {"fc.weight": (1 + number) * torch.eye(4), **head}
        for number, (name, head) in enumerate(heads.items(), start=1)
    }
    rules = [{"match": pattern, "use": "head"} for pattern in ("score.*", "other.*")]
    return covmerge.merge(base, experts, "average", folder, rules=rules), heads


def test_heads_are_one_file_an_expert(tmp_path: Path) -> None:
    result, heads = save_heads(tmp_path / "out")
    folder = tmp_path / "out" / "heads"
    assert sorted(path.name for path in folder.iterdir()) == [f"{n}.safetensors" for n in heads]
    assert result.verification.ok
    in_memory, _ = save_heads(None)
    for name, head in heads.items():
        read = load_file(folder / f"{name}.safetensors")
        assert read.keys() == head.keys() == in_memory.heads[name].keys()
        assert all(torch.equal(read[key], tensor) for key, tensor in head.items())


def test_no_heads_give_no_folder(tmp_path: Path) -> None:
    base = {"fc.weight": torch.eye(4)}
    covmerge.merge(base, [{"fc.weight": 2 * torch.eye(4)}], "average", tmp_path / "out")
    assert not (tmp_path / "out" / "heads").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", ".hidden", "a\n", "ü", "/etc/x", "a\0"])
def test_expert_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    base = {"fc.weight": torch.eye(4)}
    with pytest.raises(InputError, match=r"cannot name an expert|spaces|control"):
        covmerge.merge(base, {name: {"fc.weight": 2 * torch.eye(4)}}, "average", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_index_says_where_every_tensor_lies(tmp_path: Path) -> None:
    layout = plan_layout([TensorHeader(n, (2, 3), torch.float16) for n in "cab"], 24)
    assert write_indices({"": layout}, LocalFolder(tmp_path)) == ["model.safetensors.index.json"]
    assert (tmp_path / "model.safetensors.index.json").read_text() == json.dumps(
        {
            "metadata": {"total_parameters": 18, "total_size": 36},
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00002-of-00002.safetensors",
                "c": "model-00001-of-00002.safetensors",
            },
        },
        indent=2,
    ) + "\n"


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    layout = plan_layout([TensorHeader("a", (1,), torch.int8)], 8)
    assert write_indices({"": layout}, LocalFolder(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    write_manifest(LocalFolder(tmp_path), {"b": (1, 2.5), "a": {"z": None, "y": "\udcff"}})
    assert (tmp_path / "covmerge.json").read_bytes() == (
        b'{\n "b": [\n  1,\n  2.5\n ],\n "a": {\n  "z": null,\n  "y": "\\udcff"\n }\n}\n'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(1.0)])
def test_a_manifest_holds_finite_json_only(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match=r"manifest\.layers\[1\]\.loss is"):
        write_manifest(LocalFolder(tmp_path), {"layers": [{}, {"loss": value}]})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
