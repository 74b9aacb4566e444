"""Safetensors files: every dtype, whole and by rows."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from covmerge.base.types import TensorHeader
from covmerge.errors import CheckpointError
from covmerge.files.checkpoints.base import Checkpoint, fingerprint
from covmerge.files.checkpoints.header import read_into
from covmerge.files.checkpoints.layout import SAFETENSORS_NAMES, plan_layout
from covmerge.files.checkpoints.open import open_checkpoint
from covmerge.files.stores.local import local_file
from tests.advised import advice

Opens = Callable[[Path], Checkpoint]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.equal(bits(found), bits(expected))  # float8 has no equality of its own


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).to(dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


# Written by hand for the dtypes that the safetensors package itself cannot save.
@pytest.mark.parametrize("dtype", SAFETENSORS_NAMES, ids=str)
def test_every_dtype_whole_and_by_rows(tmp_path: Path, dtype: torch.dtype, opens: Opens) -> None:
    tensor = random_tensor(dtype, 7, 3, 2)
    (shard,) = plan_layout([TensorHeader("w", (7, 3, 2), dtype)], 2**20).shards
    path = tmp_path / "m.safetensors"
    path.write_bytes(shard.header + bits(tensor).numpy().tobytes())
    checkpoint = opens(path)
    assert checkpoint.headers["w"] == TensorHeader("w", (7, 3, 2), dtype)
    assert_same(checkpoint.read("w"), tensor)
    for start in range(8):
        for stop in range(start, 8):
            assert_same(checkpoint.read("w", range(start, stop)), tensor[start:stop])


def test_reads_what_the_safetensors_package_writes(tmp_path: Path, opens: Opens) -> None:
    tensors = {
        "matrix": torch.randn(5, 4),
        "half": torch.randn(3, dtype=torch.float16),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(12, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
        "naïve ✓": torch.ones(2, dtype=torch.bool),
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = opens(str(path))
    assert (checkpoint.config, checkpoint.folder) == (None, None)
    assert (checkpoint.source, checkpoint.notes) == (str(path), ())
    for name, tensor in load_file(path).items():
        assert_same(checkpoint.read(name), tensor)
    assert_same(checkpoint.read("no columns", range(1, 3)), torch.empty(2, 0))


def test_memory_is_the_callers_own(tmp_path: Path, opens: Opens) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    checkpoint = opens(path)
    checkpoint.read("w").fill_(1)
    assert checkpoint.read("w").sum() == 0


def test_a_default_device_is_not_followed(tmp_path: Path, opens: Opens) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(4)}, path)
    with torch.device("meta"):
        assert opens(path).read("w").device.type == "cpu"


@pytest.mark.parametrize(
    "rows", [range(-1, 2), range(0, 5), range(0, 4, 2), range(3, 1), range(5, 6)], ids=str
)
def test_rows_out_of_range_are_errors(tmp_path: Path, rows: range, opens: Opens) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(4, 2), "scalar": torch.tensor(1.0)}, path)
    said = advice("has no contiguous {} of rows: ask for rows inside its first dimension")
    with pytest.raises(CheckpointError, match=said):
        opens(path).read("w", rows)
    assert len(opens(path).read("w", range(4))) == 4
    with pytest.raises(CheckpointError, match="'scalar'"):
        opens(path).read("scalar", range(0, 1))
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        opens(path).read("v")


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 500)
    with pytest.raises(CheckpointError, match="changed while"):
        checkpoint.read("w")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        checkpoint.read("w")
    with pytest.raises(CheckpointError, match=r"m\.safetensors cannot be read any more"):
        fingerprint(checkpoint)
    # Its identity is what it was when it was opened, whatever became of it.
    (opened,) = checkpoint.identity()["files"].values()
    assert opened["size"] > 4000


def test_a_short_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"0123456789")
    with (
        local_file(path).open() as opened,
        pytest.raises(CheckpointError, match=advice("bytes early: fetch the file again")),
    ):
        read_into(memoryview(bytearray(16)), opened, 2, "here")
    path.write_bytes(bytes(range(18)))
    with local_file(path).open() as opened:
        read_into(whole := memoryview(bytearray(16)), opened, 2, "here")
    assert bytes(whole) == bytes(range(2, 18))


def test_bytes_that_are_no_booleans_are_refused(tmp_path: Path, opens: Opens) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"mask": torch.ones(4, dtype=torch.bool)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\x02")
    with pytest.raises(CheckpointError, match="'mask' is BOOL"):
        opens(path).read("mask")


def test_threads_may_read_at_once(tmp_path: Path, opens: Opens) -> None:
    tensor = torch.arange(64_000).reshape(640, 100)
    path = tmp_path / "m.safetensors"
    save_file({"w": tensor}, path)
    checkpoint = opens(path)
    blocks = [range(i, i + 10) for i in range(0, 640, 10)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rows: checkpoint.read("w", rows), blocks))
    assert torch.equal(torch.cat(found), tensor)


def test_no_files_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    before = len(list(Path("/dev/fd").iterdir()))
    checkpoints = [open_checkpoint(path) for _ in range(20)]
    for checkpoint in checkpoints:
        checkpoint.read("w")
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_identity_changes_with_the_file_and_fingerprint_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(4)}, path)
    first = open_checkpoint(path)
    identity, hashes = first.identity(), fingerprint(first)
    assert open_checkpoint(path).identity() == identity
    assert hashes.keys() == {"m.safetensors"}
    os.utime(path, ns=(1, 1))
    assert open_checkpoint(path).identity() != identity
    assert fingerprint(open_checkpoint(path)) == hashes
    save_file({"w": torch.ones(4)}, path)
    assert fingerprint(open_checkpoint(path)) != hashes
