import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covmerge.checkpoints.layout import plan_layout
from covmerge.errors import InputError, TensorError
from covmerge.export import write_heads, write_index, write_manifest
from covmerge.types import TensorHeader


def test_heads_are_one_file_an_expert(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    heads = {
        "code-v1.5": {"score.weight": shared.t(), "score.bias": torch.zeros(3)},
        "none": {},
        "math": {"score.weight": shared, "other.weight": shared},
    }
    paths = write_heads(tmp_path, heads)
    assert paths == tuple(tmp_path / "heads" / f"{n}.safetensors" for n in ("code-v1.5", "math"))
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [p.name for p in paths]
    for path, head in zip(paths, (heads["code-v1.5"], heads["math"]), strict=True):
        read = load_file(path)
        assert read.keys() == head.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in head.items())
    before = [path.read_bytes() for path in paths]
    write_heads(tmp_path, heads)  # a resumed merge does it again
    assert [path.read_bytes() for path in paths] == before


def test_no_heads_give_no_folder(tmp_path: Path) -> None:
    assert write_heads(tmp_path, {}) == write_heads(tmp_path, {"a": {}}) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", ".hidden", "a\n", "ü", "/etc/x", "a\0"])
def test_expert_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot name a file"):
        write_heads(tmp_path, {"fine": {"w": torch.ones(1)}, name: {"w": torch.ones(1)}})
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=r"'score.weight' is torch\.complex128"):
        write_heads(tmp_path, {"a": {"score.weight": torch.ones(1, dtype=torch.complex128)}})


def test_the_index_says_where_every_tensor_lies(tmp_path: Path) -> None:
    layout = plan_layout([TensorHeader(n, (2, 3), torch.float16) for n in "cab"], 24)
    path = write_index(layout, tmp_path)
    assert path == tmp_path / "model.safetensors.index.json"
    assert (
        path.read_text()
        == json.dumps(
            {
                "metadata": {"total_parameters": 18, "total_size": 36},
                "weight_map": {
                    "a": "model-00001-of-00002.safetensors",
                    "b": "model-00002-of-00002.safetensors",
                    "c": "model-00001-of-00002.safetensors",
                },
            },
            indent=2,
        )
        + "\n"
    )


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    assert write_index(plan_layout([TensorHeader("a", (1,), torch.int8)], 8), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, {"b": (1, 2.5), "a": {"z": None, "y": "\udcff"}})
    assert path.name == "covmerge.json"
    assert path.read_bytes() == (
        b'{\n "b": [\n  1,\n  2.5\n ],\n "a": {\n  "z": null,\n  "y": "\\udcff"\n }\n}\n'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(1.0)])
def test_a_manifest_holds_finite_json_only(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match=r"manifest\.layers\[1\]\.loss is"):
        write_manifest(tmp_path, {"layers": [{}, {"loss": value}]})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
