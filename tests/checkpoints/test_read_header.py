"""Headers that lie: each is a CheckpointError that names the file, and nothing is allocated."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.open import open_checkpoint

Opens = Callable[[Path], Checkpoint]


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def packed(header, data=b"\0" * 24) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "empty file": (b"", "0 bytes long"),
    "seven bytes": (b"\0" * 7, "7 bytes long"),
    "length beyond the file": ((1000).to_bytes(8, "little") + b"{}", "cut short"),
    "length beyond the format": (b"\xff" * 8 + b"{}", "100000000 is the most"),
    "length of no header": (b"\0" * 8, "does not begin"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html></html>", "is it a safetensors file"),
    "not JSON": (packed(b"{"), "not valid JSON"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "not valid JSON"),
    "UTF-16": (packed('{"w": 1}'.encode("utf-16-le")), "not valid JSON"),
    "deep nesting": (packed(b'{"w": ' + b"[" * 100_000), "not valid JSON"),
    "an array": (packed([1]), "does not begin"),
    "a name twice": (
        packed(b'{"w": %s, "w": %s}' % ((json.dumps(entry()).encode(),) * 2)),
        "'w' twice",
    ),
    "half a surrogate": (packed(b'{"\\ud800": %s}' % json.dumps(entry()).encode()), "Unicode"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}, "w": entry()}), "__metadata__"),
    "metadata that is a list": (packed({"__metadata__": [], "w": entry()}), "__metadata__"),
    "an entry that is a number": (packed({"w": 3}), "has the entry 3"),
    "an entry without a dtype": (packed({"w": {"shape": [], "data_offsets": [0, 4]}}), "entry"),
    "an unknown key": (packed({"w": entry(stride=1)}), "stride"),
    "an unknown dtype": (packed({"w": entry("F7")}), "dtype 'F7'"),
    "a dtype that is a list": (packed({"w": entry(["F32"])}), "dtype"),
    "F4 of an odd size": (packed({"w": entry("F4", (2, 47))}), "no whole bytes"),
    "F6": (packed({"w": entry("F6_E2M3", (32,))}), "dequantise"),
    "a float size": (packed({"w": entry(shape=(2.0, 3))}), "shape"),
    "a boolean size": (packed({"w": entry(shape=(True, 6))}), "shape"),
    "a negative size": (packed({"w": entry(shape=(-2, -3))}), "shape"),
    "a size of many digits": (packed(b'{"w": {"shape": [%s]}}' % (b"9" * 5000)), "header"),
    "65 dimensions": (packed({"w": entry(shape=(1,) * 65)}), "64"),
    "sizes that overflow": (packed({"w": entry(shape=(2**40, 2**40))}), "overflow"),
    "sizes that overflow beside 0": (packed({"w": entry(shape=(0, 2**62, 4))}), "overflow"),
    "a huge tensor": (packed({"w": entry(shape=(2**50,), offsets=(0, 2**52))}), "cut short"),
    "one offset": (packed({"w": entry(offsets=(24,))}), "begin and an end"),
    "offsets backwards": (packed({"w": entry(offsets=(24, 0))}), "begin and an end"),
    "a size that disagrees": (packed({"w": entry(offsets=(0, 20))}, b"\0" * 20), "takes 24"),
    "a hole": (packed({"w": entry(offsets=(4, 28))}, b"\0" * 28), "leaves a hole"),
    "an overlap": (
        packed({"v": entry(), "w": entry(offsets=(4, 28))}, b"\0" * 28),
        "overlaps the tensor before",
    ),
    "two tensors at one place": (packed({"v": entry(), "w": entry()}), "overlaps"),
    "data cut short": (packed({"w": entry()}, b"\0" * 23), "cut short"),
    "data too long": (packed({"w": entry()}, b"\0" * 25), "header describes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_by_name(tmp_path: Path, name: str, opens: Opens) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message) as raised:
        opens(path)
    assert "hostile.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_a_header_of_only_metadata_is_an_empty_checkpoint(tmp_path: Path, opens: Opens) -> None:
    path = tmp_path / "empty.safetensors"
    path.write_bytes(packed({"__metadata__": {"format": "pt"}}, b""))
    assert dict(opens(path).headers) == {}


def test_metadata_may_be_null_as_mlx_writes_it(tmp_path: Path, opens: Opens) -> None:
    """MLX 0.32.4, `mx.save_safetensors` without metadata; safetensors 0.8.0 reads it."""
    path = tmp_path / "mlx.safetensors"
    path.write_bytes(packed({"__metadata__": None, "w": entry()}))
    assert list(opens(path).headers) == ["w"]


def test_headers_come_in_the_order_of_the_data(tmp_path: Path, opens: Opens) -> None:
    path = tmp_path / "order.safetensors"
    header = {"b": entry(shape=(3,), offsets=(12, 24)), "a": entry(shape=(3,), offsets=(0, 12))}
    header["empty"] = entry(shape=(0, 7), offsets=(12, 12))
    path.write_bytes(packed(header))
    assert list(opens(path).headers) == ["a", "empty", "b"]


TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.bias": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("valid") / "valid.safetensors"
    save_file(TENSORS, path)
    return path


def open_and_read_all(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.headers}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mutated_file_gives_tensors_or_a_checkpoint_error(
    valid: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(valid.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(header_end, len(content))))
        drop = data.draw(st.integers(0, 6))
        content[at : at + drop] = data.draw(
            st.one_of(st.binary(max_size=6), st.sampled_from([b"9" * 30, b'"', b"[", b"-1", b"0"]))
        )
    path = tmp_path_factory.mktemp("mutated") / "m.safetensors"
    path.write_bytes(content)
    try:
        tensors = open_and_read_all(path)
    except CheckpointError as error:
        assert "m.safetensors" in str(error)
        return
    assert sum(t.nbytes for t in tensors.values()) < len(content)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    value=values,
    key=st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w", "new"]),
)
def test_any_json_in_any_place_gives_tensors_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, value: object, key: str
) -> None:
    header = {"w": entry()}
    (header if key in {"__metadata__", "w", "new"} else header["w"])[key] = value
    path = tmp_path_factory.mktemp("json") / "m.safetensors"
    path.write_bytes(packed(header))
    try:
        tensors = open_and_read_all(path)
    except CheckpointError as error:
        assert "m.safetensors" in str(error)
        return
    assert sum(t.nbytes for t in tensors.values()) == 24
